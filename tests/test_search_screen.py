"""The screen of a search: its columns beside estimates of the same layouts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from search_jobs import FLEETING, PLANS, plan, sampled

from steptime import Job, estimate, search
from steptime.job.assembly import Assembly
from steptime.job.job import facts
from steptime.search.pipeline import Chunks, stages
from steptime.search.screen import Screen
from steptime.search.space import Axes, Counts
from steptime.software.profiles import profile_names
from steptime.timing.part_times import chunk_times, part_times, pricing


@dataclass
class Some(Screen):
    """A screen that tries some of the recomputations, by its turn: every third one, of the numbers of whole layers every sixth.

    A few layouts are compared of all that a screen computes, each recomputation of which costs as much as the others.
    """

    turn: int | None = 0
    """None: it tries all of them."""

    def choices(self, layers, schedule):
        found = super().choices(layers, schedule)
        if self.turn is None:
            return found
        blocks = [one for one in found if one.form(1).method == "block"]
        others = [one for one in found if one not in blocks]
        return (*others[self.turn % 3 :: 3], *blocks[self.turn % 6 :: 6])


class Remembering(Some):
    """A screen that keeps the parts of its layouts."""

    def parts(self, keys, found, job):
        self.found = super().parts(keys, found, job)
        return self.found


OFFLOADED = "offloaded experts"
"""The plan whose layouts are alike least often, as their sizes decide which tensors go to the host: its search costs most."""


def few(name):
    """One degree of tp, of cp and of pp or none, and two micro-batches, in turn by plan, since 8 layouts are compared of all.

    A plan that says something of stages is tried on every number of them. Together the plans take every value that 16 devices and
    64 sequences allow.
    """
    turn = [*PLANS, *FLEETING].index(name)
    stages = {} if (PLANS | FLEETING)[name].parallelism.pp > 1 else {"pp": (1, (2, 4)[turn % 2])}
    if name == OFFLOADED:
        return {"tp": (1, 4), "cp": (1, 2), "pp": (1, 4), "microbatch_sz": (1, 8)}
    return {
        "tp": (1, (2, 4, 8)[turn % 3]),
        "cp": (1, (2, 4, 8, 16)[turn // 3 % 4]),
        "microbatch_sz": ((1, 8), (2, 16), (4, 64), (1, 32))[turn % 4],
        **stages,
    }


@pytest.fixture(scope="module", params=[*PLANS, *FLEETING])
def screened(request):
    """A plan, the screen of its layouts on 16 devices, and its blocks: made once, since they cost most.

    With every recomputation where the plan says something of stages, whose steps are compared beside their bubbles.
    """
    job = (PLANS | FLEETING)[request.param]
    turn = [*PLANS, *FLEETING].index(request.param) if job.parallelism.pp == 1 else None
    screen = Remembering(job, Axes(few(request.param)), Counts(), turn=turn)
    return job, screen, [block for _, block in screen.blocks(16, job.data.gbs)]


def test_the_screen_beside_estimates(screened):
    job, _, blocks = screened
    check(job, blocks)


STAGED = [
    name
    for number, (name, job) in enumerate((PLANS | FLEETING).items())
    if number % 3 == 0 or name == OFFLOADED or job.parallelism.pp > 1 or job.model.mtp
]
"""All plans that say something of stages or have layers of the last one alone, and every third of the others."""


@pytest.mark.parametrize("name", STAGED)
def test_pipelines_of_three_stages_beside_estimates(name):
    """On 24 devices, whose stages and replicas are no powers of two; tp and cp take no values there that 16 do not have.

    The other plans differ in what one stage holds, which is compared on 16 devices.
    """
    job = (PLANS | FLEETING)[name]
    sizes = (2, 4) if name == OFFLOADED or len(name) % 2 else (1, 8)
    axes = Axes({"tp": (1, 4), "cp": (1,), "pp": (1, 3, 6, 12), "microbatch_sz": sizes})
    screen = Some(job, axes, Counts(), turn=STAGED.index(name))
    check(job, [block for _, block in screen.blocks(24, job.data.gbs)])


@pytest.mark.parametrize(
    "experts", [{}, {"n_experts": 8, "expert_inter_sz": 1024, "experts_per_token": 2, "n_dense_layers": 1}]
)
def test_uneven_chunks_beside_estimates(experts):
    """13 layers in 8 chunks of 1 or 2, on 2 and on 4 stages."""
    job = plan({"dp": 8}, n_layers=13, **({"moe": experts} if experts else {}))
    axes = Axes({"tp": (1, 2), "pp": (2, 4), "cp": (1,), "vpp": (2, 4)})
    blocks = [block for _, block in Screen(job, axes, Counts()).blocks(8, 64)]
    assert {(block.stages.pp, block.stages.vpp) for block in blocks} == {(2, 4), (4, 2)}
    assert {block.split for block in blocks} == {"auto"}
    check(job, blocks)


def check(job, blocks):
    """Memory bit for bit; the step within what the pipeline's closed form leaves."""
    errors = []
    for block, choice, row in sampled(blocks, 8):
        found = estimate(job.replace(**block.changes(choice, row)))
        outside = sum(found.memory.overhead_bytes)
        assert block.allocated_bytes[choice, row] == found.memory.peak_allocated_bytes + outside
        assert block.reserved_bytes[choice, row] == found.memory.peak_reserved_bytes + outside
        assert block.fits[choice, row] == found.memory.fits
        if not found.memory.fits:
            assert block.step_s[choice, row] == np.inf
            continue
        error = abs(block.step_s[choice, row] / found.step_s - 1.0)
        assert error < (1e-9 if block.stages.pp == 1 else 0.05)
        errors.append(error)
    assert np.median(errors) < 0.003


