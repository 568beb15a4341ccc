"""Intervals: errors and nearness by hand, farther is wider, how they are fitted."""

from __future__ import annotations

import runpy
from math import exp, log
from pathlib import Path

import pytest
from drawn import drawn_job, plans
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime import Job, Machine, estimate
from steptime.answer import interval
from steptime.answer.distance import distances
from steptime.answer.evidence import NEAREST, projected
from steptime.answer.interval import FAR, beyond, interval_at, mean_errors, scales, step_interval, weigh
from steptime.answer.measured import (
    AXES,
    HELD_ALIKE,
    HELD_PER_DOUBLING,
    FitRun,
    Measured,
    RunKind,
    RunPlace,
    measured,
    place_of,
)

ROOT = Path(__file__).parents[1]
PLAN = ROOT / "configs" / "llama3_70b.yaml"
KIND = RunKind("h100-sxm5-80", "bf16", "megatron-core", "megatron-core", "none")
OTHER = KIND._replace(software="torch", family="torch")
AT = dict(zip(AXES, (8192.0, 80.0, 4096.0, 1024.0, 8.0, 4.0, 1.0, 1.0), strict=True))
CONSTANTS = {
    "bandwidth": 0.5,
    "machine_step": 1.0,
    "other_side": 0.0,
    "per_distance": 0.0,
    "others": 100.0,
    "margins": {"machine": 0.3, "software": 0.2, "model": 0.1, "sequence": 0.1, "scale": 0.1},
}


def place(kind=KIND, **at):
    return RunPlace(kind, tuple((AT | at).values()))


def run(cell, ratio, where=None, vote=1.0):
    where = where or place()
    return FitRun(f"r{cell}", cell, cell, "step", where, vote, log(ratio))


def plan_with(*sets):
    return Job.load(PLAN, sets=sets)


# --- by hand ---


def test_mean_errors_by_hand():
    """Weights 1, 1, 2: faster (1 * 0.2) / 4, slower (1 * 0.1 + 2 * 0.3) / 4; the other side counts as 0."""
    assert mean_errors([1.0, 1.0, 2.0], [-0.2, 0.1, 0.3]) == pytest.approx((0.05, 0.175))


def test_factors_by_hand():
    """Ten runs of one profile with scores 1 to 10, and again 11 to 20 without their series, all slower: nine tenths of 20 is the
    18th; none is faster. Another profile sees the same runs as those of others."""
    runs = [run(i, 1.1)._replace(score=i + 1.0, new_score=i + 11.0) for i in range(10)]
    found = Measured(runs, CONSTANTS)
    assert found.factors(KIND) == (0.0, 18.0)
    assert found.factors(OTHER) == (0.0, 18.0)
    faster = [one._replace(score=-one.score, new_score=-one.new_score) for one in runs]
    assert Measured(faster, CONSTANTS).factors(KIND) == (18.0, 0.0)


def test_the_factor_of_a_profile_shrinks_to_that_of_all():
    """Ten runs of torch score 9, ninety of others 1. All count as 100: the ten have 10 + 10 of 110 votes, more than a tenth.

    To the others, whose ninety count twice, they are 10 of 190, less than a tenth. Nine of 1,000 have 0.9 + 9 of 109."""

    def runs(of_torch, others):
        scores = [9.0] * of_torch + [1.0] * others
        places = [place(OTHER)] * of_torch + [place()] * others
        made = enumerate(zip(places, scores, strict=True))
        return Measured([run(i, 1.1, at)._replace(score=s, new_score=s) for i, (at, s) in made], CONSTANTS)

    assert runs(10, 90).factors(OTHER) == (0.0, 9.0)
    assert runs(10, 90).factors(KIND) == (0.0, 1.0)
    assert runs(9, 991).factors(OTHER) == (0.0, 1.0)


