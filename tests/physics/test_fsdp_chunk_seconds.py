"""What FSDP2 adds to the actions of a pipeline's chunk, from made-up seconds of its groups and parts.

The root is gathered in 7 s and copied in 0.5 s, each of two layers in 4 and 0.25 s; their gradients are copied in 1.5 and 0.75 s
and reduced in 20 and 5 s. A layer takes 3 s forward and 5 + 1 s backward with what runs again, the embedding 2 s, the head 2.5 s.
A collective that compute hides comes back by 15 % (two ranks of one node).
"""

from __future__ import annotations

from typing import Any

import pytest
from physics_jobs import job, machine

from steptime.cost.part_seconds import PartTime
from steptime.cost.rates import rates
from steptime.cost.work import Work
from steptime.fsdp.pipeline_seconds import ChunkSeconds, PipelineSeconds, chunk_seconds, reduced_once, sums_s
from steptime.fsdp.seconds import CommSeconds, ShardedPass
from steptime.job.assembly import Assembly
from steptime.schedule import order
from steptime.schedule.sharded import Around

ROOT = CommSeconds(7.0, 1.5, 20.0, 0.5)
BLOCK = CommSeconds(4.0, 0.75, 5.0, 0.25)
ON = machine(memory=4.0, link=1.0, node=2)


def assembled(software: str, reduce: str = "fp32", layers: int = 4, **layout: Any) -> Assembly:
    said = {"dp": 2, "pp": 2, "microbatches": 2, "fsdp": {"reduce_dtype": reduce, "reshard_after_forward": False}}
    return Assembly(job(software, on=ON, model={"n_layers": layers}, **said | layout))


def seconds(stage: int, software: str = "fsdp2", **layout: Any) -> ChunkSeconds:
    """Of a stage's first chunk, with 100 elements."""
    assembly = assembled(software, **layout)
    layer, embedding, head = (
        PartTime(Work(gemm_s=forward), Work(memory_s=backward), Work())
        for forward, backward in ((3.0, 5.0), (2.0, 200.0), (2.5, 300.0))
    )
    parts = {assembly.embedding: embedding, assembly.head: head} | dict.fromkeys(assembly.kinds, layer)
    chunk, around = assembly.stages[stage][0], (assembly, tuple(ON.tiers), rates(ON.accelerator, assembly.job.software))
    again = dict.fromkeys(assembly.kinds, 1.0)
    return chunk_seconds(*around, chunk, [ROOT, BLOCK, BLOCK], 100, parts, again)


def shown(network: float, copies: float, outlasts: float) -> float:
    """`outlasts`: by how much the streams outlast compute and copies; what of the network they hide costs 15 %."""
    return copies + network - 0.85 * (network - outlasts)


def test_a_first_chunk():
    """Forward: the root arrives at 7 s, is copied, then the embedding, till 9.5. The first layer's gather follows the root's, to
    11.5 s; the second's beside that layer till 15.5, then its compute till 18.75: 10.75 s longer than 8 s of compute.

    With the root there, embedding and first gather start at once: 2 | 4, 4 to 7.25, 8 to 11.25: 3.25 longer.

    Backward: 4 s, then 6.25 beside the other gather and 6.25: 4.5 longer. Sums of 100 elements at 4 B/s: 2 + 4 B first, then
    2 + 8. The reduction: 1.5 and 20 s, and the layers' one after another, 0.75 + 5 each.
    """
    found = seconds(0)
    assert found[:3] == pytest.approx((shown(15, 1.0, 9.75), shown(8, 0.5, 2.75), shown(8, 0.5, 4.0)))
    assert found[3:] == (7 + 4 + 4, 0.5 + 0.25 + 0.25, 150.0, 250.0, 33.0, 0.0, 0.0)


def test_torch_2_6_does_not_wait_for_the_last_reduction():
    """33 s less the last layer's 5."""
    layout = {"schedule": "interleaved", "vpp": 2, "layers": 8}
    assert seconds(0, "torchtitan@0.1", **layout).reduce_s == 28.0


def test_a_last_chunk_whose_loss_runs_in_chunks():
    """Forward: 7 s, the layers' gathers beside, 11 to 14.25, 15 to 18.25, and the head till 20.75: 12.25 longer than 8.5 s. With
    the root there 4 to 7.25, 8 to 11.25 and the head: 5.25 longer.

    Each loss gathers the head's group once more, 7 + 0.5, copies 1.5 and reduces 20, of which 18 s of layers hide 0.85 each. The
    step's end reduces the layers alone, 2 * 5.75.
    """
    found = seconds(1, "torchtitan")
    assert found[:2] == pytest.approx((shown(15, 1.0, 11.25), shown(8, 0.5, 4.75)))
    assert found[7:9] == (11.5, 7.5)
    assert found.loss_s == pytest.approx(1.5 + 20 - 0.85 * 18)


@pytest.mark.parametrize(("reduce", "first", "later"), [("fp32", 150.0, 250.0), ("bf16", 0.0, 150.0)])
def test_sums_of_gradients(reduce, first, later):
    """100 elements at 4 B/s: read in bf16 and written in fp32, 6 B, with the sums read, 10 B; added in bf16, 3 * 2 B."""
    assembly = assembled("fsdp2", reduce)
    assert sums_s(assembly, rates(ON.accelerator, assembly.job.software), 100.0) == (first, later)


