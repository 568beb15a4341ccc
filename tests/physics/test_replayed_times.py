"""What recomputation repeats in a backward, as the tables of kernels and the traces list it: the mean over a chunk's layers."""

from __future__ import annotations

import pytest
from physics_jobs import FREE, SLIGHTLY, job, machine

from steptime.answer.result import estimate
from steptime.timing.op_times import replayed_times


@pytest.mark.parametrize(
    ("flops", "overlap", "products", "exposed"),
    [
        (FREE, None, 0, 6_144),  # nothing hides a turn
        (1.0, None, 1_343_488, 0.15 * 6_144),  # attention hides all of it, 15 % comes back as slower compute
        (FREE, {"cp": 1.0}, 0, 0),  # the plan says that all of it is hidden: it is listed all the same
    ],
)
def test_one_of_two_layers_runs_again(flops, overlap, products, exposed):
    """Four ranks share 32 tokens: a rank's keys and values, 2 * 8 * 128 * 2 = 4,096 bytes, are handed on three times, 4,096 s
    each at 1 B/s. Of two layers one is recomputed: 3 / 2 turns and half of its FLOPs a layer, (16 * 163,840 + 65,536) / 2, of
    which 65,536 are the causal half of two products of 8 x 32 x 128.
    """
    recompute = {"granularity": "full", "method": "block", "n_layers": 1}
    performance = {"recompute": recompute} | ({"overlap": overlap} if overlap else {})
    plan = job(on=machine(flops=flops, link=1.0), cp=4, seqlen=32, performance=performance)
    timing = estimate(plan).timing
    [ops] = replayed_times(timing, timing.assembly.chunks[0]).values()
    compute, ring = ops
    assert compute.seconds == pytest.approx(products, rel=SLIGHTLY, abs=1)
    assert ring.call.count == 3 / 2
    assert ring.seconds == pytest.approx(exposed, rel=SLIGHTLY)


def test_a_share_of_one_is_not_true():
    """Two plans in one process: `cp: true` leaves to the model what hides a turn, and nothing does at FREE; 1.0 hides all of it.

    Forward hands 4,096 bytes on three times, backward these and their gradients, of both layers: 2 * 3 * (4,096 + 8,192) s.
    """
    shares = [{"overlap": {"cp": share}} for share in (True, 1.0)]
    found = [
        estimate(job(on=machine(flops=FREE, link=1.0), cp=4, seqlen=32, performance=each)).step_s for each in shares
    ]
    assert found[0] - found[1] == pytest.approx(73_728, rel=1e-3)
