"""The search: its answer beside every layout walked one by one."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from search_jobs import FLEETING, MODEL, best_of, blocks_of, job_of, plan

from steptime import Job, estimate
from steptime.base.config import ConfigError
from steptime.search.changes import fewest
from steptime.search.front import SHOWN, corners, shown
from steptime.search.run import run, search
from steptime.search.screen import Screen
from steptime.search.search import Asked
from steptime.search.space import Axes, Counts, chunk_counts, divisors, uneven_chunks


def test_no_good_layout_is_lost():
    """All layouts of a small space walked: the best is found, and none of the best 1 % is missing of the screen's first 2 %."""
    job = job_of(
        model=MODEL,
        parallelism={"tp": 1, "pp": 2, "vpp": 3, "dp": 4},
        performance={"activation_checkpointing_type": "none"},
        data={"gbs": 32, "seqlen": 2048, "microbatch_sz": 1},
        hardware="dgx-h100",
    )
    axes = Axes({"cp": (1,), "sp": (True,), "performance.activation_checkpointing_type": ("none", "full")})
    space = [block for _, block in Screen(job, axes, Counts()).blocks(8, 32)]
    seconds, screened, fits = [], [], []
    for block in space:
        for choice in range(len(block.choices)):
            for row in np.flatnonzero(block.legal):
                found = estimate(job.replace(**block.changes(choice, int(row))))
                seconds.append(found.step_s)
                fits.append(found.memory.fits)
                screened.append(float(block.step_s[choice, row]))
    answer = run(job, Asked((8,), (32,), axes))
    assert len(seconds) == answer.counts.evaluated > 400
    kept = np.flatnonzero(fits)
    order = kept[np.argsort(np.array(seconds)[kept])]
    ranked = kept[np.argsort(np.array(screened)[kept])]
    one, two = -(-len(kept) // 100), -(-len(kept) // 50)
    assert set(order[:one]) <= set(ranked[: max(two, 5)])
    assert best_of(answer).step_s == min(np.array(seconds)[kept])


def test_a_layout_keeps_its_number_of_devices():
    """8 devices: tp 2 leaves dp 4 of dp 8; the layout itself is the one that was estimated."""
    job = plan({"dp": 8})
    best = best_of(run(job, Asked((8,), (64,), Axes({"tp": (1,), "pp": (1,), "cp": (1,)}))))
    assert best.job == best.estimate.job
    other = best.job.replace(**{"parallelism.tp": 2}).parallelism
    assert (other.tp, other.dp, other.devices) == (2, 4, 8)


def test_every_row_runs_as_its_settings_say(tmp_path, capsys):
    """The `--set`s of a row, behind 3dtrn and the plan, give its step, MFU and memory to the bit."""
    import json
    import shlex

    from steptime.commands.cli import main

    file = tmp_path / "plan.yaml"
    file.write_text(
        "model: gpt3-1.3b\nparallelism: {tp: 2, pp: 2, dp: 4}\n"
        "performance: {activation_checkpointing_type: full}\n"
        "data: {gbs: 64, seqlen: 2048, microbatch_sz: 1}\nhardware: dgx-a100-80\n"
    )
    assert main(["search", str(file), "--json", "--top", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = [*found["best"], *found["pareto"], *(rows[-1] for rows in found["choices"].values() if rows)]
    assert len(rows) > 8
    for row in {row["set"]: row for row in rows}.values():
        assert main([str(file), "--json", *shlex.split(row["set"])]) == 0
        alone = json.loads(capsys.readouterr().out)
        assert alone["time"]["step_s"] == row["step_s"]
        assert alone["throughput"]["mfu"] == row["mfu"]
        assert alone["memory"]["peak_reserved_bytes"] == row["peak_reserved_bytes"]
        assert alone["config"] == row["config"]
        rerun = Job.load(json.dumps(row["config"]))
        assert estimate(rerun).step_s == row["step_s"]


def test_counts_of_a_small_space():
    """8 devices, 12 layers, batch 8, by hand: tp, cp, pp are powers of two whose product divides 8.

    There are C(6, 3) = 20 of them, each with 1, 2, 3 and 6 chunks per stage (divisors of 12/2 and 12/4) and also those that deal
    out 14 with the ends counted: 7 for pp 2. So 5 values of vpp, and 4 micro-batches that divide 8.
    """
    job = plan({"dp": 8}).replace(**{"data.gbs": 8})
    axes = Axes({"sp": (False,), "zero_level": (1,), "performance.activation_checkpointing_type": ("none",)})
    assert divisors(8) == [1, 2, 4, 8]
    assert run(job, Asked((8,), (8,), axes)).counts.points == 20 * 5 * 4


def test_a_plan_of_uneven_layers_finds_even_chunks_with_the_ends_counted():
    """14 layers on 4 stages, `auto` in the plan: 16 / (4 * 2) = 2 layers a chunk with the ends counted beats 3 or 4 a stage.

    The plan's own 4 stages of one chunk stay `auto`: their layers are 4 4 3 3, not 3 4 4 3.
    """
    job = plan({"pp": 4, "dp": 2, "layers_per_stage": "auto"}, n_layers=14)
    found = run(job, Asked((8,), (64,), Axes({"tp": (1,), "pp": (4,), "cp": (1,)})))
    layouts = {layout.job.parallelism.vpp: layout.job.parallelism for layout in found.top(1000)}
    assert layouts[2].embedding_and_loss_count_as_layers
    assert layouts[2].layers_per_stage is None
    assert layouts[1].layers_per_stage == "auto"
    assert best_of(found).job.parallelism.vpp > 1


def test_layers_that_no_number_of_chunks_divides_are_interleaved_unevenly():
    """13 layers on 4 stages: 13 and 13 + 2 are odd, so 2 chunks per stage hold 5 x 2 and 3 x 1 layers; 4 chunks are more than 13.

    On 2 stages 4 chunks are tried, 8 are more than 13 layers. 12 layers on 4 stages divide, so nothing is added.
    """
    assert (uneven_chunks(13, 4), uneven_chunks(13, 2), uneven_chunks(12, 4), uneven_chunks(13, 1)) == (
        {2},
        {4},
        set(),
        set(),
    )
    assert chunk_counts(13, [1, 2, 4], ends=True) == [1, 2, 4]
    job = plan({"dp": 8}, n_layers=13)
    found = run(job, Asked((8,), (64,), Axes({"tp": (1,), "pp": (4,), "cp": (1,), "microbatch_sz": (1,)})))
    layouts = {layout.job.parallelism.vpp: layout.job.parallelism for layout in found.top(1000)}
    assert {vpp: p.layers_per_stage for vpp, p in layouts.items()} == {1: "auto", 2: "auto"}


def test_the_winner_beside_the_plan():
    """A plan that is far from the best: the answer is faster, and its settings leave the rest of the plan alone."""
    job = plan({"tp": 8, "dp": 1}, {"activation_checkpointing_type": "full"})
    found = search(job)
    assert found.given
    assert found.given.step_s > best_of(found).step_s
    assert best_of(found).job.parallelism.devices == 8
    assert best_of(found).job.data == job.data.model_copy(
        update={"microbatch_sz": best_of(found).job.data.microbatch_sz}
    )
    assert [x.step_s for x in found.top(5)] == sorted(x.step_s for x in found.top(5))
    front = found.pareto()
    assert [x.held_bytes for x in front] == sorted((x.held_bytes for x in front), reverse=True)
    assert found.columns["step_s"].size == found.counts.fitting
    assert found.front_size >= len(front)
    assert min(found.columns["step_s"]) <= best_of(found).step_s * 1.02


def test_what_the_plan_says_already_is_no_change():
    job = plan({"tp": 2, "dp": 2})
    block = next(b for b in blocks_of(job, 4) if b.stages.pp == 1 and b.zero_level == 1)
    row = next(i for i in np.flatnonzero(block.legal) if block.key(int(i)) == (True, 2, 1, 1, 2, 1, 2))
    none = next(i for i, choice in enumerate(block.choices) if choice.setting[1] == "none")
    assert fewest(job, block.changes(none, int(row))) == {}


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (Asked((0,), (64,)), "devices: must be at least 1"),
    ],
)
def test_bad_input(asked, line):
    with pytest.raises(ConfigError, match=line):
        run(plan(), asked)


def test_an_interrupt_leaves_the_best_so_far():
    """The interrupt comes with the third block: what two gave is there."""

    def tell(share, seen=[]):  # noqa: B006
        seen.append(share)
        if len(seen) == 3:
            raise KeyboardInterrupt

    found = run(plan(), Asked((8,), (64,)), tell)
    assert found.interrupted
    assert found.best is not None
    assert len(list(islice(found.found, 4))) <= 3


def test_what_needs_many_times_a_device_is_counted_all_the_same():
    """405B on 64 devices: leaving out the hopeless changes neither a count nor the best."""
    job = job_of(
        model="llama3-405b",
        parallelism={"tp": 8, "pp": 2, "dp": 4},
        data={"gbs": 64, "seqlen": 2048, "microbatch_sz": 1},
        hardware="gb200-nvl72",
    )
    axes = Axes({"cp": (1,), "vpp": (1,), "microbatch_sz": (1,)})
    asked = Asked((64,), (64,), axes)
    some, every = run(job, asked), run(job, asked, every=True)
    assert some.counts == every.counts
    assert sum(len(of.row) for of in some.found) == sum(len(of.row) for of in every.found) > 0
    assert best_of(some).step_s == best_of(every).step_s
    worked_out = sum(int(b.legal.sum()) * len(b.choices) for _, b in Screen(job, axes, Counts()).blocks(64, 64))
    assert worked_out < every.counts.evaluated


def test_the_nearest_of_what_is_hopeless():
    """Nothing on one device: the nearest is the one that needs least, however much that is."""
    job = job_of(
        model="llama3-405b", parallelism={"tp": 1, "pp": 1, "dp": 1, "zero_level": 0},
        data={"gbs": 1, "seqlen": 2048, "microbatch_sz": 1}, hardware="dgx-h100",
    )  # fmt: skip
    axes = Axes({"performance.activation_checkpointing_type": ("none", "full"), "zero_level": (0,)})
    found = run(job, Asked((1,), (1,), axes))
    assert not found.found
    need = [estimate(job.replace(**{"performance.activation_checkpointing_type": a})) for a in ("none", "full")]
    least = min(e.memory.most_bytes for e in need)
    assert found.nearest
    nearest = found.layout(found.nearest[2], fitting=False)
    assert nearest
    assert nearest.held_bytes == least >= found.nearest[0]


def test_a_dispatcher_that_wants_several_ranks():
    moe = {"n_experts": 8, "expert_inter_sz": 1024, "experts_per_token": 2}
    job = plan({"tp": 1, "dp": 8, "ep": 8}, {"moe": {"dispatcher": "flex"}}, moe=moe)
    found = run(job, Asked((8,), (64,), Axes({"cp": (1,), "pp": (1,)})))
    assert best_of(found).job.parallelism.ep * best_of(found).job.parallelism.etp > 1
    assert found.counts.rejected["flex with one rank"] > 0


def test_torch_is_estimated_one_by_one():
    """Every figure of the screen is an estimate's but for the order of sums, and the best is the least of them."""
    job = job_of(
        model="gpt2-small",
        parallelism={"tp": 1, "pp": 1, "dp": 4},
        performance={"software": "torch"},
        data={"gbs": 16, "seqlen": 1024, "microbatch_sz": 1},
        hardware="dgx-h100",
    )
    axes = Axes({"cp": (1,), "sp": (False,), "performance.activation_checkpointing_type": ("none", "full")})
    found = run(job, Asked((4,), (16,), axes))
    assert found.counts.evaluated > 5
    assert best_of(found).step_s == pytest.approx(min(found.columns["step_s"]), rel=1e-15)
    for layout in found.top(3):
        assert estimate(layout.job).step_s == layout.step_s


def test_pipelines_of_fsdp_beside_tensor_parallelism():
    """Layouts whose groups are gathered in a pool of their own (tp 1) and others in one column: as estimated alone."""
    job = job_of(
        model="llama3-8b",
        parallelism={"tp": 1, "pp": 4, "dp": 2, "fsdp": {"reshard_after_forward": False}},
        performance={"software": "torchtitan"},
        data={"gbs": 24, "seqlen": 4096, "microbatch_sz": 1},
        hardware="dgx-h100",
    )
    few = {"vpp": (1,), "cp": (1,), "microbatch_sz": (1,)}
    found = run(job, Asked((8,), (24,), Axes({**few, "performance.activation_checkpointing_type": ("none", "full")})))
    assert {pp for pp, _ in found.best_of("pp")} > {1}
    for _, layout in found.best_of("pp"):
        assert estimate(layout.job).step_s == layout.step_s


def test_schedules_are_an_axis():
    """ZBV and DualPipeV need two chunks per stage; without a pipeline there is one schedule; the best runs as it is set."""
    job = FLEETING["torch"]
    names = ("1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev")
    few = {"pp": (1, 2), "vpp": (1, 2), "tp": (1,), "cp": (1,), "microbatch_sz": (1,), "sp": (False,)}
    found = run(job, Asked((4,), (64,), Axes({**few, "schedule": names})))
    seen = {
        (pp, vpp, name) for pp, vpp, name in zip(*(found.columns[n] for n in ("pp", "vpp", "schedule")), strict=True)
    }
    assert {one for one in seen if one[0] == 1} == {(1, 1, "")}
    assert {one for one in seen if one[2] in {"zbv", "dualpipev"}} == {(2, 2, "zbv"), (2, 2, "dualpipev")}
    assert {(2, 1, "1f1b"), (2, 2, "interleaved"), (2, 1, "zero_bubble")} <= seen
    for name, layout in found.best_of("schedule"):
        assert layout.job.schedule == name or layout.job.parallelism.pp == 1
        assert estimate(job.replace(**layout.changes)).step_s == layout.step_s


def test_a_long_front_is_a_selection_and_says_how_many():
    """40 layouts, each slower and smaller than the one before, are a front of 40; 2.2 x the best is no longer part of it.

    Every layout between them that is slower and larger is not: 12 are shown, the first and the last among them.
    """
    value = np.array([*np.linspace(1.0, 2.0, 40), 1.5, 2.2])
    held = np.array([*np.linspace(80.0, 10.0, 40), 79.0, 1.0])
    found = corners(value, held)
    assert found.tolist() == list(range(40))
    some = shown(found)
    assert len(some) == SHOWN
    assert (some[0], some[-1]) == (0, 39)
    assert shown(found[:12]).tolist() == list(range(12))
    assert corners(np.zeros(0), np.zeros(0)).size == 0
