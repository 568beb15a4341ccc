"""Recomputation of chunks whose kinds of layer alternate: each layer runs again once, whichever run it is in."""

from __future__ import annotations

import pytest
from physics_jobs import job, machine

from steptime.answer.result import estimate
from steptime.cost.comm import CommCost
from steptime.cost.work import CommCall, Work
from steptime.timing.op_times import OpTime, chunk_op_times, op_times, replayed_times
from steptime.timing.step_time import layer_replays_s

KINDS = [{"repeat": 1, "inter_sz": 512}, {"repeat": 2}, {"repeat": 3, "inter_sz": 512}]


def test_layers_of_a_kind_apart_from_each_other():
    """One wide layer, two narrow ones, three wide ones, on 1 FLOP/s: projections have 163,840 weights, wide ones 3 * 128 * 256
    more; 2 FLOPs for each of 8 tokens, and 16,384 of causal attention. The last product's output is read by nothing: Megatron
    runs it again all the same.
    """
    performance = {"activation_checkpointing_type": "full"}
    plan = job(on=machine(flops=1.0), model={"n_layers": 6, "layers": KINDS}, performance=performance)
    timing = estimate(plan).timing
    chunk = timing.assembly.chunks[0]
    spread = replayed_times(timing, chunk)
    wide, narrow = timing.assembly.kinds
    weights = {wide: 163_840 + 3 * 128 * 256, narrow: 163_840}
    for found in ({part: ops[0].seconds for part, ops in spread.items()}, layer_replays_s(timing.parts, chunk)):
        assert found == pytest.approx({part: 16 * n + 16_384 for part, n in weights.items()}, rel=1e-4)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_parts_of_a_chunk_in_the_order_they_run(recompute):
    """The second of two stages holds layers 3 to 5 of six, counted from 0, and the head; backward runs them from the last on.

    What runs again comes first in a layer's backward, its seconds as those of the chunk.
    """
    performance = {"activation_checkpointing_type": recompute}
    on = machine(flops=1.0, memory=1.0)
    timing = estimate(job(on=on, pp=2, model={"n_layers": 6, "layers": KINDS}, performance=performance)).timing
    (first,), (second,) = timing.assembly.stages
    names = ["layer 3 (dense)", "layer 4 (dense)", "layer 5 (dense)", "head"]
    assert [one.name for one in chunk_op_times(timing, second, "F")] == names
    assert [one.name for one in chunk_op_times(timing, second, "B")] == names[::-1]
    names = ["embedding", "layer 0 (dense)", "layer 1 (dense)", "layer 2 (dense)"]
    assert [one.name for one in chunk_op_times(timing, first, "F")] == names
    assert [one.name for one in chunk_op_times(timing, first, "B")] == names[::-1]
    for chunk, seconds in ((first, timing.chunks[0][0]), (second, timing.chunks[1][0])):
        for way, expected in (("F", seconds.forward_s), ("B", seconds.backward_s)):
            layers = chunk_op_times(timing, chunk, way)
            assert sum(op.seconds for layer in layers for op in layer.ops) == pytest.approx(expected)
    starts = [layer.ops[0].name for layer in chunk_op_times(timing, first, "B") if layer.name != "embedding"]
    assert [name == "recomputation" for name in starts] == [recompute == "full"] * 3


def test_the_kernels_of_an_op_and_its_collective():
    """2 s of products; of a collective of 3 s one is hidden, by what ran before it."""
    call = CommCall("c", "all_gather", 8.0, CommCost(0.0, 3.0, "", 3.0, ""), 1.0, "etp")
    found = list(op_times("x", Work(gemm_s=2.0, calls=[call]), before=False))
    assert found == [OpTime("x", "gemm", 2.0), OpTime("c", "ep_comm", 2.0, call, before=False)]
