"""Matrix products: which ones, in which layout, and what comes out of a sweep."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from steptime import estimate
from steptime.bench import timings
from steptime.bench.runs import gemm, operands
from steptime.bench.runs.clock import Timing
from steptime.bench.runs.gemm import GemmShape

CPU = torch.device("cpu")
CONFIG = """
model: {n_layers: 2, hidden_sz: 64, inter_sz: 96, n_q_heads: 4, n_kv_heads: 2, vocab_sz: 256}
parallelism: {tp: 1, pp: 1, dp: 1}
performance: {software: torch}
data: {gbs: 2, seqlen: 32, microbatch_sz: 2}
hardware: {node_type: h100}
"""


def test_projections_are_the_configs_own(job):
    """T = 2 x 32 tokens; k and v have 2 heads of 16; wgrad as k x n with the tokens summed over."""
    shapes = gemm.projections(job)
    named = {(s.name, s.direction): (s.m, s.n, s.k) for s in shapes}
    assert named["attn.q_proj", "forward"] == (64, 64, 64)
    assert named["attn.k_proj", "forward"] == (64, 32, 64)
    assert named["mlp.gate_proj", "forward"] == (64, 96, 64)
    assert named["mlp.down", "forward"] == (64, 64, 96)
    assert named["mlp.down", "dgrad"] == (64, 96, 64)
    assert named["mlp.down", "wgrad"] == (96, 64, 64)
    assert named["head.proj", "wgrad"] == (64, 256, 64)
    assert len(shapes) == 3 * 8  # q, k, v, o, gate, up, down, head


def test_projections_do_the_estimates_flops(job):
    shapes = {(s.name, s.direction): s.flops for s in gemm.projections(job)}
    assert shapes == {(r.name, r.pass_): r.flops for r in estimate(job).gemms}


def test_projections_shrink_with_tensor_parallelism(job):
    whole = {(s.name, s.direction): s for s in gemm.projections(job)}
    split = {(s.name, s.direction): s for s in gemm.projections(job.replace(**{"parallelism.tp": 2}))}
    assert split["mlp.gate_proj", "forward"].n == whole["mlp.gate_proj", "forward"].n // 2
    assert split["mlp.down", "forward"].k == whole["mlp.down", "forward"].k // 2


def test_products_of_two_activations_are_no_projections(job):
    unfused = job.replace(**{"performance.attention_impl": "unfused"})
    assert len(estimate(unfused).gemms) > len(gemm.projections(unfused)) == 24


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp8"])
def test_products_are_those_of_a_linear_layer(dtype):
    """Against autograd of F.linear: 8 tokens, 32 features in, 48 out."""
    x = operands.random((16, 32), dtype, CPU)
    weight = operands.random((48, 32), dtype, CPU)
    grad = operands.random((16, 48), dtype, CPU)
    wide_x, wide_weight = x.float().requires_grad_(), weight.float().requires_grad_()
    out = F.linear(wide_x, wide_weight)
    out.backward(grad.float())
    quantized = dtype == "fp8"
    given = {
        ("forward", 16, 48, 32): (x, weight),
        ("dgrad", 16, 32, 48): (grad, weight.t().contiguous() if quantized else weight),
        ("wgrad", 32, 48, 16): (x.t().contiguous(), grad.t().contiguous()) if quantized else (grad, x),
    }
    expected = {"forward": out, "dgrad": wide_x.grad, "wgrad": wide_weight.grad}
    for (direction, m, n, k), pair in given.items():
        shape = GemmShape("w", direction, m, n, k)
        made = gemm.pair(shape, dtype, CPU)
        assert [tuple(p.shape) for p in pair] == [tuple(p.shape) for p in made[:2]]  # pair() draws these very shapes
        got = gemm.multiply(shape, dtype, *pair, *made[2:])
        want = expected[direction].t() if quantized and direction == "wgrad" else expected[direction]
        torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=6e-2)


def test_operands_are_random_and_cold():
    left, right = gemm.pair(GemmShape("x", "forward", 64, 64, 64), "bf16", CPU)
    assert left.float().std() == pytest.approx(1.0, abs=0.1)
    assert not torch.equal(left, right)
    assert operands.copies(2 * operands.CPU_CACHE, CPU) == 1
    assert operands.copies(operands.CPU_CACHE / 2, CPU) == 4
    assert operands.copies(1.0, CPU) == operands.MOST_COPIES
    large = operands.random((3, operands.DRAWN), "bf16", CPU)
    assert large.is_contiguous()
    assert large.float().std() == pytest.approx(1.0, abs=0.1)
    turn = operands.rotate([1, 2])
    assert [turn() for _ in range(5)] == [1, 2, 1, 2, 1]


def test_precision_is_put_back():
    before = torch.get_float32_matmul_precision()
    with gemm.precision("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before
    with gemm.precision("bf16"):
        assert torch.get_float32_matmul_precision() == "highest"


def test_sweep_of_a_config(job, monkeypatch):
    monkeypatch.setattr(gemm, "sweep_shapes", lambda _: [GemmShape("sweep", "forward", 64, 64, 64)])
    found, notes = gemm.sweep(job, CPU, 30.0)  # it ends long before, by its rounds
    measured = {row.dtype for row in found}
    assert {"fp32", "bf16"} <= measured <= {"fp32", "bf16", "fp16"}
    assert any(note.startswith("tf32: not measured") for note in notes)
    assert any(note.startswith("fp8: not measured") for note in notes)
    shapes = {(s.name, s.direction, s.m, s.n, s.k) for s in (*gemm.projections(job), *gemm.sweep_shapes(CPU))}
    for dtype in measured:
        assert {(r.name, r.direction, r.m, r.n, r.k) for r in found if r.dtype == dtype} == shapes
    for row in found:
        assert 0 < row.timing.min_s <= row.timing.median_s <= row.timing.p90_s
        assert row.timing.reps >= 3
    same = [r for r in found if r.dtype == "fp32" and r.name in {"attn.k_proj", "attn.v_proj"}]
    assert len({(r.direction, r.timing) for r in same}) == 3  # alike shapes are one measurement


def test_what_does_not_fit_or_end_in_time_is_noted():
    huge = GemmShape("huge", "forward", 2**20, 2**20, 2**20)
    found, notes = gemm.time_shapes([huge], "fp32", CPU, 1.0)
    assert found == []
    assert notes == ["fp32 huge forward 1048576 x 1048576 x 1048576: not measured; 12288.0 GiB of operands do not fit"]
    small = [GemmShape("s", "forward", 8 * i, 8, 8) for i in range(1, 4)]
    found, notes = gemm.time_shapes(small, "fp32", CPU, 1.0, patience=-1.0)
    assert (found, notes) == ([], ["fp32 s: 3 of 3 shapes not measured, time budget exceeded"])


def test_the_best_shape_counts_by_its_minimum():
    """2 x 10^3 FLOP in 1 us against 2 x 20^3 in 4 us: 2 and 4 GFLOP/s."""
    slow = timings.GemmTiming("a", "forward", "fp32", 10, 10, 10, Timing(1e-6, 1e-6, 1e-6, 3))
    fast = timings.GemmTiming("b", "forward", "fp32", 20, 20, 20, Timing(4e-6, 9e-6, 9e-6, 3))
    assert gemm.best([slow, fast]) == {"fp32": fast}


def test_sweeps_grow_with_the_device():
    cpu, gpu = gemm.sweep_shapes(CPU), gemm.sweep_shapes(torch.device("cuda"))
    for shapes in (cpu, gpu):
        assert [s.flops for s in shapes] == sorted(s.flops for s in shapes)
        assert {s.direction for s in shapes} == {"forward", "dgrad", "wgrad"}
        assert len(shapes) == len(set(shapes))
    assert {1024, 16384} <= {s.m for s in gpu}
    assert max(s.m for s in cpu) <= 4096