def test_the_factor_of_memory_is_that_of_a_code_base_and_a_kind_of_layers():
    """Ten dense runs score 1 to 10, ten with experts 11 to 20. Beside one vote of all twenty, each run alike has 1.05 votes, each
    other 0.05, of 11: the 9.9th is the tenth dense run's; with experts 0.5 + 9 * 1.05 = 9.95 end in the ninth's, 19. Another
    profile of the family is alike, since the same code holds the same bytes."""
    constants = CONSTANTS | {"alike": HELD_ALIKE, "others": 1.0}
    kinds = [KIND] * 10 + [KIND._replace(layers="moe")] * 10
    runs = [run(i, 1.1, place(kind))._replace(score=i + 1.0, new_score=i + 1.0) for i, kind in enumerate(kinds)]
    found = Measured(runs, constants)
    assert found.factors(KIND) == found.factors(KIND._replace(software="nemo")) == (0.0, 10.0)
    assert found.factors(kinds[-1]) == (0.0, 19.0)
    assert Measured(runs, CONSTANTS | {"others": 1.0}).factors(KIND) == (0.0, 18.0)


def test_scales_by_hand():
    """Half of each side is the mean of both, (0.02 + 0.06) / 2; a quarter more for each unit of distance, up to 3."""
    constants = {"other_side": 0.5, "per_distance": 0.25}
    assert scales((0.02, 0.06), 0.0, constants) == pytest.approx((0.03, 0.05))
    assert scales((0.02, 0.06), 2.0, constants) == pytest.approx((0.045, 0.075))
    assert scales((0.02, 0.06), 9.0, constants) == scales((0.02, 0.06), FAR, constants)


def test_distances_by_hand():
    """hidden 1 per doubling, devices 0.3, sequences 0.5; a sibling accelerator half a machine step, full recomputation 1."""
    found = Measured([run(0, 1.0), run(1, 1.0, place(hidden=4096.0, devices=256.0, seqlen=8192.0))], CONSTANTS)
    assert distances(place(), found) == pytest.approx([0.0, 1.0 + 2 * 0.3 + 0.5])
    sibling = KIND._replace(accelerator="h200-sxm5-141", recompute="full")
    assert distances(place(sibling), found)[0] == pytest.approx(0.5 + 1.0)
    assert distances(place(KIND._replace(accelerator="h100-pcie-80")), found)[0] == pytest.approx(0.25)
    release = KIND._replace(software="megatron-core@0.9", precision="fp8_delayed")
    assert distances(place(release), found)[0] == pytest.approx(0.5 + 1.0)


def test_memory_is_as_near_on_other_devices():
    """What adds no margin is no distance: accelerator, devices, degrees, micro-batch. Twice the layers and tokens: 0.3 + 0.5."""
    constants = CONSTANTS | {"machine_step": 0.0, "per_doubling": HELD_PER_DOUBLING}
    found = Measured([run(0, 1.0)], constants)
    elsewhere = KIND._replace(accelerator="mi300x")
    assert distances(place(elsewhere, devices=8.0, tp=1.0, pp=1.0, cp=2.0, microbatch=4.0), found) == [0.0]
    found = Measured([run(0, 1.0), run(1, 1.0, place(n_layers=160.0, seqlen=8192.0))], constants)
    assert distances(place(), found) == pytest.approx([0.0, 0.8])


def test_memory_of_megatron_of_2021_rests_on_megatron_core():
    """One code base: half a step, as for an unmeasured profile of a measured family, not another trainer's runs."""
    old = place(KIND._replace(software="megatron-2021", family="megatron-2021"), hidden=2048.0)
    found = interval_at("memory", old)
    assert [axis.amount for axis in found.beyond if axis.margin == "software"] == [0.5]
    base = projected(found.place, found.found, distances(found.place, found.found))
    assert base.kind.profile == "megatron-core"


