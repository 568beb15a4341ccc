"""Kernels whose seconds have several terms, each worked out alone: scans, wgrad without its recipe, eager FlexAttention."""

from __future__ import annotations

from dataclasses import replace

import pytest
from physics_jobs import machine
from rates import RATES

from steptime.cost.compute import gemm_backward, scan_pass
from steptime.cost.rates import eager_flex_efficiency
from steptime.model.ops import Gemm, Param
from steptime.model.scans import Scan
from steptime.software.precision import RECIPES

FAST = RATES._replace(recipe_flops=400e12)
SCAN = Scan("ssm", tokens=100, n_heads=4, head_dim=8, state_dim=16, chunk_sz=32)


@pytest.mark.parametrize(("times", "passes"), [(1.0, 1.0), (2.8, 2.0)])
def test_terms_of_a_scan(times, passes):
    """100 tokens, 4 heads of 8, 16 states, chunks of 32: FLOPs 32 * 16 + 4 * (32 * 8 + 4 * 16 * 8) = 3,584 a token, of which
    frameworks count 7 * 4 * 8 * 16 = 3,584 too. The convolution moves 2 * 2 * (32 + 32) = 256 B a token; the rest states,
    6 * 4 * 8 * 16 / 32 = 96, and 10 * 4 of dt. Six kernels of 3 us.
    """
    found = scan_pass(SCAN, RATES._replace(scan_flops=1e9, conv_bytes_per_s=1e6, move_rate=0.5), times, passes)
    assert (found.flops, found.bytes) == (passes * 358_400, pytest.approx(times * 39_200))
    assert found.compute_s == pytest.approx(times * 358_400 / 1e9)
    assert found.bandwidth_s == pytest.approx(times * (13_600 / 0.5e12 + 25_600 / 1e6))
    assert found.kernels == 6 * times
    assert found.time_s == pytest.approx(found.compute_s + found.bandwidth_s + 6 * times * 3e-6)


def test_wgrad_without_its_recipe():
    """8 x 16 by 16 x 32: it reads 8 * 16 inputs and 8 * 32 gradients in bf16, and writes 16 * 32 gradients of 4 B twice (read
    first, as they accumulate). dgrad reads the quantized 8 * 32 and 16 * 32, a byte each, and writes 8 * 16 in bf16.
    """
    op = Gemm("w", params=(Param("w", (32, 16)),), m=8, n=32, k=16, recipe=RECIPES["fp8_rowwise_gw_hp"])
    dgrad, wgrad = gemm_backward(op, FAST)
    assert dgrad.bytes == 256 + 512 + 2 * 128
    assert wgrad.bytes == 2 * 128 + 2 * 256 + 2 * 4 * 512
    plain = gemm_backward(replace(op, recipe=None), FAST)[1]
    assert wgrad == plain


def test_products_of_eager_flex_attention():
    """Tensor cores at 8, fp32 at 2 of a peak of 16: forward one product of each, 2 / (1/2 + 1/8) = 3.2; backward two of five in
    fp32, 5 / (2/2 + 3/8) = 3.636.
    """
    device = machine(peak_flops={"bf16": 16.0, "fp32": 4.0}, sustained_flops={"bf16": 8.0, "fp32": 2.0}).accelerator
    assert eager_flex_efficiency(device, "bf16") == (pytest.approx(3.2 / 16), pytest.approx(40 / 11 / 16))
