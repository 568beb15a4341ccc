"""Constants of a machine file from measured rows: each is fitted through the model's own formula, with its fit error.

Errors are mean absolute log errors of the model against the measurement, after the fit: 0.05 is 5 %. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import exp, inf, log
from statistics import median
from typing import Literal, NamedTuple

from steptime.bench import timings
from steptime.bench.timings import ITEMSIZE
from steptime.cost import compute
from steptime.cost.rates import HEAD_64, Rates
from steptime.hardware.machine import Accelerator
from steptime.model import ops
from steptime.software.precision import recipe

Statistic = Literal["min_s", "median_s"]
RESULT_ITEMSIZE = 2.0
"""Least bytes per element of a product's result."""
STREAMING = ("residual", "add", "rmsnorm", "silu_mul")
"""Memory-bound work that is typical of a block."""
LINEAR = (ops.Param("weight", ()),)
RAMPS = tuple(map(float, (0, 10, 20, 30, 45, 60, 80, 100, 130, 160, 200, 250, 300, 370, 450, 550, 700, 1000)))
"""Candidates for the ramp of attention [tokens]."""
OVERHEADS = (0.0, 5.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 150.0, 200.0, 300.0)
"""Candidates for K_OVERHEAD, where it is fitted too."""


USUAL_RAMP: float = Accelerator.model_fields["attention_ramp_tokens"].default


class Fit(NamedTuple):
    """One fitted figure."""

    value: float
    error: float
    """Mean absolute log error of the model with this value."""
    points: int


class GemmFit(NamedTuple):
    """A device's sustained rate in one dtype [FLOP/s], with the model's error as in Fit."""

    value: float
    error: float
    points: int
    depth_overhead: float
    """The value of `compute.K_OVERHEAD`: the model's own unless others were tried."""


class AttentionFit(NamedTuple):
    """Shares of the peak that attention reaches at `steptime.cost.compute.RATED_LENGTH` tokens, and its ramp."""

    forward: Fit
    backward: Fit
    ramp_tokens: float
    """As `Accelerator.attention_ramp_tokens`; its default where fewer than two lengths were measured."""


class MemoryFit(NamedTuple):
    """Rate of device memory, and the share of it that a training step's memory-bound kernels reach."""

    bytes_per_s: Fit
    efficiency: Fit


def judged(value: float, errors: Iterable[float]) -> Fit:
    """A value and the log errors that remain with it."""
    sizes = [abs(error) for error in errors]
    return Fit(value, sum(sizes) / len(sizes), len(sizes))


def nearest(candidates: Iterable[float], errors: Callable[[float], list[float]]) -> Fit:
    """The candidate with the least mean absolute log error.

    Raises:
        ValueError: no candidates.
    """
    return min((judged(value, errors(value)) for value in candidates), key=lambda fit: fit.error)


def solve(seconds: Callable[[float], float], target: float) -> float | None:
    """The rate at which a time that falls with the rate equals `target`; None where no rate does.

    Between two rates, by turns, where a straight line through their logarithms meets it, since most times are inversely
    proportional to the rate, and halfway.
    """
    low, high = log(1.0), log(1e21)
    slowest, fastest = seconds(exp(low)), seconds(exp(high))
    if not fastest < target < slowest:
        return None
    over, under = log(slowest / target), log(fastest / target)
    straight = True
    while high - low > 1e-9:
        middle = low + (over / (over - under) if straight else 0.5) * (high - low)
        error = log(seconds(exp(middle)) / target)
        if abs(error) < 1e-13:
            return exp(middle)
        low, over, high, under = (middle, error, high, under) if error > 0.0 else (low, over, middle, error)
        straight = not straight
    return exp(0.5 * (low + high))