def test_weights_by_hand():
    """A run at distance 0 weighs 1 and its own groups' shares; one of other software only the share of all: 1 of n + 10.

    Shares are 0.3 (architecture, width and family alike), 0.1 (family) and 0.05 (any)."""
    other = KIND._replace(software="fsdp2", family="fsdp2")
    found = Measured([run(0, 1.0), run(1, 1.1, place(other))], CONSTANTS)
    near, far = weigh(place(), found, distances(place(), found))
    assert near == pytest.approx(1.0 + 0.3 / 11 + 0.1 / 11 + 0.05 / 12)
    assert far == pytest.approx(exp(-2.0 / 0.5) + 0.05 / 12)


def test_one_measured_run_is_the_whole_interval():
    """From the estimate, which is inside, to the run, whose score is 1: it was as far off as the runs near it."""
    found = Measured([run(0, 1.2)], CONSTANTS)
    here = interval.interval(place(), found)
    assert (exp(here.low), exp(here.high), here.evidence.n) == (1.0, pytest.approx(1.2), 1)
    assert (here.beyond, here.evidence.word) == ([], "measured nearby")


def test_margins_add_in_squares():
    """Two doublings of devices at 0.1 and an accelerator of another architecture at 0.3: sqrt(2 * 0.01 + 0.09), and 0.02."""
    found = Measured([run(0, 1.0)], CONSTANTS)
    here = interval.interval(place(KIND._replace(accelerator="mi300x"), devices=4096.0), found)
    assert here.high == pytest.approx(0.02 + (2 * 0.01 + 0.09) ** 0.5)
    assert here.low == -here.high


@pytest.mark.parametrize(
    ("what", "text", "plan"),
    [
        (
            "inferred",
            "no measured run states accelerator h100-sxm5-80: inferred from step times",
            ["hardware=grand-teton-h100-700w"],
        ),
        ("adapters", "no measured run with adapters over frozen weights", ["model.lora={rank: 8}", "parallelism.tp=1"]),
    ],
)  # fmt: skip
def test_inferred_accelerators_and_adapters_widen(what, text, plan):
    """0.04 beyond the least width of 0.02, and it is named; a job without adds nothing."""
    found = Measured([run(0, 1.0)], CONSTANTS | {"margins": {"inferred": 0.04, "layers": 0.04}})
    here = interval.interval(place()._replace(**{what: True}), found)
    assert (here.low, here.high) == (pytest.approx(-0.06), pytest.approx(0.06))
    assert [axis.text for axis in here.beyond] == [text]
    assert interval.interval(place(), found).high == 0.02
    assert getattr(place_of(plan_with(*plan)), what)
    assert not getattr(place_of(plan_with("hardware=grand-teton-h100")), what)


# --- what was not measured, in words ---


def words(where, runs):
    found = Measured(runs, CONSTANTS)
    away = distances(where, found)
    return [axis.text for axis in beyond(where, projected(where, found, away), found, away) if axis.text]


def test_what_was_not_measured_is_named():
    runs = [run(i, 1.0, place(devices=devices)) for i, devices in enumerate((64.0, 10752.0))]
    assert words(place(), runs) == []
    assert words(place(devices=16384.0), runs) == ["16,384 devices, measured up to 10,752"]
    assert words(place(devices=1.0), runs) == ["1 devices, measured from 64"]
    assert words(place(hidden=16384.0), runs) == ["hidden size 16,384, measured up to 8,192"]
    assert words(place(seqlen=131072.0), runs) == ["sequences of 131,072 tokens, measured up to 4,096"]
    nvl = KIND._replace(accelerator="h100-nvl-94")
    assert words(place(nvl), runs) == ["no run on h100-nvl-94 among those behind the interval; nearest h100-sxm5-80"]
    fp8 = KIND._replace(precision="mxfp8")
    assert words(place(fp8), runs) == ["no measured run in mxfp8 on h100-sxm5-80"]
    assert words(place(KIND._replace(layers="hybrid")), runs) == ["no measured run with Mamba layers"]
    plain = KIND._replace(software="torch", family="torch")
    assert words(place(plain), runs) == ["no measured run of torch; nearest megatron-core"]
    a100 = run(2, 1.0, place(KIND._replace(accelerator="a100-sxm4-80", software="fsdp2", family="fsdp2")))
    fsdp = KIND._replace(software="fsdp2", family="fsdp2")
    assert words(place(fsdp), [*runs, a100]) == ["no measured run of fsdp2 on Hopper"]