def test_copies_and_a_reduction():
    """Twice a step. Where one rank reduces nothing there is no call."""
    assert reduced_once(BLOCK, 2.0) == ShardedPass(2.0, 10.0, 1.5)
    assert reduced_once(CommSeconds(4.0, 0.75, 0.0), 2.0) == ShardedPass(0.0, 0.0, 1.5)
    assert reduced_once(CommSeconds(4.0, 0.0, 0.25), 2.0) == ShardedPass(2.0, 0.5, 0.0)


def of_stages(share: bool | float, chunk: ChunkSeconds, **layout: Any) -> PipelineSeconds:
    """Stages whose chunks all take these seconds; parts take none."""
    said: dict[str, Any] = {"performance": {"overlap": {"dp": share}}} | layout
    assembly = assembled("fsdp2", **said)
    nothing = PartTime(Work(), Work(), Work())
    parts = dict.fromkeys((assembly.embedding, *assembly.kinds, assembly.head), nothing)
    around = rates(ON.accelerator, assembly.job.software)
    found = PipelineSeconds(assembly, tuple(ON.tiers), parts, [{}] * len(assembly.chunks), around)
    found.chunks = [[chunk for _ in stage] for stage in found.chunks]
    return found


@pytest.mark.parametrize(("share", "left"), [(True, 0.15), (0.25, 0.75), (False, 1.0)])
def test_what_shows_of_a_chunk_gathered_ahead(share, left):
    """Two ranks send half of a layer's 164,096 elements in bf16 at 1 B/s, and half of the embedding's 131,072."""
    found = of_stages(share, ChunkSeconds(*[0.0] * 8))
    assert found.shown[0] == [pytest.approx(left * (2 * 164_096 + 131_072), rel=1e-4)]


def test_a_fetch_by_an_action_that_needs_nothing_else():
    """Four chunks a stage, of which three are there at a time; sums in bf16 take no time at first. Stage 0 fetches chunk 0 again
    when chunk 3's backwards are done, with the first backward of chunk 2; the last backward of a chunk is followed by 9 s.
    """
    chunk = ChunkSeconds(0.0, 0.0, 0.0, 50.0, 7.0, 0.0, 0.0, 9.0)
    found = of_stages(True, chunk, reduce="bf16", vpp=4, schedule="interleaved", layers=8)
    of = found(0, order("interleaved", 2, 4, 2)[0])
    around = {f"{a.kind}{a.microbatch}.{a.chunk}": one for a, one in of.items()}
    assert around["F0.0"] == Around(7.0, ((0, 50.0), (1, 50.0), (2, 50.0)), 0.0)
    assert around["F0.1"] == Around(7.0, ((3, 50.0),), 0.0)
    assert around["B0.2"] == Around(0.0, ((0, 50.0),), 0.0)
    assert around["B1.3"] == around["B1.2"] == Around(0.0, (), 9.0)
    assert around["B0.0"] == Around(7.0, (), 0.0)
    assert around.keys() == {"F0.0", "F0.1", "F0.2", "F0.3", "B0.2", "B0.0", *(f"B1.{chunk}" for chunk in range(4))}


def test_a_loss_adds_to_what_its_actions_need_anyway():
    """Each loss takes 3 + 4 s, the backward's gather of the head 3 s. F0 gathers all in 1,000 s, or copies what was fetched in
    7 s; a backward gathers its layers in 30 s; the first sum takes 0.5 s, the second 0.25.
    """
    chunk = ChunkSeconds(1_000.0, 200.0, 30.0, 50.0, 7.0, 0.5, 0.25, 9.0, 3.0, 4.0)
    resharded = of_stages(True, chunk, fsdp={"reduce_dtype": "fp32", "reshard_after_forward": True})
    resharded.losses = [set(), {0}]
    found = {f"{a.kind}{a.microbatch}": one.added_s for a, one in resharded(1, order("1f1b", 2, 1, 2)[1]).items()}
    assert found == {"F0": 7.0 + 1_000.0, "B0": 3.0 + 30.0 + 0.5, "F1": 7.0, "B1": 3.0 + 30.0 + 0.25}
    ahead = of_stages(True, chunk, vpp=2, schedule="interleaved", layers=8)
    ahead.losses = [set(), {1}]
    last = {
        f"{a.kind}{a.microbatch}.{a.chunk}": one.added_s
        for a, one in ahead(1, order("interleaved", 2, 2, 2)[1]).items()
    }
    assert (last["F0.0"], last["F0.1"], last["F1.1"]) == (7.0, 7.0 + 7.0, 7.0)


@pytest.mark.parametrize(("passes", "no_sync"), [(1, False), (2, False), (2, True)])
def test_gathers_and_reductions_of_a_pass(passes, no_sync):
    """Root and two layers, 8 s and 16 s each, once in each pass of two micro-batches; or once in all passes, half in each."""
    said = {"reduce_dtype": "fp32", "reshard_after_forward": False, "no_sync": no_sync}
    nothing = ChunkSeconds(*[0.0] * 8)
    found = of_stages(True, nothing, pipeline_passes=passes, microbatches=2 * passes, fsdp=said)
    free = CommSeconds(8.0, 4.0, 16.0, 2.0)
    found.prices = [[one._replace(of=dict.fromkeys(one.of, free)) for one in mine] for mine in found.prices]
    share = 1 / 2 if passes == 2 and no_sync else 1.0
    forward, backward = found.passes(0)
    assert forward == ShardedPass(3 / 2 * share, 3 * 8.0 / 2 * share, 3 * 2.0 / 2 * share)
    assert backward == ShardedPass(3 / 2 * share, 3 * 16.0 / 2 * share, 3 * 4.0 / 2 * share)
