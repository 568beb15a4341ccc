"""Intervals: quantiles and nearness by hand, farther is wider, coverage of the shipped runs, the data file."""

from __future__ import annotations

import json
import runpy
from math import exp, log
from pathlib import Path

import pytest
from drawn import job as drawn_job
from drawn import plans
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime import Job, Machine, estimate
from steptime.answer import interval
from steptime.answer.interval import beyond, interval_at, quantile, step_interval, weigh
from steptime.answer.measured import (
    AXES,
    INTERVALS_FILE,
    FitRun,
    Measured,
    RunKind,
    RunPlace,
    distances,
    measured,
    place_of,
    scaled,
)
from steptime.validation import interval_coverage, judgement
from steptime.validation.error_summary import headline

ROOT = Path(__file__).parents[1]
PLAN = ROOT / "configs" / "llama3_70b.yaml"
KIND = RunKind("h100-sxm5-80", "bf16", "megatron-core", "megatron-core", "none")
AT = dict(zip(AXES, (8192.0, 80.0, 4096.0, 1024.0, 8.0, 4.0, 1.0, 1.0), strict=True))
CONSTANTS = {
    "bandwidth": 0.5,
    "machine_step": 1.0,
    "tails": {"": 0.1},
    "margins": {"machine": 0.3, "software": 0.2, "model": 0.1, "sequence": 0.1, "scale": 0.1},
}


def place(kind=KIND, **at):
    return RunPlace(kind, tuple((AT | at).values()))


def run(cell, ratio, where=None, vote=1.0):
    where = where or place()
    return FitRun(f"r{cell}", cell, "step", where, scaled(where.at), vote, log(ratio))


def job(*sets):
    return Job.load(PLAN, sets=sets)


# --- by hand ---


def test_quantiles_by_hand():
    """Middles of the weights 1, 1, 2 of 4 stand at 1/8, 3/8, 6/8: a half lies a third of the way from the second to the third."""
    values, weights = [0.0, 1.0, 4.0], [1.0, 1.0, 2.0]
    assert quantile(values, weights, 0.5) == pytest.approx(1.0 + 3.0 / 3.0)
    assert (quantile(values, weights, 0.0), quantile(values, weights, 1.0)) == (0.0, 4.0)
    assert quantile(values, weights, 0.125) == 0.0


def test_distances_by_hand():
    """hidden 1 per doubling, devices 0.3, sequences 0.5; a sibling accelerator half a machine step, full recomputation 1."""
    found = Measured([run(0, 1.0), run(1, 1.0, place(hidden=4096.0, devices=256.0, seqlen=8192.0))], CONSTANTS)
    assert distances(place(), found) == pytest.approx([0.0, 1.0 + 2 * 0.3 + 0.5])
    sibling = KIND._replace(accelerator="h200-sxm5-141", recompute="full")
    assert distances(place(sibling), found)[0] == pytest.approx(0.5 + 1.0)
    assert distances(place(KIND._replace(accelerator="h100-pcie-80")), found)[0] == pytest.approx(0.25)
    release = KIND._replace(software="megatron-core@0.9", precision="fp8_delayed")
    assert distances(place(release), found)[0] == pytest.approx(0.5 + 1.0)


def test_weights_by_hand():
    """A run at distance 0 weighs 1 and its own groups' shares; one of other software only the share of all: 1 of n + 10.

    Shares are 0.3 (architecture, width and family alike), 0.1 (family) and 0.05 (any)."""
    other = KIND._replace(software="fsdp2", family="fsdp2")
    found = Measured([run(0, 1.0), run(1, 1.1, place(other))], CONSTANTS)
    near, far = weigh(place(), found, distances(place(), found))
    assert near == pytest.approx(1.0 + 0.3 / 11 + 0.1 / 11 + 0.05 / 12)
    assert far == pytest.approx(exp(-2.0 / 0.5) + 0.05 / 12)


