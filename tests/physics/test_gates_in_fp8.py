"""A gate of attention's output under fp8 by current scaling: what its backward quantizes, and on what its ranks agree."""

from __future__ import annotations

import pytest
from physics_jobs import job

from steptime.hardware.machine import Machine
from steptime.job.assembly import Assembly
from steptime.model.ops import Comm, Gemm, Op


def layer(**said) -> dict[str, Op]:
    """8 tokens of 128, one head of 64 with a gate, unless said otherwise."""
    model = {"attention": {"gated": True}, "head_dim": 64} | said.pop("model", {})
    plan = job(on=Machine.load("dgx-h100"), model=model, performance={"precision": "fp8_current"}, **said)
    return {op.name: op for op in Assembly(plan).kinds[0].ops}


@pytest.mark.parametrize(("tp", "heads"), [(1, 1), (2, 2)])
def test_a_gate_narrower_than_the_layer(tp, heads):
    """64 values of bf16 a token are read for their maximum and to be cast into rows and columns, 2 + 2 + 1 + 1 B; the 128 that it
    reads were kept by rows: 1 + 1 B for columns.
    """
    gate = layer(tp=tp, model={"n_q_heads": heads, "n_kv_heads": heads})["attn.gate"]
    assert isinstance(gate, Gemm)
    assert (gate.m, gate.n, gate.k, gate.cast_bytes) == (8, 64, 128, 8 * (6 * 64 + 2 * 128))


def test_ranks_agree_on_a_maximum():
    """One fp32 number, where sequence-parallel ranks cast their shares of one tensor (module/linear.py, with_amax_reduction)."""
    ops = layer(tp=2, sp=True, model={"n_q_heads": 2, "n_kv_heads": 2})
    agreed = [op for op in ops.values() if isinstance(op, Comm) and op.name.endswith(".amax")]
    assert {op.bytes for op in agreed} == {4.0}
    assert {(op.kind, op.backward) for op in agreed} == {("all_reduce", None), (None, "all_reduce")}