def test_seconds_of_chunks_in_columns_are_those_of_estimates(screened):
    """Forward and backward of every chunk of every stage, bit for bit."""
    job, screen, blocks = screened
    parts = screen.found
    chunks = Chunks(screen.job, parts)
    for block, choice, row in sampled(blocks, 6, seed=2):
        assembly = Assembly(job.replace(**block.changes(choice, row)))
        seconds = chunk_times(assembly, part_times(assembly, pricing(assembly.job)))
        at = parts.find(*(np.array([value]) for value in block.key(row)))
        mine = stages(parts.assembly, facts(assembly.job), block.stages.schedule)
        for of, kind in zip(mine.of, mine.chunks, strict=True):
            for stage, (virtual, chunk) in product(of, enumerate(kind)):
                found = chunks.of(chunk, (block.choices[choice],), at, split=False)
                alone = seconds[stage][virtual]
                assert (found.forward_s.item(), found.backward_s.item()) == (alone.forward_s, alone.backward_s)


FSDP = {"tp": 1, "pp": 1, "dp": 4, "fsdp": {"reshard_after_forward": True}}


SHARDED = {
    "fsdp2": plan(FSDP, {"software": "fsdp2"}),
    "no resharding, torchtitan": plan(
        FSDP | {"fsdp": {"reshard_after_forward": False}}, {"software": "torchtitan", "optimizer_impl": "for_loop"}
    ),
    "resharded to 2 ranks": plan(FSDP | {"fsdp": {"reshard_after_forward": 2}}, {"software": "fsdp2"}),
    "traced graph": plan(FSDP | {"fsdp": {"wrap": "parameter"}}, {"software": "fsdp2", "loss_impl": "traced"}),
    "traced graph, a late host": plan(
        FSDP | {"fsdp": {"wrap": "parameter"}}, {"software": "fsdp2", "step_graph": "traced"}, "grand-teton-h100"
    ),
    "traced graph of experts": plan(
        FSDP,
        {"software": "torchtitan", "step_graph": "simplified"},
        "grand-teton-h100",
        moe={"n_experts": 8, "expert_inter_sz": 1024, "experts_per_token": 2},
    ),
    "one group, prefetch 2": plan(FSDP | {"fsdp": {"wrap": "model", "prefetch": 2}}, {"software": "fsdp2"}),
    "replicas": plan(FSDP | {"replicas": 2}, {"software": "fsdp2"}),
    "no_sync": plan(FSDP, {"software": "accelerate"}),
    "no_sync, ZeRO 3": plan({"zero_level": 3}, {"software": "accelerate"}),
    "no_sync, stays gathered": plan(
        FSDP | {"fsdp": {"no_sync": True, "reshard_after_forward": False, "reshard_after_backward": False}},
        {"software": "fsdp2"},
    ),
    "torch, ZeRO 3": plan({"zero_level": 3}, {"software": "fsdp2"}),
    "DeepSpeed, ZeRO 3": plan({"zero_level": 3}, {"software": "deepspeed"}),
    "a share of overlap, fp8": plan(FSDP, {"software": "fsdp2", "overlap": {"dp": 0.5}, "precision": "fp8_tensorwise"}),
    "experts": plan(
        FSDP, {"software": "torchtitan"}, moe={"n_experts": 8, "expert_inter_sz": 1024, "experts_per_token": 2}
    ),
    "experts, some outside FSDP": plan(
        FSDP, {"software": "automodel"}, moe={"n_experts": 8, "expert_inter_sz": 1024, "experts_per_token": 2}
    ),
}


