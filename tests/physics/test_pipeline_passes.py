"""Local batches that go through torch's pipeline one after the other: it fills and drains for each of them."""

from __future__ import annotations

import pytest
from physics_jobs import SLIGHTLY, job, machine

from steptime import estimate
from steptime.timing.timeline import Timeline

SHARDED = {"reshard_after_forward": False}


def run(passes: int, microbatches: int = 4, *, no_sync: bool | None = None, on=None, dp: int = 2):
    said = SHARDED | ({} if no_sync is None else {"no_sync": no_sync})
    layout = {"pp": 2, "dp": dp, "pipeline_passes": passes, "fsdp": said, "schedule": "1f1b"}
    return estimate(job("fsdp2", on=on, microbatches=microbatches, **layout))


def test_a_pipeline_drains_after_each_local_batch():
    """Two stages, 1F1B, the second with the head slower: it starts after the first's forward, works without a break, and the
    first's last backward follows: f0 + m (f1 + b1) + b0 for m micro-batches, twice for two passes of m / 2.
    """
    found = run(2, on=machine(flops=1e6))
    (first,), (second,) = found.timing.chunks
    assert first.forward_s < second.forward_s
    assert first.backward_s < second.backward_s
    each, ends = second.forward_s + second.backward_s, first.forward_s + first.backward_s
    assert found.step_s - found.timing.straggler_s == pytest.approx(4 * each + 2 * ends, rel=SLIGHTLY)
    assert found.pipeline.bubble_s == pytest.approx(2 * ends, rel=SLIGHTLY)
    once = run(1, on=machine(flops=1e6))
    assert once.step_s - once.timing.straggler_s == pytest.approx(4 * each + ends, rel=SLIGHTLY)
    assert sum(found.time.parts_s.values()) == pytest.approx(found.step_s)


@pytest.mark.parametrize(("no_sync", "times"), [(None, 2), (False, 2), (True, 1)])
def test_gradients_are_reduced_after_each_pass_or_the_last(no_sync, times):
    """torch reduces after each, stage.py, perform_reduce_grad; AutoModel's experts wait for the last (get_is_optim_step).

    On links of 1 kB/s little else takes time: two passes gather and reduce twice as long, in twice as many calls.
    """
    slow = machine(link=1e3)
    one, two = run(1, on=slow), run(2, on=slow, no_sync=no_sync)
    assert two.timing.fsdp_exposed_s == pytest.approx(times * one.timing.fsdp_exposed_s, rel=0.01)
    calls = [sum(row.count_per_step for row in found.collectives if row.axis == "dp") for found in (one, two)]
    assert calls[1] == times * calls[0]


def test_a_later_pass_holds_the_gradients_of_those_before():
    """Eight micro-batches: four fill a pipeline of two stages as well as eight do, so a later pass of four differs by the sharded
    gradients alone, 4 bytes for each parameter over 2 ranks: (164,096 + 131,072) * 2 = 590,336 of a layer and the embedding,
    256 more with the final norm. The step's first pass has none until it reduces them.
    """
    one, two = run(1, 8), run(2, 8)
    held = [
        after.allocated_bytes - before.allocated_bytes
        for before, after in zip(one.memory.stages, two.memory.stages, strict=True)
    ]
    assert held == [590_336, 590_592]


def test_the_last_pass_is_drawn():
    """The pipeline of two passes starts when the first has ended, and ends when gradients have been reduced."""
    timing = run(2, on=machine(flops=1e6, link=1e3)).timing
    shown = Timeline(timing)
    assert shown.end_s == pytest.approx(2 * shown.start_s)
    assert shown.end_s == pytest.approx(2 * timing.walk.makespan_s + timing.fsdp_exposed_s)
    assert {action.microbatch for action, _, _ in shown.actions[0]} == {0, 1}
    assert min(start for _, start, _ in shown.actions[0]) == pytest.approx(shown.start_s)


def test_micro_batches_of_a_pass_and_of_the_step():
    found = run(2, 8)
    assert (found.job.microbatches, found.job.schedule_microbatches) == (8, 4)
    assert found.pipeline.microbatches == 8
    assert found.pipeline.in_flight == [2, 1]
