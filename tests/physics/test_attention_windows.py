"""A window's two masked edges cost what the one of a causal triangle costs twice: n / (n + 450) of the asymptote for n keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rates import RATES

from steptime.cost import compute
from steptime.cost.rates import Rates
from steptime.model.model import AttentionKind
from steptime.model.ops import Attention

FREE = 1e30


def rates(forward_tflops: float, backward_tflops: float, of_64: tuple[float, float]) -> Rates:
    return RATES._replace(
        attention_forward_flops=forward_tflops * 1e12,
        attention_backward_flops=backward_tflops * 1e12,
        bytes_per_s=FREE,
        gemm_kernel_s=0.0,
        move_kernel_s=0.0,
        attention_head_64=of_64,
    )


def attention(length: float, window: int, heads: float) -> Attention:
    share, reach = AttentionKind(window=window).shares(length)
    return Attention(
        "", batch=1.0, q_len=length, kv_len=length, n_q_heads=heads, n_kv_heads=heads, d_qk=64, d_v=64,
        causal_share=share, reach=reach,
    )  # fmt: skip


@pytest.mark.parametrize(("length", "forward", "backward"), [(4096.0, 161, 182), (16384.0, 167, 188)])
def test_a_short_window_beside_published_rates(length, forward, backward):
    """cuDNN 9.22 on GB200, window 128, heads of 64 (NVIDIA/cudnn-frontend@3929da2, gpt_oss, bf16).

    Rated 1,000 and 780 TFLOP/s at 4,096 keys and heads of 128: asymptotes 4,546 / 4,096 of that, 1,110 and 866. Times 128 / 578
    and 0.667 forward, 164; times 128 / 578 and 0.836 backward, 160. The length does not matter.
    """
    r, op = rates(1000.0, 780.0, (0.667, 0.836)), attention(length, 128, 128.0)
    ahead, (back, _) = compute.forward(op, r, {}), compute.backward(op, r, {})
    found = ahead.flops / ahead.time_s / 1e12, back.flops / back.time_s / 1e12
    assert found == pytest.approx((163.9, 160.3), abs=0.1)
    assert found == pytest.approx((forward, backward), rel=0.15)


def test_a_longer_window_on_hopper():
    """cuDNN 9.19 on H200, window 1,024: 336 and 289 TFLOP/s at 4,096 (same place, h200_919_only_cudnn).

    573.6 and 445 TFLOP/s at heads of 128; times 1,024 / 1,474 * 4,546 / 4,096 = 0.771, and 0.725 or 0.836: 320.6 and 286.8.
    """
    r, op = rates(573.6, 445.0, (0.725, 0.836)), attention(4096.0, 1024, 64.0)
    ahead, (back, _) = compute.forward(op, r, {}), compute.backward(op, r, {})
    found = ahead.flops / ahead.time_s / 1e12, back.flops / back.time_s / 1e12
    assert found == pytest.approx((320.6, 286.8), abs=0.3)
    assert found == pytest.approx((336, 289), rel=0.05)


def test_chunks_are_triangles_of_their_own():
    """8,192 tokens in chunks of 2,048 run as four sequences of 2,048: 2,048 / 2,498 * 4,546 / 4,096 = 0.910 of the rated rate."""
    share, reach = AttentionKind(window=2048, chunked=True).shares(8192.0)
    assert (share, reach) == (0.125, 2048.0)
    op = Attention(
        "", batch=1.0, q_len=8192.0, kv_len=8192.0, n_q_heads=1.0, n_kv_heads=1.0, d_qk=128, d_v=128,
        causal_share=share, reach=reach,
    )  # fmt: skip
    found = compute.forward(op, rates(1000.0, 780.0, (1.0, 1.0)), {})
    assert found.flops / found.time_s / 1e12 == pytest.approx(909.9, abs=0.1)


@pytest.mark.parametrize(("width", "share"), [(64, 0.5), (65, 1.0), (128, 1.0)])
def test_heads_above_64_run_like_those_of_128(width, share):
    """Kernels are compiled for 64, 96, 128 and more: a head of 65 takes the next one (flash-attention's HEADDIM_SWITCH)."""
    assert compute.head_share(replace(attention(8192.0, 128, 1.0), d_qk=width), 0.5) == share
