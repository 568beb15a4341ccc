"""Rows made by the model with known constants: the fit finds them back."""

from __future__ import annotations

from math import exp, log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime.bench import links, rate_fit, timings
from steptime.bench.runs.clock import Timing
from steptime.cost import compute
from steptime.cost.comm import ALGORITHMS, collective
from steptime.hardware.machine import Tier
from steptime.job.mesh import Group
from steptime.model import ops

KINDS = list(ALGORITHMS)


def exact(seconds):
    return Timing(seconds, 1.5 * seconds, 2.0 * seconds, 9)


def rate(low, high):
    """Any number between, by its logarithm."""
    return st.floats(log(low), log(high)).map(exp)


# --- products ---

SHAPES = [(512, 512, 512), (4096, 6144, 4096), (8192, 28672, 8192), (2048, 1024, 8192), (4096, 128256, 4096)]


def products(flops, device, dtype="bf16", name="mlp.up"):
    made = []
    for m, n, k in SHAPES:
        for direction, shape in (("forward", (m, n, k)), ("dgrad", (m, k, n)), ("wgrad", (k, n, m))):
            row = timings.GemmTiming(name, direction, dtype, *shape, exact(1.0))
            made.append(row._replace(timing=exact(rate_fit.gemm_pass(row, flops, device).time_s)))
    return made


def test_the_models_pass_is_the_cost_models_own():
    """Bytes 2 (mk + kn + mn), the fixed time once, wgrad at its rate: as a layer in `compute`."""
    device = rate_fit.KnownRates(3e12, 4e-6, 132.0)
    rates = device.rates(700e12)._replace(gemm_flops=700e12)
    op = ops.Gemm("up", params=(ops.Param("up.weight", (14336, 4096)),), m=4096.0, n=14336.0, k=4096.0)
    dgrad, wgrad = compute.gemm_backward(op, rates)
    for direction, shape, expected in (
        ("forward", (4096, 14336, 4096), compute.forward(op, rates, {})),
        ("dgrad", (4096, 4096, 14336), dgrad),
        ("wgrad", (4096, 14336, 4096), wgrad),
    ):
        row = timings.GemmTiming("up", direction, "bf16", *shape, exact(1.0))
        assert rate_fit.gemm_pass(row, 700e12, device) == expected


@given(
    flops=rate(1e10, 2e15),
    bytes_per_s=rate(1e10, 8e12),
    kernel_s=rate(1e-7, 1e-5),
    sm_count=st.sampled_from([1.0, 132.0]),
)
@settings(max_examples=25, deadline=None)
def test_sustained_rate_is_found_back(flops, bytes_per_s, kernel_s, sm_count):
    device = rate_fit.KnownRates(bytes_per_s, kernel_s, sm_count)
    found = rate_fit.gemm(products(flops, device), "bf16", device, "min_s")
    if found is None:  # memory bounds all of it
        assert all(
            rate_fit.gemm_pass(r, flops, device).bandwidth_s > rate_fit.gemm_pass(r, flops, device).compute_s
            for r in products(flops, device)
        )
        return
    assert found.value == pytest.approx(flops, rel=1e-6)
    assert found.error < 1e-6
    assert found.points == 15


def test_noise_does_not_move_it_far():
    """One shape in five is three times too slow: the others decide."""
    device = rate_fit.KnownRates(3e12, 4e-6, 132.0)
    made = products(600e12, device)
    made[::5] = [row._replace(timing=exact(3.0 * row.timing.min_s)) for row in made[::5]]
    found = rate_fit.gemm(made, "bf16", device, "min_s")
    assert found.value == pytest.approx(600e12, rel=1e-6)
    assert found.error == pytest.approx(3 * log(3.0) / 15)


def test_medians_unless_minima_are_asked_for():
    device = rate_fit.KnownRates(1e15, 0.0)
    made = products(100e12, device)
    assert rate_fit.gemm(made, "bf16", device).value == pytest.approx(100e12 / 1.5)
    assert rate_fit.gemm(made, "bf16", device, "min_s").value == pytest.approx(100e12)


def test_projections_before_the_sweep_and_dtypes_apart():
    device = rate_fit.KnownRates(1e15, 0.0)
    made = products(100e12, device) + products(900e12, device, name="sweep") + products(50e12, device, "fp32", "sweep")
    assert rate_fit.gemm(made, "bf16", device, "min_s").value == pytest.approx(100e12)
    assert rate_fit.gemm(made, "fp32", device, "min_s").value == pytest.approx(50e12)
    assert rate_fit.gemm(made, "fp16", device) is None


