"""Attention's back ends: which run, on what shapes, and what is timed."""

from __future__ import annotations

import pytest
import torch

from steptime import estimate
from steptime.bench.runs import sdpa
from steptime.bench.runs.sdpa import AttentionShape

CPU = torch.device("cpu")
CONFIG = """
model: {n_layers: 2, hidden_sz: 64, inter_sz: 96, n_q_heads: 4, n_kv_heads: 2, vocab_sz: 256}
parallelism: {tp: 1, pp: 1, dp: 1}
performance: {software: torch}
data: {gbs: 2, seqlen: 32, microbatch_sz: 2}
hardware: {node_type: h100}
"""
SMALL = AttentionShape(2, 32, 4, 2, 16)


def test_shape_is_the_configs_own(job):
    assert sdpa.of_job(job) == SMALL
    assert sdpa.of_job(job.replace(**{"parallelism.tp": 2})) == AttentionShape(2, 32, 2, 1, 16)
    lengths = [s.seqlen for s in sdpa.shapes(job, CPU)]
    assert lengths[0] == 32
    assert len(lengths) == len(set(lengths)) == 5


def test_flops_are_the_models(job):
    """Forward 2 x 2 b h s^2 d halved, backward 2.5 times that."""
    op = next(op for op in estimate(job).assembly.kinds[0].ops if type(op).__name__ == "Attention")
    forward, backward = sdpa.time_shape(SMALL, "default", "fp32", CPU, 0.0)
    assert forward.flops == op.full_flops * op.causal_share == 2 * 2 * 2 * 4 * 32**2 * 16 / 2
    assert backward.flops == 2.5 * forward.flops


@pytest.mark.parametrize("backend", ["flash", "math", "default"])
def test_back_ends_agree(backend):
    """Grouped heads, causal: softmax of masked scores, written out."""
    torch.manual_seed(0)
    q, k, v, grad = sdpa.tensors(SMALL, "fp32", CPU)
    assert q.shape == (2, 4, 32, 16)
    assert k.shape == (2, 2, 32, 16)
    assert q.stride()[1] == 16  # heads of one token lie side by side
    with sdpa.only(backend):
        out = sdpa.attend(q, k, v)
        found = sdpa.gradients(out, (q, k, v), grad)
    keys, values = (x.repeat_interleave(2, dim=1) for x in (k, v))
    scores = (q @ keys.transpose(-1, -2)) / 4.0
    mask = torch.ones(32, 32, dtype=torch.bool).tril()
    want = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values
    torch.testing.assert_close(out, want)
    for got, expected in zip(found, torch.autograd.grad(want, (q, k, v), grad), strict=True):
        torch.testing.assert_close(got, expected)


def test_sweep_measures_what_runs_and_notes_what_does_not(job):
    found, notes = sdpa.sweep(job, CPU, ["fp32"], 0.5)
    assert {row.backend for row in found} == {"default", "flash", "math"}
    for backend in ("cudnn", "efficient"):
        assert any(note.startswith(f"attention fp32 {backend}: not measured") for note in notes)
    for row in found:
        assert row.causal
        assert 0 < row.timing.min_s <= row.timing.median_s <= row.timing.p90_s
    mine = [row for row in found if row.seqlen == 32 and row.backend == "flash"]
    assert [row.direction for row in mine] == ["forward", "backward"]


def test_scores_that_do_not_fit_are_noted():
    long = AttentionShape(1, 2**20, 8, 8, 64)
    assert sdpa.usable("math", long, "fp32", CPU).endswith("GiB do not fit")
    assert sdpa.usable("flash", SMALL, "fp32", CPU) == ""