class KnownRates(NamedTuple):
    """Known figures of a device before its rates are fitted."""

    bytes_per_s: float
    """What streaming kernels sustain: memory_bytes_per_s times memory_efficiency."""
    gemm_kernel_s: float
    """A kernel's fixed time in the software profile."""
    sm_count: float | None = None
    compute_flops: float = 0.0
    """Sustained rate of bf16, the reference of quantized products; 0: half of theirs."""

    def rates(self, flops: float) -> Rates:
        """The rates in the form that the cost model takes."""
        return Rates(
            gemm_flops=self.compute_flops or 0.5 * flops,
            attention_forward_flops=flops,
            attention_backward_flops=flops,
            bytes_per_s=self.bytes_per_s,
            gemm_kernel_s=self.gemm_kernel_s,
            move_kernel_s=self.gemm_kernel_s,
            sm_count=self.sm_count,
            grad_itemsize=RESULT_ITEMSIZE,
            fused_accumulation=False,
            slowness=1.0,
            accumulate_bytes=0.0,
            move_rate=1.0,
            plain_share=1.0,
            grouped_share=1.0,
            recipe_flops=flops,
            experts_flops=flops,
            scan_flops=flops,
            conv_bytes_per_s=self.bytes_per_s,
            elements_per_s=inf,
            drawn_per_s=inf,
            chunk_flops=flops,
            attention_ramp_tokens=USUAL_RAMP,
            attention_head_64=(HEAD_64, HEAD_64),
            gemm_overhead_k=None,
        )


# --- products ---


def gemm_pass(
    row: timings.GemmTiming, flops: float, device: KnownRates, overhead: float = compute.K_OVERHEAD
) -> compute.Pass:
    """Model time of a measured product on a device that sustains `flops`: `compute.gemm_pass`, wgrad at its own rate.

    `overhead`: in place of the model's K_OVERHEAD.
    """
    return _gemm_passes(row, device, overhead)(flops)


def _gemm_passes(row: timings.GemmTiming, device: KnownRates, overhead: float) -> Callable[[float], compute.Pass]:
    """The same at any rate; what does not depend on it is looked up once."""
    quantized = recipe("fp8_delayed", any_layout=False) if row.dtype == "fp8" else None
    size = float(ITEMSIZE[row.dtype])
    op = ops.Gemm(
        row.name, params=LINEAR, m=float(row.m), n=float(row.n), k=float(row.k), itemsize=size, recipe=quantized
    )
    rate = 1.0
    if quantized is not None:
        rate = quantized.forward_rate if row.direction == "forward" else quantized.backward_rate
    rate *= compute.WGRAD_RATE if row.direction == "wgrad" else 1.0
    bytes_ = (row.m * row.k + row.k * row.n) * size + row.m * row.n * max(size, RESULT_ITEMSIZE)
    known = device.rates(0.0)._replace(gemm_overhead_k=overhead)

    def passed(flops: float) -> compute.Pass:
        plain = (device.compute_flops or 0.5 * flops) if quantized else flops
        return compute.gemm_pass(
            op, known._replace(gemm_flops=plain, recipe_flops=flops), op.m, op.n, op.k, bytes_, rate
        )

    return passed


def gemm(
    measured: Sequence[timings.GemmTiming],
    dtype: str,
    device: KnownRates,
    statistic: Statistic = "median_s",
    overheads: Sequence[float] = (compute.K_OVERHEAD,),
) -> GemmFit | None:
    """`sustained_flops` of a dtype: the asymptote [FLOP/s] with which the model fits the config's projections best.

    The sweep's rows are taken where there are no projections of the dtype. `statistic`: "min_s" on a shared CPU, where other work
    stretches the median. `overheads`: values of K_OVERHEAD to choose from; a CPU's kernels need next to none. None where nothing
    of the dtype was measured, or all of it is bound by memory.
    """
    mine = [row for row in measured if row.dtype == dtype]
    mine = [row for row in mine if row.name != "sweep"] or mine
    measured_s = [float(getattr(row.timing, statistic)) for row in mine]
    tried: list[GemmFit] = []
    for overhead in overheads:
        found = asymptote([_gemm_passes(row, device, overhead) for row in mine], measured_s)
        if found is not None:
            tried.append(GemmFit(*found, overhead))
    return min(tried, key=lambda fit: fit.error, default=None)


