"""Memory-bound work: bytes as the op list counts them, the optimizer's parameters, launches."""

from __future__ import annotations

from math import prod

import pytest
import torch

from steptime import estimate
from steptime.bench.runs import adamw, bandwidth
from steptime.cost import compute
from steptime.software.performance import ITEMSIZE
from steptime.timing.optimizer import update_bytes_per_param

CPU = torch.device("cpu")
CONFIG = """
model: {n_layers: 2, hidden_sz: 64, inter_sz: 96, n_q_heads: 4, n_kv_heads: 2, vocab_sz: 256}
parallelism: {tp: 1, pp: 1, dp: 1}
performance: {software: torch}
data: {gbs: 2, seqlen: 32, microbatch_sz: 2}
hardware: {node_type: h100}
"""


def model_bytes(job, part, names):
    """Bytes forward and backward of the ops of these names, as the cost model counts them."""
    found = estimate(job)
    side = found.assembly.kinds[0] if part == "block" else getattr(found.assembly, part)
    ops = [op for op in side.ops if op.name in names]
    assert len(ops) == len(names)
    forward = sum(compute.forward(op, found.timing.rates, side.sizes).bytes for op in ops)
    return forward, sum(compute.backward(op, found.timing.rates, side.sizes)[0].bytes for op in ops)


def work(job, dtype, name, device=CPU):
    layer = bandwidth.of_job(job)
    return next(w for w in bandwidth.of_layer(layer, dtype, device) if w.name == name)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bytes_are_those_of_the_op_list(job, dtype):
    job = job.replace(**{"performance.precision": dtype})
    assert bandwidth.of_job(job) == (64, 64, 96, 256)
    for norm_impl, fused in (("fused", True), ("composite", False)):
        so = job.replace(**{"performance.norm_impl": norm_impl})
        expected = model_bytes(so, "block", ["attn.norm"])
        assert bandwidth.rmsnorm_bytes(64, 64, ITEMSIZE[dtype], fused=fused) == expected
    silu = work(job, dtype, "silu_mul")
    assert (silu.forward_bytes, silu.backward_bytes) == model_bytes(job, "block", ["mlp.act", "mlp.act.mul"])
    loss = work(job, dtype, "cross_entropy")
    names = ["loss.log_softmax", "loss.nll"] + ["loss.cast"] * (dtype == "bf16")
    assert (loss.forward_bytes, loss.backward_bytes) == model_bytes(job, "head", names)
    assert work(job, dtype, "residual").forward_bytes == model_bytes(job, "block", ["attn.residual"])[0]
    assert work(job, dtype, "embedding").forward_bytes == model_bytes(job, "embedding", ["embedding"])[0]


def test_norms_are_counted_as_the_device_runs_them(job):
    assert (
        work(job, "bf16", "rmsnorm").forward_bytes
        > 4 * work(job, "bf16", "rmsnorm", torch.device("cuda")).forward_bytes
    )


def test_work_is_what_it_says(job):
    x, weight = torch.randn(4, 8), torch.randn(8)
    torch.testing.assert_close(
        bandwidth._rmsnorm(x, weight), x / x.square().mean(-1, keepdim=True).add(1e-5).sqrt() * weight
    )
    torch.testing.assert_close(bandwidth._silu_mul(x, x), x * x.sigmoid() * x)
    copy, add, triad = bandwidth.streams(1024.0, "fp32", CPU)
    for one, count in ((copy, 2), (add, 3), (triad, 3)):
        inputs = one.inputs()
        assert len(inputs) == count
        assert one.forward_bytes == sum(t.nbytes for t in inputs) == count * 1024
    (a, b), (c, d, e), (f, g, h) = copy.inputs(), add.inputs(), triad.inputs()
    torch.testing.assert_close(copy.forward(a, b), a)
    torch.testing.assert_close(add.forward(c, d, e), c + d)
    torch.testing.assert_close(triad.forward(f, g, h), f + 2 * g)


def test_sweep(job, monkeypatch):
    streams = bandwidth.streams
    monkeypatch.setattr(bandwidth, "streams", lambda _, dtype, device: streams(2**16, dtype, device))
    found, notes = bandwidth.sweep(job, CPU, ["fp32", "bf16"], 0.3)
    assert notes == []
    assert {(row.name, row.direction) for row in found if row.dtype == "bf16"} == {
        ("residual", "forward"),
        *(
            (name, way)
            for name in ("rmsnorm", "silu_mul", "cross_entropy", "embedding")
            for way in ("forward", "backward")
        ),
    }
    assert {"copy", "add", "triad"} <= {row.name for row in found}
    for row in found:
        assert row.bytes > 0
        assert 0 < row.timing.min_s <= row.timing.median_s <= row.timing.p90_s


def test_what_does_not_fit_is_noted(job, monkeypatch):
    monkeypatch.setattr(bandwidth.operands, "free_bytes", lambda _: 0.0)
    found, notes = bandwidth.sweep(job, CPU, ["fp32"], 0.1)
    assert found == []
    assert len(notes) == 3 * 2 + 5
    assert all(note.endswith("GiB do not fit") for note in notes)


# --- optimizer and launches ---


def test_the_optimizer_steps_over_the_configs_parameters(job):
    """All of them where they fit; else fewer blocks; a block alone where the ends are too large."""
    assert sum(map(prod, adamw.parameter_shapes(job, 1e12))) == estimate(job).params.total
    ends, block = 2 * 256 * 64 + 64, (estimate(job).params.total - 2 * 256 * 64 - 64) // 2
    assert sum(map(prod, adamw.parameter_shapes(job, ends + 1.5 * block))) == ends + block
    assert sum(map(prod, adamw.parameter_shapes(job, 10.0))) == block


def test_parameters_shrink_with_tensor_parallelism(job):
    split = job.replace(**{"parallelism.tp": 2})
    shapes = adamw.parameter_shapes(split, 1e12)
    assert (48, 64) in shapes  # the gate's 96 rows
    assert (128, 64) in shapes  # the vocabulary's 256


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_optimizer_bytes_are_the_models(job, dtype):
    plain = job.replace(**{"performance.precision": dtype})
    row, note = adamw.step(job, CPU, dtype, seconds=0.0)
    assert row.bytes == update_bytes_per_param(plain, 8.0) * estimate(job).params.total
    assert f"over {estimate(job).params.total:,} parameters" in note
    assert row.timing.min_s > 0


def test_both_kinds_of_step(job):
    found, notes = adamw.steps(job, CPU, ["fp32"], 0.1)
    assert [row.name for row in found] == ["adamw", "adamw_fused"]
    assert len(notes) == 2


def test_launches_on_a_cpu_are_calls():
    found, notes = adamw.launches(CPU, 0.1)
    assert [row.name for row in found] == ["gemm", "move"]
    assert all(0 < row.timing.min_s <= row.timing.median_s <= row.timing.p90_s for row in found)
    assert len(notes) == 1