def test_one_measured_run_is_the_whole_interval():
    """From the estimate, which is inside, to the run; beyond that what makes an interval as wide as two measurements differ."""
    found = Measured([run(0, 1.2)], CONSTANTS)
    here = interval.interval(place(), found)
    assert (exp(here.low), exp(here.high), here.n) == (1.0, pytest.approx(1.2 * exp(0.02)), 1)
    assert here.beyond == []


def test_margins_add_in_squares():
    """Two doublings of devices at 0.1 and an accelerator of another architecture at 0.3: sqrt(2 * 0.01 + 0.09), and 0.02."""
    found = Measured([run(0, 1.0)], CONSTANTS)
    here = interval.interval(place(KIND._replace(accelerator="mi300x"), devices=4096.0), found)
    assert here.high == pytest.approx(0.02 + (2 * 0.01 + 0.09) ** 0.5)
    assert here.low == -here.high


# --- what was not measured, in words ---


def words(where, runs):
    found = Measured(runs, CONSTANTS)
    return [axis.text for axis in beyond(where, found, distances(where, found))]


def test_what_was_not_measured_is_named():
    runs = [run(i, 1.0, place(devices=devices)) for i, devices in enumerate((64.0, 10752.0))]
    assert words(place(), runs) == []
    assert words(place(devices=16384.0), runs) == ["scale: 16,384 devices, measured up to 10,752"]
    assert words(place(devices=1.0), runs) == ["scale: 1 device, measured from 64"]
    assert words(place(hidden=16384.0), runs) == ["model: hidden size 16,384, measured up to 8,192"]
    assert words(place(seqlen=131072.0), runs) == ["model: sequences of 131,072 tokens, measured up to 4,096"]
    nvl = KIND._replace(accelerator="h100-nvl-94")
    assert words(place(nvl), runs) == ["machine: no measured run on h100-nvl-94; nearest h100-sxm5-80"]
    fp8 = KIND._replace(precision="mxfp8")
    assert words(place(fp8), runs) == ["machine: no measured run in mxfp8 on h100-sxm5-80"]
    plain = KIND._replace(software="torch", family="torch")
    assert words(place(plain), runs) == ["software: no measured run of torch; nearest megatron-core"]
    a100 = run(2, 1.0, place(KIND._replace(accelerator="a100-sxm4-80", software="fsdp2", family="fsdp2")))
    fsdp = KIND._replace(software="fsdp2", family="fsdp2")
    assert words(place(fsdp), [*runs, a100]) == ["software: no measured run of fsdp2 on Hopper"]


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
        job().replace(hardware={"node_type": own}, **{"performance.software": "torch", "parallelism.vpp": 1})
    ).time
    assert time.basis.extrapolation[0].startswith("machine: no measured run on own-chip; nearest ")
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
    assert time.basis.n >= 1
    assert 1 <= len(time.basis.nearest) <= interval.NEAREST


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["hidden", "seqlen", "devices"]),
    st.integers(0, 6),
    st.booleans(),
    st.sampled_from([run.place for run in measured("step").runs]),
)
def test_farther_is_wider(axis, doublings, down, where):
    """Beyond what was measured, on either side, another doubling always widens the interval at both ends."""
    found = measured("step")
    index = AXES.index(axis)
    column = [run.place.at[index] for run in found.runs]
    end, factor = (min(column), 0.5) if down else (max(column), 2.0)

    def at(steps):
        values = list(where.at)
        values[index] = end * factor**steps
        return interval_at("step", RunPlace(where.kind, tuple(values)))

    near, far = at(doublings), at(doublings + 1)
    assert far.high > near.high
    assert far.low < near.low


def test_the_interval_of_a_job_scales_with_its_estimate():
    found, time = step_interval(job()), estimate(job()).time
    assert time.step_s_p10 == pytest.approx(time.step_s * exp(found.low))
    assert time.step_s_p90 == pytest.approx(time.step_s * exp(found.high))