def asymptote(models: Sequence[Callable[[float], compute.Pass]], measured_s: Sequence[float]) -> Fit | None:
    """The rate at which the models, by the rate, fit what was measured of each best; None where it fits none.

    A sum of absolute errors of steadily falling functions is least where one of them vanishes, so those are the candidates.
    """

    def seconds(model: Callable[[float], compute.Pass], rate: float) -> float:
        return float(model(rate).time_s)

    rows = [*zip(models, measured_s, strict=True)]
    candidates = [rate for model, target in rows if (rate := solve(partial(seconds, model), target)) is not None]
    if not candidates:
        return None
    return nearest(candidates, lambda rate: [log(seconds(model, rate) / target) for model, target in rows])


# --- attention ---


def attention_pass(row: timings.AttentionTiming, flops: float, ramp_tokens: float, device: KnownRates) -> compute.Pass:
    """Model time of a measured call that runs at `flops` at RATED_LENGTH: `compute.attention_pass`, with this ramp."""
    return _attention_passes(row, ramp_tokens, device)(flops)


def _attention_passes(
    row: timings.AttentionTiming, ramp_tokens: float, device: KnownRates
) -> Callable[[float], compute.Pass]:
    """The same at any rate."""
    op = ops.Attention(
        "attention", batch=row.batch, q_len=row.seqlen, kv_len=row.seqlen,
        n_q_heads=row.n_q_heads, n_kv_heads=row.n_kv_heads, d_qk=row.head_dim, d_v=row.head_dim,
        itemsize=float(ITEMSIZE[row.dtype]),
    )  # fmt: skip
    rates = device.rates(0.0)._replace(attention_ramp_tokens=ramp_tokens)
    back = row.direction == "backward"
    share = compute.head_share(op, rates.attention_head_64[back])
    return lambda flops: compute.attention_pass(op, rates, row.flops, flops * share, 2.0 if back else 1.0)


def attention(
    measured: Sequence[timings.AttentionTiming],
    dtype: str,
    peak_flops: float,
    device: KnownRates,
    *,
    statistic: Statistic = "median_s",
    ramps: Sequence[float] | None = None,
) -> AttentionFit | None:
    """Shares of `peak_flops` that causal attention reaches forward and backward, and the ramp that fits both best.

    `ramps`: to choose from; RAMPS, or the usual one where a single length was measured, if not set. A share above 1 means that
    the stated peak does not apply; it is reported unchanged. None where a direction was not measured.
    """
    mine = [row for row in measured if (row.dtype, row.backend, row.causal) == (dtype, "default", True)]
    if ramps is None:
        ramps = RAMPS if len({row.seqlen for row in mine}) > 1 else (USUAL_RAMP,)
    split = [[row for row in mine if row.direction == direction] for direction in ("forward", "backward")]
    directions = [(rows, [float(getattr(row.timing, statistic)) for row in rows]) for rows in split]
    tried: list[AttentionFit] = []
    for tokens in ramps:
        both = [
            asymptote([_attention_passes(row, tokens, device) for row in rows], measured_s)
            for rows, measured_s in directions
        ]
        if both[0] is not None and both[1] is not None:
            ahead, back = (fit._replace(value=fit.value / peak_flops) for fit in both if fit is not None)
            tried.append(AttentionFit(ahead, back, tokens))
    return min(tried, key=lambda fit: fit.forward.error + fit.backward.error, default=None)


# --- memory ---


def memory(
    measured: Sequence[timings.MoveTiming], dtype: str | None = None, statistic: Statistic = "median_s"
) -> MemoryFit | None:
    """The rate of the best copy, and the median rate of a training step's streaming kernels divided by it.

    Small tensors come out of caches faster than a copy of large ones; then the kernels' median is the rate. `error` is the mean
    absolute log distance of the kernels from their median. None without a copy or without kernels (of `dtype`, if given).
    """
    copied = [row.bytes / row.timing.min_s for row in measured if row.name == "copy"]
    mine = [row for row in measured if row.name in STREAMING and dtype in {None, row.dtype}]
    found = [row.bytes / float(getattr(row.timing, statistic)) for row in mine]
    if not copied or not found:
        return None
    middle, best = median(found), max(copied)
    rate = max(best, middle)
    distances = [log(one / middle) for one in found]
    return MemoryFit(judged(rate, [log(one / rate) for one in copied]), judged(middle / rate, distances))
