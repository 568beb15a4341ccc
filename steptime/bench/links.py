"""Latency and bandwidth from measured collectives: alpha-beta by kind, and the tier of a machine file.

Minima are fitted, never medians: other work on the machine only adds time. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from math import exp, inf, log
from statistics import median
from typing import NamedTuple

from steptime.base.config import build
from steptime.base.grouping import grouped
from steptime.bench import timings
from steptime.bench.rate_fit import judged
from steptime.cost.comm import Collective
from steptime.hardware.machine import Tier
from steptime.job.mesh import Group

OUTLYING = 0.2
"""Relative error beyond which a point's weight falls with its distance (Huber's weights)."""
ROUNDS = 30
BEYOND = 4.0
"""Limit of the model's asymptote over the best bus bandwidth of any call."""


class AlphaBeta(NamedTuple):
    """t = alpha + (bytes on the bus) / rate, for one kind and number of ranks."""

    axis: str
    kind: str
    ranks: int
    alpha_s: float
    bus_bytes_per_s: float | None
    """None where the sizes are too small to show a bandwidth."""
    error_median: float
    """Of the relative errors of the fit, by size."""
    error_worst: float
    points: int


class TierFit(NamedTuple):
    """A tier of a machine file, as `steptime.cost.comm` uses it; losses are included in `bytes_per_s`, so its efficiency is 1."""

    latency_s: float
    bytes_per_s: float
    error: float
    """Mean absolute log error of the model over all rows."""
    points: int


def bus_share(kind: str, ranks: int) -> float:
    """Bytes on the busiest link over the bytes of a call (nccl-tests doc/PERFORMANCE.md).

    >>> bus_share("all_reduce", 4), bus_share("all_gather", 4), bus_share("broadcast", 4)
    (1.5, 0.75, 1.0)
    """
    if kind in {"broadcast", "send_recv"}:
        return 1.0
    return (2.0 if kind == "all_reduce" else 1.0) * (ranks - 1) / ranks


def bus_bytes_per_s(row: timings.CollectiveTiming) -> float:
    """Bus bandwidth from the minimum time [B/s]: the rate on the links, whatever the kind and the ranks."""
    return row.bytes * bus_share(row.kind, row.ranks) / row.timing.min_s


def alpha_beta(measured: Iterable[timings.CollectiveTiming]) -> list[AlphaBeta]:
    """A fit for each axis, kind and number of ranks with at least two sizes, in the order of the rows."""
    groups = grouped(measured, lambda row: (row.axis, row.kind, row.ranks))
    return [_line(*key, found) for key, found in groups.items() if len({row.bytes for row in found}) > 1]


def _line(axis: str, kind: str, ranks: int, found: Sequence[timings.CollectiveTiming]) -> AlphaBeta:
    """Least squares of relative errors, reweighted so that outliers have little weight; no negative result."""
    share = bus_share(kind, ranks)
    points = [(row.bytes * share, row.timing.min_s) for row in found]
    weights = [1.0] * len(points)
    alpha = beta = 0.0
    errors: list[float] = []
    for _ in range(ROUNDS):
        alpha, beta = _weighted(points, weights)
        errors = [abs(alpha + beta * size - t) / t for size, t in points]
        weights = [min(1.0, OUTLYING / error) if error else 1.0 for error in errors]
    rate = 1.0 / beta if beta else None
    return AlphaBeta(axis, kind, ranks, alpha, rate, median(errors), max(errors), len(points))


def _weighted(points: Sequence[tuple[float, float]], weights: Sequence[float]) -> tuple[float, float]:
    """Alpha and beta >= 0 that minimize the sum of w ((alpha + beta x - t) / t)^2."""
    scaled = [(w / t**2, x, t) for (x, t), w in zip(points, weights, strict=True)]
    one, x1, x2 = (sum(w * x**power for w, x, _ in scaled) for power in (0, 1, 2))
    t1, xt = (sum(w * x**power * t for w, x, t in scaled) for power in (0, 1))
    beta = (one * xt - x1 * t1) / (one * x2 - x1**2)
    if beta <= 0.0:
        return t1 / one, 0.0
    alpha = (t1 - beta * x1) / one
    return (alpha, beta) if alpha >= 0.0 else (0.0, xt / x2)


# --- the machine file's tier ---


def tier(measured: Sequence[timings.CollectiveTiming], name: str = "measured") -> TierFit | None:
    """Latency of a hop and rate with which the model's formula fits all kinds best; None without rows.

    The search goes from a coarse grid over both logarithms to ever smaller steps around the best. The rate stays below BEYOND
    times the best measured: with small sizes only, any larger rate would fit.
    """
    if not measured:
        return None
    kinds = {(row.kind, row.axis, row.ranks) for row in measured}

    def errors(at: tuple[float, float]) -> list[float]:
        trial = build(Tier, {"name": name, "latency_s": exp(at[0]), "bytes_per_s": exp(at[1]), "efficiency": 1.0})
        calls = {
            key: Collective(kind, Group(axis, ranks, 1.0), (trial,)) for key in kinds for kind, axis, ranks in [key]
        }
        times = [float(calls[row.kind, row.axis, row.ranks].cost(float(row.bytes)).time_s) for row in measured]
        return [log(time / row.timing.min_s) for time, row in zip(times, measured, strict=True)]

    ceiling = log(BEYOND * max(map(bus_bytes_per_s, measured)))

    def loss(at: tuple[float, float]) -> float:
        return judged(0.0, errors(at)).error if at[1] <= ceiling else inf

    grid = product((log(1e-7) + i for i in range(14)), (ceiling - i for i in range(14)))
    here, step = min(grid, key=loss), 0.5
    best = loss(here)
    while step > 1e-4:
        around = [(here[0] + dx * step, here[1] + dy * step) for dx, dy in product((-1, 0, 1), repeat=2) if dx or dy]
        there = min(around, key=loss)
        value = loss(there)
        here, best, step = (there, value, step) if value < best else (here, best, 0.5 * step)
    return TierFit(exp(here[0]), exp(here[1]), best, len(measured))