def test_leaving_a_run_out_leaves_its_cell_out():
    found = measured("step")
    first = found.runs[0]
    rest = found.without(first.id)
    assert first.cell not in {run.cell for run in rest.runs}
    assert found.without("no such run") is found
    assert {run["id"] for run in interval_at("step", first.place, first.id).nearest} <= {run.id for run in rest.runs}


# --- the shipped runs ---


@pytest.fixture(scope="module")
def judged():
    return headline(judgement.judge_shipped())


@pytest.fixture(scope="module")
def lines(judged):
    return interval_coverage.lines(judged, "step")


def test_the_intervals_cover_test_rows(lines):
    """80 % is meant. Over n rows of about n / 2 cells the share has a standard error of 0.4 / sqrt(n / 2): three of them."""
    found = [line for line in lines if line["split"] == "test"]
    assert found[0]["what"] == "all"
    for line in found:
        assert abs(line["covered"] - 0.8) < 0.02 + 3.0 * 0.4 / (line["rows"] / 2) ** 0.5, line
    assert found[0]["width"] < 0.6


def test_left_out_cells_are_covered_as_they_were_fitted(lines):
    everything = next(line for line in lines if (line["what"], line["split"]) == ("all", "fit"))
    assert 0.75 <= everything["covered"] <= 0.85


def test_memory_of_test_rows_is_covered(judged):
    found = next(line for line in interval_coverage.lines(judged, "memory") if line["split"] == "test")
    assert 0.6 <= found["covered"] <= 0.98


def test_the_file_holds_the_fit_rows_and_none_else(judged):
    """Ids, kinds and votes; not the residuals, which move with the model."""
    document = json.loads(INTERVALS_FILE.read_bytes())
    for of, counted in (("step", "measured_step_s"), ("memory", "measured_bytes")):
        fit = [j for j in judged if j.row.text("split") == "fit" and getattr(j, counted) and j.place]
        ids = {j.row.id for j in fit if of == "step" or j.metric in {"allocated", "reserved"}}
        if of == "memory":  # the jobs of Megatron-LM's own tests stand beside the headline of the step time
            tests = [
                j for j in judgement.judge_shipped() if j.row.text("split") == "fit" and j.held and not j.held.apart
            ]
            ids |= {j.row.id for j in tests}
        runs = measured(of).runs
        assert {run.id for run in runs} == ids
        assert document[of]["rows"] == len(runs)
        assert [run.log_ratio for run in runs] == sorted(run.log_ratio for run in runs)
        for cell in {run.cell for run in runs}:
            assert sum(run.vote for run in runs if run.cell == cell) == pytest.approx(1.0, abs=0.01)


def test_residuals_are_those_of_the_model(judged):
    """The file is made anew when the model changes: python benchmarks/fit_intervals.py DATE."""
    known = {run.id: run.log_ratio for run in measured("step").runs}
    stale = [
        j.row.id
        for j in judged
        if j.row.id in known and abs(known[j.row.id] - log(j.measured_step_s / j.predicted_step_s)) > 1e-3
    ]
    assert stale == []


def test_a_job_is_where_its_row_is():
    where = place_of(job("parallelism.dp=16", "data.gbs=1024"))
    assert where.kind == KIND
    assert dict(zip(AXES, where.at, strict=True)) == AT | {"devices": 512.0, "seqlen": 8192.0}


def test_fitting_is_reproducible():
    """Constants of a made-up list by hand: one source, residuals spread evenly, so a tenth lies beyond either tail."""
    script = runpy.run_path(str(ROOT / "benchmarks" / "fit_intervals.py"))
    runs = [run(i, exp(0.01 * i), vote=1.0) for i in range(40)]
    constants = script["fit"](runs)
    assert constants == script["fit"](runs)
    assert constants["tails"][""] == pytest.approx(0.1, abs=0.03)
    assert all(value >= script["FLOOR"] for value in constants["margins"].values())