def test_a_machine_of_ones_own_has_an_interval_that_names_it():
    device = {
        "name": "own-chip",
        "peak_flops": {"bf16": "500 TFLOP/s"},
        "memory_bytes": "96 GiB",
        "usable_memory_bytes": "95 GiB",
        "memory_bytes_per_s": "3000 GB/s",
    }
    tiers = [{"name": "fabric", "bytes_per_s": "50 GB/s", "latency_s": "5 us"}]
    own = Machine(name="own", accelerator=device, devices_per_node=8, tiers=tiers)
    time = estimate(
        plan_with().replace(hardware={"node_type": own}, **{"performance.software": "torch", "parallelism.vpp": 1})
    ).time
    assert time.basis.evidence == "extrapolated"
    assert time.basis.extrapolation[0].startswith("no run on own-chip among those behind the interval; nearest ")
    assert 0.0 < time.step_s_p10 < time.step_s_p90


# --- properties ---


@settings(deadline=None, max_examples=40)
@given(plans())
def test_every_plan_has_an_interval(plan):
    """Positive and finite, with the estimate inside."""
    answer = estimate(drawn_job(plan))
    time, memory = answer.time, answer.memory
    assert 0.0 < time.step_s_p10 <= time.step_s <= time.step_s_p90 < float("inf")
    reserved = memory.peak_reserved_bytes
    assert 0.0 < memory.peak_reserved_bytes_p10 <= reserved <= memory.peak_reserved_bytes_p90 < float("inf")
    assert (time.basis.evidence == "measured nearby") <= (time.basis.n >= 1)
    assert 1 <= len(time.basis.nearest) <= NEAREST
    assert (time.basis.evidence == "extrapolated") == bool(time.basis.extrapolation)


PLACES = st.sampled_from([run.place for run in measured("step").runs])


def never_narrower(near, far):
    return far.high >= near.high and far.low <= near.low and far.evidence.n <= near.evidence.n


STEPS = st.dictionaries(st.sampled_from(range(len(AXES))), st.integers(0, 6), min_size=1)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(["step", "memory"]), STEPS, STEPS, st.booleans(), PLACES)
def test_farther_is_never_narrower(of, first, second, down, where):
    """From the end of what was measured on, doublings on any axes, at either end, never narrow and never have more runs nearby.

    A step time's interval is wider with each; what a job holds does not depend on the number of devices."""
    found = measured(of)
    columns = list(zip(*(run.place.at for run in found.runs), strict=True))
    ends = [min(column) if down else max(column) for column in columns]

    def at(steps):
        values = [
            ends[i] * (0.5 if down else 2.0) ** steps[i] if i in steps else value for i, value in enumerate(where.at)
        ]
        return interval_at(of, where._replace(at=tuple(values)))

    near = at(dict.fromkeys([*first, *second], 0) | first)
    far = at({i: first.get(i, 0) + second.get(i, 0) for i in [*first, *second]})
    assert never_narrower(near, far)
    if of == "step" and any(second.values()):
        assert far.high > near.high
        assert far.evidence.word == "extrapolated"


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 3), st.integers(0, 6), PLACES)
def test_wider_groups_larger_bubbles_and_strange_devices_are_never_narrower(which, doublings, where):
    """The same for tp over several nodes, bubbles, and accelerators slower or faster than any that was measured."""
    ends = measured("step").constants["reach"]

    def at(steps):
        reach = tuple(end * 2.0**steps if i == which else min(end, 1.0) for i, end in enumerate(ends))
        return interval_at("step", where._replace(reach=reach))

    assert never_narrower(at(doublings), at(doublings + 1))