@pytest.mark.parametrize("name", SHARDED)
def test_fsdp_in_columns_beside_estimates(name):
    """Memory bit for bit, and the step but for the order of a sum; pipelines are the next test's.

    On 16 and on 32 devices, with one degree of tp and of cp or none, in turn: three plans together meet every recomputation but
    numbers of whole layers, which six meet.
    """
    job, turn = SHARDED[name], list(SHARDED).index(name)
    few = Axes({"pp": (1,), "tp": (1, (2, 4, 8)[turn % 3]), "cp": (1, (2, 4)[turn // 2 % 2])})
    devices, screen = (16, 32)[turn % 2], Some(job, few, Counts(), turn=turn)
    blocks = [block for _, block in screen.blocks(devices, job.data.gbs) if block.legal.any()]
    assert any(len(block.rows.tp) > 4 for block in blocks)
    for block, choice, row in sampled(blocks, 8):
        found = estimate(job.replace(**block.changes(choice, row)))
        outside = sum(found.memory.overhead_bytes)
        assert block.allocated_bytes[choice, row] == found.memory.peak_allocated_bytes + outside
        assert block.reserved_bytes[choice, row] == found.memory.peak_reserved_bytes + outside
        assert block.step_s[choice, row] == pytest.approx(found.step_s, rel=1e-9)


IN_PIPELINE = FSDP | {"pp": 2, "dp": 2}


SHARDED_PIPELINES = {
    "fsdp2": plan(IN_PIPELINE, {"software": "fsdp2"}),
    "no resharding, torchtitan": plan(
        IN_PIPELINE | {"fsdp": {"reshard_after_forward": False}}, {"software": "torchtitan"}
    ),
    "one group, prefetch 2": plan(IN_PIPELINE | {"fsdp": {"wrap": "model", "prefetch": 2}}, {"software": "fsdp2"}),
    "replicas": plan(IN_PIPELINE | {"replicas": 2}, {"software": "fsdp2"}),
    "ZeRO 3": plan({"pp": 2, "dp": 2, "zero_level": 3}, {"software": "fsdp2"}),
    "a share of overlap, fp8": plan(
        IN_PIPELINE, {"software": "fsdp2", "overlap": {"dp": 0.5}, "precision": "fp8_tensorwise"}
    ),
    "experts": plan(
        IN_PIPELINE, {"software": "torchtitan"}, moe={"n_experts": 8, "expert_inter_sz": 1024, "experts_per_token": 2}
    ),
    "experts, some outside FSDP": plan(
        IN_PIPELINE, {"software": "automodel"}, moe={"n_experts": 8, "expert_inter_sz": 1024, "experts_per_token": 2}
    ),
    "GPipe": plan(IN_PIPELINE | {"schedule": "gpipe"}, {"software": "torchtitan"}),
    "time steps": plan(IN_PIPELINE, {"software": "torchtitan@0.1"}),
    "time steps, ZeRO 2": plan({"pp": 2, "dp": 2, "zero_level": 2}, {"software": "torchtitan@0.1"}),
    "one stream": plan({"pp": 4, "dp": 1}, {"software": "torchtitan@0.2"}),
    "one stream, ZeRO 2": plan({"pp": 4, "dp": 1, "zero_level": 2}, {"software": "torchtitan@0.2"}),
    "uneven": plan(
        IN_PIPELINE | {"layers_per_stage": "auto"},
        {"software": "torchtitan", "optimizer_impl": "for_loop"},
        n_layers=10,
    ),
    "ends counted": plan(
        IN_PIPELINE | {"embedding_and_loss_count_as_layers": True}, {"software": "torchtitan"}, n_layers=10
    ),
    "GPipe on one stream": plan(IN_PIPELINE | {"schedule": "gpipe"}, {"software": "torchtitan@0.2"}),
}


@pytest.mark.parametrize("name", SHARDED_PIPELINES)
def test_fsdp_in_a_pipeline_in_columns_beside_estimates(name):
    """Memory bit for bit, and the step but for the order of a sum: long steps and short ones, one chunk per stage and several.

    On 2 and 4 stages of 16 devices and on 3 and 6 of 24 in turn.
    """
    job, turn = SHARDED_PIPELINES[name], list(SHARDED_PIPELINES).index(name)
    devices, pp = ((16, (2, 4)), (24, (3, 6)))[turn % 2]
    few = Axes({"pp": pp, "microbatch_sz": (1, 4, 16, 64), "vpp": (1, 2, 3, 4)})
    blocks = [block for _, block in Some(job, few, Counts(), turn=turn).blocks(devices, 64) if block.legal.any()]
    assert any(len(block.rows.tp) > 4 for block in blocks)
    for block, choice, row in sampled(blocks, 8):
        found = estimate(job.replace(**block.changes(choice, row)))
        outside = sum(found.memory.overhead_bytes)
        assert block.allocated_bytes[choice, row] == found.memory.peak_allocated_bytes + outside
        assert block.reserved_bytes[choice, row] == found.memory.peak_reserved_bytes + outside
        assert block.step_s[choice, row] == pytest.approx(found.step_s, rel=1e-9)


def test_layouts_that_do_not_fit_beside_others_are_no_warning():
    """On one node no replica waits for another: seconds that were never computed must not be multiplied with that zero."""
    job = Job.load(Path(__file__).parents[1] / "configs" / "llama3_8b_fsdp.yaml")
    found = search(job, 8, gbs=64, axes=Axes({"pp": (2,), "microbatch_sz": (1, 8)}))
    assert 0 < found.counts.fitting < found.counts.evaluated


BOUNDED = Axes({"tp": (1, 2), "cp": (1,), "pp": (1, 2), "vpp": (1,), "microbatch_sz": (1, 2)})


@pytest.mark.parametrize("software", profile_names())
def test_every_profile_beside_estimates(software):
    """Memory of layouts of every recomputation, bit for bit: no profile has figures that columns lack.

    Of two blocks that follow each other one has the recomputations of even number, the other those of odd.
    """
    job = plan(performance={"software": software})
    blocks = [block for _, block in Screen(job, BOUNDED, Counts()).blocks(8, 64) if block.legal.any()]
    replayed = set()
    for number, block in enumerate(blocks):
        legal = np.flatnonzero(block.legal)
        for choice in range(number % min(2, len(block.choices)), len(block.choices), 2):
            row = int(legal[(number + choice) % len(legal)])
            found = estimate(job.replace(**block.changes(choice, row)))
            outside = sum(found.memory.overhead_bytes)
            assert block.allocated_bytes[choice, row] == found.memory.peak_allocated_bytes + outside
            assert block.reserved_bytes[choice, row] == found.memory.peak_reserved_bytes + outside
            replayed.add(found.job.recompute.granularity)
    assert "full" in replayed
