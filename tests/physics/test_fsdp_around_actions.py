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
from steptime.fsdp.loss_in_pipeline import Turn, reduction_left_s, turns
from steptime.fsdp.pipeline_seconds import ChunkSeconds, PipelineSeconds, Prices
from steptime.fsdp.seconds import CommSeconds, ShardedPass
from steptime.job.assembly import Assembly
from steptime.schedule import order
from steptime.schedule.sharded import Around, sharded_steps

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


@pytest.mark.parametrize(
    ("schedule", "found"),
    [
        # F0 B0 F1 B1: a loss gathers and reduces, the backward after it gathers, what it leaves serves the next norm
        ("1f1b", [Turn(1, 1), Turn(1), Turn(1, 1), Turn(1)]),
        # F0 F1 B0 B1: F1's norm finds the group freed and gathers it before the loss does; B1 finds what B0 has left
        ("gpipe", [Turn(1, 1), Turn(2, 1), Turn(1), Turn(0)]),
    ],
)
def test_turns(schedule, found):
    """Of the last of two stages with two micro-batches; the first forward's own gather is `ShardedStep.roots`: 2 m + 1 in all."""
    steps = sharded_steps(tuple(order(schedule, 2, 1, 2)[1]), ahead=False, reshard=False)
    assert turns(steps, {0}) == found
    assert sum(turn.gathers for turn in found) + sum(step.roots for step in steps) == 2 * 2 + 1
    assert turns(steps, ()) == [Turn()] * 4


@pytest.mark.parametrize(
    ("share", "left"),
    [
        (True, 10.0 - 8.0 * 0.75),  # 8 s of compute hide 8 of 10 s, less the quarter by which they slow down
        (0.5, 5.0),
        (False, 10.0),
    ],
)
def test_what_compute_leaves_of_a_reduction(share, left):
    head, layers = CommSeconds(1.0, 2.0, 10.0), [CommSeconds(0.0, 3.0), CommSeconds(0.0, 5.0)]
    assert reduction_left_s(head, layers, share, 0.25) == left


def last_stage() -> PipelineSeconds:
    """The last of two stages of torchtitan: a gather of the head's group takes 3 s, its reduction leaves 4 s in each forward."""
    found = of_stages(software="torchtitan")
    assert found.losses == [set(), {0}]
    found.chunks = [[CHUNK], [CHUNK._replace(head_s=3.0, loss_s=4.0)]]
    return found


def test_seconds_of_each_action():
    """F0 gathers all layers and the root in 1,000 s; each F adds 3 + 4 s, each B 3 s beside its sums of 0.5 and 0.25 s."""
    added = {f"{a.kind}{a.microbatch}": one.added_s for a, one in last_stage()(1, order("1f1b", 2, 1, 2)[1]).items()}
    assert added == {"F0": 1_000.0 + 7.0, "F1": 7.0, "B0": 3.0 + 0.5, "B1": 3.0 + 0.25}
    assert of_stages(software="fsdp2").losses == [set(), set()]  # one head in the root's group, no chunks


def test_calls_and_passes_of_a_step():
    """Two micro-batches gather the root 5 times and reduce it twice; each layer once.

    Each gather takes 8 s and 2 s of copies, each reduction 16 s and 4 s. Forward: root and 2 layers at first, then a root in
    each loss, and both reductions: 5 gathers, 2 reductions. Backward: 2 roots, then the layers' reductions.
    """
    found = last_stage()
    of = found.prices[1][0].groups
    calls = found.calls(1)
    assert [(calls["root", of.root].gathers, calls["root", of.root].reductions)] == [(5.0, 2.0)]
    assert [(calls["block", layer].gathers, calls["block", layer].reductions) for layer in {*of.layers}] == [(2.0, 2.0)]
    free = CommSeconds(8.0, 4.0, 16.0, 2.0)
    found.prices = [[Prices(one.groups, dict.fromkeys(one.of, free)) for one in mine] for mine in found.prices]
    forward, backward = found.passes(1)
    assert forward == ShardedPass(7 / 2, (5 * 8.0 + 2 * 16.0) / 2, (5 * 2.0 + 2 * 4.0) / 2)
    assert backward == ShardedPass(4 / 2, (2 * 8.0 + 2 * 16.0) / 2, (0.5 + 0.25 + 2 * 2.0 + 2 * 4.0) / 2)
