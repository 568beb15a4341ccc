"""A step whose backwards run in two halves, by hand."""

from __future__ import annotations

import physics_jobs
import pytest
from jobs import job
from physics_jobs import SLIGHTLY

from steptime.answer.result import estimate
from steptime.memory.ledger import PartMemory, Peak
from steptime.memory.split_backward import SplitMemory, chunk_split

DEEP = {"n_layers": 8, "hidden_sz": 8192, "inter_sz": 28672, "n_q_heads": 64, "vocab_sz": 32768}


def timing(schedule, **parallelism):
    return estimate(job(DEEP, software="torch", pp=2, dp=1, gbs=6, schedule=schedule, **parallelism)).timing


def test_half_of_the_matrix_work_of_backward_makes_gradients_of_weights():
    """dgrad and wgrad multiply the same three numbers, wgrad at 0.95 of the rate (MooreThreads/SimuMax a100_pcie.json): of large
    projections wgrad takes 1/0.95 of dgrad's time, 0.5128 of both; each norm's gradient comes with its input's. At 65,536 tokens
    the sums of the weights' gradients that stand beside wgrad are less than 1 % of it."""
    layer = timing("zero_bubble", seqlen=65_536).parts.layer.backward
    assert layer.weight_s / layer.gemm_s == pytest.approx(0.5128, rel=0.012)


def test_seconds_of_gradients_of_weights():
    """At 1 FLOP/s and 8 tokens: 16 FLOPs for each of a layer's 163,840 weights and the head's 131,072, at 0.95 of the rate; the
    embedding has no product.
    """
    found = estimate(physics_jobs.job(on=physics_jobs.machine(flops=1.0))).timing
    weights = [found.parts.alone(part).weight_s for part in found.parts.of]
    assert weights == pytest.approx([0.0, 16 * 131_072 / 0.95, 16 * 163_840 / 0.95], rel=SLIGHTLY)
    [[chunk]] = found.chunks
    assert chunk.weight_s == pytest.approx(16 * (2 * 163_840 + 131_072) / 0.95, rel=SLIGHTLY)


def test_the_bubble_of_a_step_is_that_of_the_paper():
    """Two stages, six micro-batches, ZB-H1 (Qi et al. 2023, table 1). Drawn on paper for a slower last
    stage, as the head makes it: stage 1 waits for one forward, then is never idle through its own 6 (F + I + W)."""
    found = timing("zero_bubble")
    (first,), (last,) = found.chunks
    assert last.forward_s > first.forward_s
    send = found.boundary_costs[0].time_s
    busy = 6 * (last.forward_s + last.backward_s)
    # sends hold their sender under torch: stage 1 starts a send after the first forward, and sends six gradients
    assert found.walk.times()[1].end_s(-1) == pytest.approx(first.forward_s + send + busy + 6 * send, rel=1e-9)


def test_a_chunk_of_two_parts_by_hand():
    """Two layers of 10 bytes saved, 12 kept for the weights, 15 at most in their first half; a head of 4, 3 and 9; 7 and 2 bytes
    of weight gradient.

    Kept in all 2 * 12 + 3 = 27. First half: the head's with both layers before it, 20 + 9 = 29; the second layer's with one
    before it and the head after it, 10 + 15 + 3 = 28; the first's with one behind it, 15 + 12 + 3 = 30.
    """
    layer, head = PartMemory(10.0, Peak(0.0, ""), Peak(0.0, "")), PartMemory(4.0, Peak(0.0, ""), Peak(0.0, ""))
    split = [SplitMemory(12.0, Peak(15.0, "layer"), 7.0), SplitMemory(3.0, Peak(9.0, "head"), 2.0)]
    found = chunk_split([(2, layer, split[0]), (1, head, split[1])])
    assert found == SplitMemory(27.0, Peak(30.0, "layer"), 7.0)


def test_sends_of_a_v_cross_every_boundary_but_the_wrap_around():
    """Eight chunks on four stages: chunk 0 crosses each of three boundaries down, chunk 1 up, forward and back, 6 times."""
    found = estimate(job(DEEP, software="torch", pp=4, dp=1, gbs=6, vpp=2, schedule="zbv"))
    rows = [row for row in found.collectives if row.axis == "pp"]
    assert [(row.name, row.count_per_step) for row in rows] == [(f"stage {r} to {r + 1}", 24.0) for r in range(3)]
