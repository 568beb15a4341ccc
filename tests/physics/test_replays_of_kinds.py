"""Recomputation of chunks whose kinds of layer alternate: each layer runs again once, whichever run it is in."""

from __future__ import annotations

import pytest
from physics_jobs import job, machine

from steptime.answer.result import estimate
from steptime.timing.op_times import replayed_times
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
