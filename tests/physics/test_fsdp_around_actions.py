"""What FSDP adds to each action of a stage: gathers, copies and sums of made-up seconds, none of which stands for another.

Gathering in a forward takes 1,000 s, 200 s where the root is there, in a backward 30 s; a chunk fetched ahead is gathered in 50 s
and copied out in 7 s; a chunk's first gradients are copied in 0.5 s, later ones added in 0.25 s; the reduction takes 9 s.
"""

from __future__ import annotations

import pytest
from physics_jobs import job, machine

from steptime.cost.part_seconds import PartTime
from steptime.cost.rates import rates
from steptime.cost.work import Work
from steptime.fsdp.pipeline_seconds import ChunkSeconds, PipelineSeconds, Prices
from steptime.fsdp.seconds import CommSeconds, ShardedPass
from steptime.job.assembly import Assembly
from steptime.schedule import order
from steptime.schedule.sharded import Around

CHUNK = ChunkSeconds(1_000.0, 200.0, 30.0, 50.0, 7.0, 0.5, 0.25, 9.0)


def additions(
    stage: int, *, software: str = "fsdp2", schedule: str = "1f1b", vpp: int = 1, **options: bool
) -> dict[str, Around]:
    """By action, of two stages and two micro-batches."""
    found = of_stages(software=software, schedule=schedule, vpp=vpp, **options)
    actions = order(schedule, 2, vpp, 2)[stage]
    return {f"{one.kind}{one.microbatch}.{one.chunk}": around for one, around in found(stage, actions).items()}


def of_stages(
    *,
    software: str = "fsdp2",
    overlap: bool = True,
    schedule: str = "1f1b",
    vpp: int = 1,
    reshard: bool = False,
    microbatches: int = 2,
) -> PipelineSeconds:
    """Of two stages whose chunks are alike."""
    on = machine(link=1.0, node=2)
    layout = {"dp": 4, "pp": 2, "vpp": vpp, "schedule": schedule, "fsdp": {"reshard_after_forward": reshard}}
    made = job(
        software,
        on=on,
        microbatches=microbatches,
        model={"n_layers": 4},
        performance={"overlap": {"dp": overlap}},
        **layout,
    )
    assembly = Assembly(made)
    none = PartTime(Work(), Work(), Work())
    parts = dict.fromkeys((assembly.embedding, *assembly.kinds, assembly.head), none)
    found = PipelineSeconds(assembly, tuple(on.tiers), parts, [{}] * 2 * vpp, rates(on.accelerator, made.software))
    found.chunks = [[CHUNK] * vpp] * 2
    found.shown = [[40.0] * vpp] * 2
    return found


@pytest.mark.parametrize(
    ("stage", "added"),
    [
        # F0 gathers root and layers and frees the layers, which F1 gathers again, and B0; B1 finds what B0 has left
        (0, {"F0.0": 1_000.0, "F1.0": 200.0, "B0.0": 30.0 + 0.5, "B1.0": 0.25}),
        # F0 B0 F1 B1: F1 finds what B0 has left, and frees it
        (1, {"F0.0": 1_000.0, "B0.0": 30.0 + 0.5, "B1.0": 30.0 + 0.25}),
    ],
)
def test_a_backward_gathers_and_adds_its_gradients(stage, added):
    """The first backward too gathers what its forward has freed, beside its copy of the first gradients."""
    found = additions(stage, reshard=True)
    assert {name: around.added_s for name, around in found.items()} == added
    assert [around.after_s for around in found.values()] == [*[0.0] * (len(added) - 1), 9.0]
    assert not any(around.fetched for around in found.values())


@pytest.mark.parametrize(("overlap", "at_once"), [(True, 0.0), (False, 2 * 40.0)])
def test_chunks_fetched_ahead_are_copied_out_when_they_run(overlap, at_once):
    """Two chunks, both requested by the first action, which shows 40 s of each gather where nothing hides it. Each is copied out
    in its first action alone: F0 F1 of the one, then of the other, then their backwards.
    """
    found = additions(0, schedule="interleaved", vpp=2, overlap=overlap)
    assert found["F0.0"] == Around(7.0 + at_once, ((0, 50.0), (1, 50.0)) if overlap else (), 0.0)
    assert found["F0.1"] == Around(7.0, (), 0.0)
    assert {"F1.0", "F1.1"}.isdisjoint(found)
    assert [found[f"B0.{chunk}"] for chunk in (0, 1)] == [Around(0.5, (), 0.0)] * 2
    assert [found[f"B1.{chunk}"] for chunk in (0, 1)] == [Around(0.25, (), 9.0)] * 2


def test_time_steps_reduce_before_the_gradient_is_sent():
    """torch 2.6, with two chunks: F0 of each gathers it, 1,000 s, since nothing is fetched ahead; B1 takes 0.25 s of its sum and
    the 9 s of the reduction, and nothing follows it.
    """
    found = additions(0, software="torchtitan@0.1", schedule="interleaved", vpp=2)
    assert [found[f"F0.{chunk}"] for chunk in (0, 1)] == [Around(1_000.0, (), 0.0)] * 2
    assert [found[f"B1.{chunk}"] for chunk in (0, 1)] == [Around(0.25 + 9.0, (), 0.0)] * 2


def test_sums_of_a_step_for_one_micro_batch():
    """Of four the first takes 0.5 s, the others 0.25 s: 1.25 / 4. Each gather and reduction runs once in the step."""
    found = of_stages(microbatches=4)
    free = CommSeconds(8.0, 4.0, 16.0, 2.0)
    found.prices = [[Prices(of.groups, dict.fromkeys(of.of, free)) for of in stage] for stage in found.prices]
    forward, backward = found.passes(0)
    assert forward == ShardedPass(3 / 4, 3 * 8.0 / 4, 3 * 2.0 / 4)
    assert backward == ShardedPass(3 / 4, 3 * 16.0 / 4, (1.25 + 3 * 4.0) / 4)


def test_work_of_a_direction():
    """Added and divided figure by figure."""
    assert ShardedPass(4.0, 8.0, 2.0).over(2.0) == ShardedPass(2.0, 4.0, 1.0)
    assert ShardedPass(4.0, 8.0, 2.0).plus(ShardedPass(1.0, 3.0, 5.0)) == ShardedPass(5.0, 11.0, 7.0)
