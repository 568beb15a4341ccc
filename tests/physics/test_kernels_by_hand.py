"""Kernels whose seconds have several terms, each worked out alone: scans, wgrad without its recipe, eager FlexAttention."""

from __future__ import annotations

from dataclasses import replace

import pytest
from physics_jobs import job, machine
from rates import RATES

from steptime.cost.compute import NOTHING, backward, forward, gemm_backward, scan_pass
from steptime.cost.part_seconds import forward_work
from steptime.cost.rates import eager_flex_efficiency
from steptime.model.eager_flex import eager_flex
from steptime.model.ops import Attention, Casting, Comm, Gemm, Param, Tensor
from steptime.model.scans import Chunked, Scan
from steptime.software.precision import RECIPES
from steptime.timing.part_times import pricing

FAST = RATES._replace(recipe_flops=400e12)
SCAN = Scan("ssm", tokens=100, n_heads=4, n_groups=1, head_dim=8, state_dim=16, chunk_sz=32, itemsize=2.0)


@pytest.mark.parametrize(("times", "passes"), [(1.0, 1.0), (2.8, 2.0)])
def test_terms_of_a_scan(times, passes):
    """100 tokens, 4 heads of 8, 16 states, chunks of 32: FLOPs 32 * 16 + 4 * (32 * 8 + 4 * 16 * 8) = 3,584 a token, of which
    frameworks count 7 * 4 * 8 * 16 = 3,584 too. The convolution moves 2 * 2 * (32 + 32) = 256 B a token; the rest states,
    6 * 4 * 8 * 16 / 32 = 96, and 10 * 4 of dt. Six kernels of 3 us.
    """
    slow = RATES._replace(scan_flops=1e9, bytes_per_s=2e6, conv_bytes_per_s=1e6, move_rate=0.5)
    found = scan_pass(SCAN, slow, times, passes)
    assert (found.flops, found.bytes) == (passes * 358_400, pytest.approx(times * 39_200))
    assert found.compute_s == pytest.approx(times * 358_400 / 1e9)
    assert found.bandwidth_s == pytest.approx(times * (13_600 / 1e6 + 25_600 / 1e6))
    assert found.kernels == 6 * times
    assert found.time_s == pytest.approx(found.compute_s + found.bandwidth_s + 6 * times * 3e-6)


@pytest.mark.parametrize(("run", "times", "passes"), [(forward, 1.0, 1.0), (backward, 3.0, 2.0)])
def test_terms_of_linear_attention(run, times, passes):
    """It reads 2,000 B and makes 600 B for its output and 100 B that backward reads: 2,700 B, at 1 kB/s 2.7 s beside arithmetic.
    Six kernels of 3 us. Frameworks count 5 FLOPs for each of 100 tokens, twice in backward.
    """
    made = Tensor("o", 300.0, 2.0), Tensor("state", 50.0, 2.0)
    op = Chunked("a", ("q", "k"), made[:1], stats=made[1:], tokens=100.0, counted=5.0, d_k=8, d_v=8, chunk_sz=4)
    op.backward_times = 3.0
    found = run(op, RATES._replace(bytes_per_s=1e3), {"q": 1_500.0, "k": 500.0})
    found = found[0] if run is backward else found
    assert (found.flops, found.bytes, found.kernels) == (passes * 500, times * 2_700, times * 6)
    assert found.bandwidth_s == pytest.approx(times * 2.7)
    assert found.time_s - found.compute_s == pytest.approx(times * 6 * 3e-6)


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