def test_fp8_is_fitted_at_the_depth_its_tiles_need():
    device = rate_fit.KnownRates(4e12, 4e-6, 132.0, compute_flops=700e12)
    found = rate_fit.gemm(products(1300e12, device, "fp8"), "fp8", device, "min_s")
    assert found.value == pytest.approx(1300e12, rel=1e-6)
    row = timings.GemmTiming("x", "forward", "fp8", 4096, 4096, 4096, exact(1.0))
    own = rate_fit.gemm_pass(row, 1300e12, device).compute_s * 1300e12 / row.flops
    assert 1.0 / own == pytest.approx(compute.shape_efficiency(4096, 4096, 4096, 1, 132.0, 200.0 * 1300 / 700))


def test_depth_overhead_can_be_fitted_too():
    """A device whose kernels need 20 of k, where the model has 200."""
    device = rate_fit.KnownRates(1e15, 0.0)
    made = [
        row._replace(timing=exact(rate_fit.gemm_pass(row, 1e12, device, 20.0).time_s)) for row in products(1e12, device)
    ]
    assert made[0].timing.min_s == pytest.approx(made[0].flops / 1e12 * 532 / 512)
    found = rate_fit.gemm(made, "bf16", device, "min_s", (0.0, 20.0, 200.0))
    assert found.depth_overhead == 20.0
    assert found.error < 1e-6
    assert rate_fit.gemm(made, "bf16", device, "min_s").error > 0.01


# --- attention ---


def attention_rows(forward, backward, tokens, lengths=(512, 1024, 4096, 16384)):
    device = rate_fit.KnownRates(3e12, 4e-6)
    made = []
    for length in lengths:
        for direction, flops in (("forward", forward), ("backward", backward)):
            row = timings.AttentionTiming("default", direction, "bf16", 1, length, 32, 8, 128, True, exact(1.0))
            made.append(row._replace(timing=exact(rate_fit.attention_pass(row, flops, tokens, device).time_s)))
    return made, device


def test_attention_pass_is_the_cost_models_own():
    device = rate_fit.KnownRates(3e12, 4e-6)
    op = ops.Attention("a", batch=2, q_len=2048, kv_len=2048, n_q_heads=32, n_kv_heads=8, d_qk=128, d_v=128)
    rates = device.rates(500e12)
    for direction, expected in (
        ("forward", compute.forward(op, rates, {})),
        ("backward", compute.backward(op, rates, {})[0]),
    ):
        row = timings.AttentionTiming("default", direction, "bf16", 2, 2048, 32, 8, 128, True, exact(1.0))
        found = rate_fit.attention_pass(row, 500e12, rate_fit.USUAL_RAMP, device)
        assert found.time_s == pytest.approx(expected.time_s)
        assert found.flops == expected.flops


@given(forward=rate(50e12, 900e12), backward=rate(50e12, 900e12), tokens=st.sampled_from(rate_fit.RAMPS))
@settings(max_examples=15, deadline=None)
def test_attention_is_found_back(forward, backward, tokens):
    made, device = attention_rows(forward, backward, tokens)
    found = rate_fit.attention(made, "bf16", 1000e12, device, statistic="min_s")
    assert found.ramp_tokens == tokens
    assert found.forward.value == pytest.approx(forward / 1000e12, rel=1e-6)
    assert found.backward.value == pytest.approx(backward / 1000e12, rel=1e-6)
    assert found.forward.points == found.backward.points == 4


def test_one_length_has_no_ramp_of_its_own():
    made, device = attention_rows(500e12, 400e12, 100.0, lengths=(2048,))
    found = rate_fit.attention(made, "bf16", 1000e12, device, statistic="min_s")
    assert found.ramp_tokens == rate_fit.USUAL_RAMP
    assert found.forward.error < 1e-6


def test_shares_above_one_are_reported():
    made, device = attention_rows(500e12, 400e12, 450.0)
    assert rate_fit.attention(made, "bf16", 250e12, device, statistic="min_s").forward.value == pytest.approx(2.0)


def test_attention_needs_both_directions():
    made, device = attention_rows(500e12, 400e12, 450.0)
    assert rate_fit.attention([r for r in made if r.direction == "forward"], "bf16", 1e15, device) is None


# --- memory ---


def move(name, bytes_per_s, dtype="fp32"):
    return timings.MoveTiming(name, "forward", dtype, 1e6, Timing(1e6 / bytes_per_s, 1e6 / bytes_per_s, 1.0, 9))


def test_memory_is_the_best_copy_and_the_median_kernel():
    made = [
        move("copy", 3.0e12),
        move("copy", 4.0e12),
        move("rmsnorm", 2e12),
        move("silu_mul", 3e12),
        move("residual", 4e12),
    ]
    found = rate_fit.memory([*made, move("adamw", 1e9), move("embedding", 1e9)])
    assert found.bytes_per_s[::2] == (pytest.approx(4e12), 2)
    assert found.efficiency[::2] == (pytest.approx(0.75), 3)