@settings(deadline=None, max_examples=60)
@given(PLACES, st.sampled_from([{"accelerator": "own-chip"}, {"software": "own", "family": "own"}]))
def test_what_nobody_measured_is_never_narrower_than_what_it_is_nearest_to(where, own):
    """An accelerator or a framework of its own, held against the measured one that stands in its place."""
    kind = where.kind._replace(**own)
    far, found = interval_at("step", where._replace(kind=kind)), measured("step")
    base = projected(where._replace(kind=kind), found, distances(where._replace(kind=kind), found))
    assert never_narrower(interval_at("step", base), far)
    assert far.evidence.word == "extrapolated"


def test_plans_off_the_map_are_wide():
    """A CPU, a pipeline of mostly bubble, tp over four nodes: each wider than the plan that it differs from."""
    base = step_interval(plan_with())

    def width(*sets):
        found = step_interval(plan_with(*sets))
        return found.high - found.low

    here = base.high - base.low
    assert width("hardware=cpu-2core") > 2.0 * here
    assert (
        width(
            "data.gbs=32",
            "parallelism.dp=1",
            "parallelism.pp=16",
            "parallelism.vpp=1",
            "parallelism.tp=1",
            "data.gbs=2",
        )
        > here
    )
    assert width("parallelism.tp=32", "parallelism.dp=8", "parallelism.vpp=5") > here


def test_the_interval_of_a_job_scales_with_its_estimate():
    found, time = step_interval(plan_with()), estimate(plan_with()).time
    assert time.step_s_p10 == pytest.approx(time.step_s * exp(found.low))
    assert time.step_s_p90 == pytest.approx(time.step_s * exp(found.high))


def test_leaving_a_run_out_leaves_its_cell_out():
    found = measured("step")
    first = found.runs[0]
    rest = found.without(first.id)
    assert first.cell not in {run.cell for run in rest.runs}
    assert found.without("no such run") is found
    assert {run["id"] for run in interval_at("step", first.place, first.id).evidence.nearest} <= {
        run.id for run in rest.runs
    }


def test_a_job_is_where_its_row_is():
    where = place_of(plan_with("parallelism.dp=16", "data.gbs=1024"))
    assert where.kind == KIND
    assert dict(zip(AXES, where.at, strict=True)) == AT | {"devices": 512.0, "seqlen": 8192.0}


def test_fitting_is_reproducible():
    """A made-up list by hand: 40 runs at one place, 0 to 39 % slower. Nine tenths of 40 is the 36th, off by 0.35, where the
    other 39 are off by (7.80 - 0.35) / 39 in the mean, of which a share goes to the other side."""
    script = runpy.run_path(str(ROOT / "benchmarks" / "fit_intervals.py"))
    runs, constants = script["fit"]([run(i, exp(0.01 * i), vote=1.0) for i in range(40)])
    assert (runs, constants) == script["fit"]([run(i, exp(0.01 * i), vote=1.0) for i in range(40)])
    kept = 1.0 - constants["other_side"] / 2.0
    assert Measured(runs, constants).factors(KIND) == (0.0, pytest.approx(0.35 * 39 / 7.45 / kept, abs=1e-4))
    assert all(value >= script["FLOOR"] for value in constants["margins"].values())


@pytest.mark.parametrize("of", ["step", "memory"])
def test_runs_without_a_cell_are_as_if_the_others_had_been_read_alone(of):
    """Bit for bit: what they take from all runs is what they would compute themselves."""
    every = measured(of)
    for one in every.runs[::60]:
        others = Measured((run for run in every.runs if run.cell != one.cell), every.constants)
        found, alone = (interval.interval(one.place, runs) for runs in (every.without(one.id), others))
        assert len(found.away) == len(others.runs) < len(every.runs)
        assert found.away == alone.away
        assert (found.low, found.high, found.beyond) == (alone.low, alone.high, alone.beyond)
        for side, same in zip(found.found.ranked, others.ranked, strict=True):
            assert [row[:2] for row in side] == [row[:2] for row in same]