def test_operands_of_eight_bits():
    """MXFP8: 1 + 1/32 byte for each operand's element, of which 32 share a scale; results are bf16. m 8, n 32, k 16: forward
    reads 128 inputs and 512 weights and writes 256; dgrad reads 256 gradients and the weights and writes 128; wgrad reads inputs
    and gradients and writes 512 in fp32, read first. On a device with twice the mean rows the mean is half of 2 * 8 * 32 * 16.
    """
    op = Gemm("w", params=(Param("w", (32, 16)),), m=8, n=32, k=16, recipe=RECIPES["mxfp8"], load=2.0)
    ahead, (dgrad, wgrad), byte = forward(op, FAST, {}), gemm_backward(op, FAST), 33 / 32
    assert ahead.bytes == byte * (128 + 512) + 2 * 256
    assert dgrad.bytes == byte * (256 + 512) + 2 * 128
    assert wgrad.bytes == byte * (128 + 256) + 2 * 4 * 512
    assert ahead.flops == 8 * 32 * 16


def test_bytes_of_attention():
    """3 sequences, 8 queries of 4 heads, 16 keys and values of 2: 3 * (8 * 4 + 16 * 2) rows, of 8 of a query or key and 4 of a
    value or output, in bf16: 4,608 B. Backward moves twice as much. FLOPs 2 * 3 * 4 * 8 * 16 * 12 / 2 = 18,432; of backward's
    five products three are 8 wide and two 4: 32/12 of it.
    """
    op = Attention("a", batch=3, q_len=8, kv_len=16, n_q_heads=4, n_kv_heads=2, d_qk=8, d_v=4)
    ahead, (back, rest) = forward(op, RATES, {}), backward(op, RATES, {})
    assert (ahead.bytes, ahead.flops) == (4_608, 18_432)
    assert ahead.bandwidth_s == pytest.approx(4_608 / 1e12)
    assert (back.bytes, back.flops) == (2 * 4_608, pytest.approx(18_432 * 32 / 12))
    assert rest == NOTHING


def test_casts_of_a_projection_of_its_own():
    """8 B by two kernels of 0.5 s at 1 B/s, before the product; nothing casts for a collective."""
    context = pricing(job("torch", on=machine(memory=1.0, kernels={"move_kernel_s": 0.5}))).context
    op = Gemm("w", params=(Param("w", (32, 16)),), forward_cast=Casting(8.0, 2.0))
    work = forward_work([op, Comm("none")], [NOTHING, NOTHING], context, [0, 1])
    assert (work.memory_s, work.kernels) == (9.0, 2.0)


def test_attention_in_several_calls():
    """Context parallelism: three calls of 0.25 s, two kernels of 0.5 s that merge, 10 B forward and 30 B backward at 1 B/s,
    beside the 4,608 B of `test_bytes_of_attention` or twice as many.
    """
    op = Attention("a", batch=3, q_len=8, kv_len=16, n_q_heads=4, n_kv_heads=2, d_qk=8, d_v=4, calls=3)
    op.merge_kernels, op.merge_forward_bytes, op.merge_backward_bytes = 2.0, 10.0, 30.0
    slow = RATES._replace(bytes_per_s=1.0, gemm_kernel_s=0.25, move_kernel_s=0.5)
    assert forward(op, slow, {}).time_s == 4_608 + 10 + 1.0 + 0.75
    assert backward(op, slow, {})[0].time_s == 2 * 4_608 + 30 + 1.0 + 0.75


def test_bytes_of_eager_flex_attention():
    """10 scores, each 84 B forward, 4 + 8 + 8 + 24 + 6 + 4 + 22 + 6 + 2; 106 B backward, 20 + 24 + 8 + 4 + 16 + 12 + 8 + 6 + 8
    (each kernel: `eager_flex.FORWARD_SCORE_BYTES`, `BACKWARD_SCORE_BYTES`); at most 13 and 26 B of each exist at once.
    """
    found = eager_flex(10.0)
    assert (found["merge_forward_bytes"], found["merge_backward_bytes"]) == (840.0, 1_060.0)
    assert (found["forward_temp_bytes"], found["backward_temp_bytes"]) == (130.0, 260.0)
    assert (found["causal_share"], found["reach"]) == (1.0, 0.0)