def test_caches_can_beat_a_copy():
    found = rate_fit.memory([move("copy", 30e9), move("rmsnorm", 60e9), move("rmsnorm", 10e9, "bf16")], dtype="fp32")
    assert found.bytes_per_s.value == pytest.approx(60e9)
    assert found.efficiency.value == 1.0


def test_memory_needs_a_copy_and_a_kernel():
    assert rate_fit.memory([move("copy", 1e9)]) is None
    assert rate_fit.memory([move("rmsnorm", 1e9)]) is None


# --- links ---

SIZES = [8 * 4**i for i in range(13)]


def calls(seconds, ranks=8, kinds=KINDS):
    return [
        timings.CollectiveTiming(kind, "dp", 2 if kind == "send_recv" else ranks, size, exact(seconds(kind, size)))
        for kind in kinds
        for size in SIZES
    ]


def test_bus_bandwidth_is_nccl_tests_own():
    """8 ranks, 8 GB in a second: all-reduce 14, all-gather 7, broadcast and send 8 GB/s on the bus."""
    found = {
        kind: links.bus_bytes_per_s(timings.CollectiveTiming(kind, "dp", 8, 8 * 10**9, exact(1.0))) for kind in KINDS
    }
    assert found == {
        "all_reduce": 14e9, "all_gather": 7e9, "reduce_scatter": 7e9, "all_to_all": 7e9, "broadcast": 8e9, "send_recv": 8e9,
    }  # fmt: skip


@given(alpha=rate(1e-6, 1e-3), bandwidth=rate(1e8, 1e12), ranks=st.integers(2, 64))
@settings(max_examples=40, deadline=None)
def test_a_line_is_found_back(alpha, bandwidth, ranks):
    def seconds(kind, size):
        return alpha + size * links.bus_share(kind, 2 if kind == "send_recv" else ranks) / bandwidth

    found = links.alpha_beta(calls(seconds, ranks))
    assert [line.kind for line in found] == KINDS
    for line in found:
        assert line.error_worst < 1e-6
        assert line.points == len(SIZES)
        if SIZES[-1] / bandwidth > 0.01 * alpha:
            assert line.bus_bytes_per_s == pytest.approx(bandwidth, rel=1e-3)
        assert line.alpha_s == pytest.approx(alpha, rel=1e-3)


def test_minima_are_fitted_and_odd_points_do_not_turn_the_line():
    made = calls(lambda _, size: 1e-5 + size / 1e9, kinds=["broadcast"])
    made[4] = made[4]._replace(timing=exact(20.0 * made[4].timing.min_s))
    (line,) = links.alpha_beta(made)
    assert line.alpha_s == pytest.approx(1e-5, rel=0.1)
    assert line.bus_bytes_per_s == pytest.approx(1e9, rel=0.1)
    assert line.error_worst == pytest.approx(0.95, abs=0.01)


def test_a_falling_line_has_no_bandwidth_and_a_negative_start_no_latency():
    made = calls(lambda _, size: 1e-3 if size < 100 else 0.9e-3, kinds=["broadcast"])
    (line,) = links.alpha_beta(made)
    assert line.bus_bytes_per_s is None
    made = [timings.CollectiveTiming("broadcast", "dp", 2, size, exact(size**1.5 * 1e-9)) for size in (10, 100, 1000)]
    (line,) = links.alpha_beta(made)
    assert line.alpha_s == 0.0
    assert links.alpha_beta(made[:1]) == []


@given(latency=rate(1e-6, 1e-3), bandwidth=rate(1e9, 1e12), ranks=st.sampled_from([2, 4, 8, 16]))
@settings(max_examples=8, deadline=None)
def test_a_tier_is_found_back(latency, bandwidth, ranks):
    true = Tier(name="x", latency_s=latency, bytes_per_s=bandwidth, efficiency=1.0)

    def seconds(kind, size):
        group = Group("dp", 2 if kind == "send_recv" else ranks, 1.0)
        return float(collective(kind, float(size), group, (true,)).time_s)

    made = calls(seconds, ranks)
    found = links.tier(made)
    assert found.latency_s == pytest.approx(latency, rel=0.02)
    if SIZES[-1] / bandwidth > ranks * latency:  # else no size shows it
        assert found.bytes_per_s == pytest.approx(bandwidth, rel=0.02)
    assert found.error < 0.02
    assert found.points == len(made)


def test_small_sizes_alone_give_no_wild_bandwidth():
    """64 KiB in 10 ms are 6.6 MB/s."""
    made = [timings.CollectiveTiming("broadcast", "dp", 2, size, exact(0.01)) for size in (8, 1024, 2**16)]
    assert links.tier(made).bytes_per_s <= links.BEYOND * 2**16 / 0.01 * 1.0001
