"""Memory of sharded gradients is the reducing stream's alone: an earlier moment with fewer of them may need more of the other."""

from __future__ import annotations

import pytest
from physics_jobs import job

from steptime import fsdp
from steptime.answer.result import estimate
from steptime.fsdp.memory_walk import Moments
from steptime.job.assembly import Assembly
from steptime.memory.overhead import CACHED_GROUPS, reserved_bytes


def test_the_worst_moment_and_the_most_beside_gradients():
    """12 B with 10 B of gradients still to come add 2, 8 B with all of them 8: the second is the peak, the first has the most."""
    moments = Moments(10.0)
    moments.mark(8.0, 4.0, "first")
    moments.to_come = 0.0
    moments.mark(3.0, 5.0, "second")
    assert (moments.worst.op, moments.most) == ("second", 12.0)


@pytest.mark.parametrize(
    ("group", "expandable", "reserved"),
    [(4.0, True, 100 + 25 + 6), (4.0, False, 100 + 1.2 * 25 + 6), (0.0, True, 100 + 10), (None, False, 100 + 1.2 * 10)],
)
def test_both_pools(group, expandable, reserved):
    """100 B allocated with 10 B that come and go, 25 B at another moment, 6 B of gradients to come; the largest group besides.

    In one pool, of a traced graph or without FSDP, gradients take what the earlier moment has left.
    """
    found = reserved_bytes(100.0, 10.0, group, 6.0, expandable=expandable, most_bytes=25.0)
    assert found == pytest.approx(reserved + CACHED_GROUPS * (group or 0.0))


def test_a_loss_before_gradients_that_outweigh_it():
    """20 layers of 164,096 parameters and a root of 262,272 on 2 ranks, 256 tokens, all recomputed.

    The peak is late in backward, with gradients of 2 B for each parameter; the loss, before them, holds more besides, which
    stays reserved beside theirs: states of 8 B a parameter, what the loss holds, and of the root, in bf16, CACHED_GROUPS.
    """
    how = {"activation_checkpointing_type": "full", "expandable_segments": True}
    said = job("fsdp2", model={"n_layers": 20}, seqlen=256, performance=how, dp=2, fsdp={"reduce_dtype": "fp32"})
    stage = estimate(said).memory.stages[0]
    in_forward, in_backward = fsdp.pass_moments(Assembly(said))
    most = max(moment.activations_bytes + moment.transient_bytes for moment in (in_forward, in_backward))
    assert most > stage.activations_bytes + stage.transient_bytes - stage.buffers_bytes
    states = (4 + 4 + 8) * (20 * 164_096 + 262_272) / 2
    assert stage.reserved_bytes == pytest.approx(
        states + stage.buffers_bytes + most + CACHED_GROUPS * 2 * 262_272, rel=1e-6
    )
