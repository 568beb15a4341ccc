"""Megatron-LM before September 2021 waits for each tensor-parallel all-reduce, which takes 2.1 times its time alone."""

from __future__ import annotations

import jobs
import pytest

from steptime.answer.result import estimate

MODEL = {"n_layers": 2, "hidden_sz": 4096, "inter_sz": 16384, "n_q_heads": 32, "vocab_sz": 50304, "glu": False}


def calls(software):
    """The all-reduces of a layer, forward and backward: seconds of all and exposed seconds."""
    plan = jobs.job(MODEL, seqlen=1024, software=software, hardware="ibex-v100-4", tp=4)
    layer = estimate(plan).timing.parts.layer
    found = [*layer.forward.calls, *layer.backward.calls]
    assert [call.kind for call in found] == ["all_reduce"] * 4
    return [(float(call.cost.time_s), float(call.exposed_s)) for call in found]


def test_all_reduces_of_march_2021():
    """Four all-reduces a layer, two each way. Asynchronous backward (NVIDIA/Megatron-LM@16c90445, 2021-09-02) hides some of two.

    F.linear behind copy_to_tensor_model_parallel_region (v2.5 mpu/layers.py, ColumnParallelLinear.forward) hides none; each takes
    2.1 times as long as alone.
    """
    later, before = calls("megatron-2021"), calls("megatron-2021@2021-03")
    assert [exposed == pytest.approx(whole) for whole, exposed in later] == [True, True, False, False]
    assert [exposed == pytest.approx(whole) for whole, exposed in before] == [True] * 4
    assert [slow / usual for (slow, _), (usual, _) in zip(before, later, strict=True)] == pytest.approx([2.1] * 4)
