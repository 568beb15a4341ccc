"""Memory of sharded gradients is the reducing stream's alone: an earlier moment with fewer of them may need more of the other."""

from __future__ import annotations

import pytest
from physics_jobs import job

from steptime.answer.result import estimate
from steptime.fsdp.memory_walk import Moments
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
    """20 layers of 164,096 parameters and a root of 262,272 on 2 ranks, 256 tokens of 128 numbers, all recomputed.

    The peak is late in backward, with gradients of 2 B for each parameter. In backward of the loss, before them: inputs of 20
    layers and of the head, and its norm's output, 22 * 65,536; statistics and tokens, 1,024 + 2,048; the loss' log probabilities
    of 256 * 1,024, their gradient and that of the logits, 4 B each; the root and the next layer in bf16. Both stay reserved:
    states of 8 B a parameter, that moment, and of the root CACHED_GROUPS.
    """
    how = {"activation_checkpointing_type": "full", "expandable_segments": True}
    said = job("fsdp2", model={"n_layers": 20}, seqlen=256, performance=how, dp=2, fsdp={"reduce_dtype": "fp32"})
    stage = estimate(said).memory.stages[0]
    assert "loss" not in stage.peak_op
    loss = 22 * 65_536 + 3_072 + 3 * 4 * 262_144 + 2 * (262_272 + 164_096)
    assert loss > stage.activations_bytes + stage.transient_bytes - stage.buffers_bytes
    states = (4 + 4 + 8) * (20 * 164_096 + 262_272) / 2
    assert stage.reserved_bytes == pytest.approx(states + stage.buffers_bytes + loss + CACHED_GROUPS * 2 * 262_272)
