"""A flash kernel draws its dropout mask in forward and again in backward: 1.6e10 scores a second on each SM."""

from __future__ import annotations

import pytest
from jobs import job

from steptime.answer.result import estimate
from steptime.cost import compute
from steptime.cost.rates import rates
from steptime.hardware.machine import Machine
from steptime.job.assembly import Assembly
from steptime.model.ops import Attention
from steptime.report.explain_attention import attention as explained
from steptime.report.kernel_table import op_times
from steptime.software.performance import load_software


def extra_s(machine: str) -> float:
    """What dropout adds to both passes of 4 sequences of 1,024 tokens with 16 heads of 128."""
    r = rates(Machine.load(machine).accelerator, load_software("megatron-core"))
    shape = {"batch": 4.0, "q_len": 1024.0, "kv_len": 1024.0, "n_q_heads": 16.0, "n_kv_heads": 16.0}
    taken = []
    for drops in (True, False):
        op = Attention("", d_qk=128.0, d_v=128.0, drops=drops, **shape)
        taken.append(compute.forward(op, r, {}).time_s + compute.backward(op, r, {})[0].time_s)
    return (taken[0] - taken[1]) / r.slowness


@pytest.mark.parametrize(
    ("machine", "sm_count", "measured_us"), [("dgx-b300", 148, (24, 45)), ("dgx-h200", 132, (20,))]
)
def test_beside_measured_kernels(machine, sm_count, measured_us):
    """4 * 16 * 1024 * 1024 / 2 = 33.55e6 causal scores, drawn twice.

    67.1e6 / (148 * 1.6e10) = 28.3 us, where FlashAttention-2 takes 24 us more on B300 and cuDNN's kernel 45; on H200
    67.1e6 / (132 * 1.6e10) = 31.8 us, where cuDNN's takes 20 (NVIDIA/TransformerEngine issue 3312).
    """
    found = extra_s(machine) * 1e6
    assert found == pytest.approx(2 * 33.554432e6 / (sm_count * 1.6e10) * 1e6)
    assert found == pytest.approx({148: 28.34, 132: 31.78}[sm_count], abs=0.01)
    assert all(0.6 < found / measured < 1.6 for measured in measured_us)


def test_a_plan_with_dropout_draws_in_every_layer():
    """Llama 3 8B, tp 2, 8,192 tokens: 16 heads * 8192 * 8192 / 2 = 536.9e6 scores a pass and layer.

    On H100 (132 SMs) 536.9e6 / 2.112e12 = 254.2 us, forward and backward.
    """
    taken = {}
    for rate in (0.0, 0.1):
        model = {"preset": "llama3-8b", "dropout": rate}
        found = estimate(job(model, seqlen=8192, tp=2, dp=4, performance={"attention_kernel": "fa2"}))
        row = next(row for row in op_times(found) if isinstance(row.op, Attention))
        taken[rate] = (row.forward_s, row.backward_s)
        assert ("dropout of 537 Mscores" in str(explained(found))) == (rate > 0.0)
    ahead, back = (taken[0.1][i] - taken[0.0][i] for i in (0, 1))
    slowness = found.timing.rates.slowness
    assert ahead / slowness == pytest.approx(254.2e-6, rel=1e-3)
    assert back == pytest.approx(ahead)


@pytest.mark.parametrize(
    ("rate", "backend", "kernel", "flash_us"),
    [(0.1, "flash", "fa2", 740.0), (0.0, "flash", "best", 455.5), (0.1, "cudnn", "best", 455.5)],
)
def test_flash_attention_draws_dropout_in_its_second_version(rate, backend, kernel, flash_us):
    """TransformerEngine v2.7 utils.py, get_attention_backend: "Disabling FlashAttention 3 for dropout".

    Llama 3 8B, tp 2, 8,192 tokens on H100: 2 * 16 * 8192^2 * 256 / 2 = 274.9e9 FLOPs forward, at 8192 / 8642 * 4546 / 4096 =
    1.0521 of the rate at 4,096 tokens. FlashAttention-2 has 0.357 of 989 TFLOP/s there: 740 us; version 3 0.58: 455.5 us. The
    mask takes 254.2 us, the launch 4 us.
    """
    performance = {"attention_backend": backend}
    found = estimate(
        job(
            {"preset": "llama3-8b", "dropout": rate},
            seqlen=8192,
            tp=2,
            dp=4,
            software="megatron-core",
            performance=performance,
        )
    )
    assert found.job.software.kernels.attention_kernel == kernel
    row = next(row for row in op_times(found) if isinstance(row.op, Attention))
    taken_us = 1e6 * row.forward_s / found.timing.rates.slowness
    assert taken_us == pytest.approx(flash_us + 4.0 + (254.2 if rate else 0.0), abs=0.5)


@pytest.mark.parametrize("exchange", ["p2p", "all_gather", "a2a"])
def test_ranks_that_share_a_sequence_share_its_mask(exchange):
    """The same over cp 2: 268.4e6 scores of each rank, 268.4e6 / 2.112e12 = 127.1 us a pass, by any exchange."""
    taken = []
    for rate in (0.1, 0.0):
        model = {"preset": "llama3-8b", "dropout": rate}
        found = estimate(job(model, seqlen=8192, tp=2, dp=2, cp=2, cp_comm_type=exchange))
        taken.append(next(row.forward_s for row in op_times(found) if isinstance(row.op, Attention)))
    assert (taken[0] - taken[1]) / found.timing.rates.slowness == pytest.approx(127.1e-6, rel=1e-3)


@pytest.mark.parametrize("impl", ["flash", "unfused"])
def test_hidden_states_alone_may_drop(impl):
    """Phi-2 drops 0.1 of hidden states and no scores: its kernel draws nothing, and unfused attention keeps no mask of scores.

    One sequence of 512 tokens, 32 heads: a mask of 512 * 512 * 32 bytes, and the dropped scores, 2 bytes each, would be kept.
    """
    kept, drawn = {}, {}
    for rate in (0.0, 0.1):
        model = {"preset": "phi-2", "n_layers": 1, "attention_dropout": rate}
        found = estimate(job(model, seqlen=512, performance={"attention_impl": impl, "software": "torch"}))
        layer = Assembly(found.job).kinds[0]
        kept[rate] = sum(layer.sizes[name] for name in {name for op in layer.ops for name in op.saves})
        drawn[rate] = [row.op.drops for row in op_times(found) if isinstance(row.op, Attention)]
    if impl == "flash":
        assert (drawn[0.0], drawn[0.1]) == ([False], [True])
        assert kept[0.0] == kept[0.1]
    else:
        assert kept[0.1] - kept[0.0] == 3 * 512 * 512 * 32
