"""Predicted vs. measured: every figure that the benchmark measured and the model predicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean, median
from typing import Literal, NamedTuple

from steptime.answer.result import Estimate
from steptime.base.grouping import grouped
from steptime.base.rows import GemmRow
from steptime.bench import timings
from steptime.bench.rate_fit import Statistic
from steptime.bench.runs.clock import Timing
from steptime.cost import compute
from steptime.cost.comm import collective
from steptime.hardware.machine import Machine
from steptime.job.mesh import Group
from steptime.model.ops import Attention

Quantity = Literal["step", "block", "memory", "exact", "gemm", "attention", "memory_bound", "collective"]


UPDATES = ("adamw", "adamw_fused")
"""Memory-bound work that runs in one direction only."""


class PredictionRow(NamedTuple):
    """One figure, predicted and measured, in SI units."""

    what: Quantity
    name: str
    unit: Literal["s", "bytes", "count", "FLOP"]
    predicted: float
    measured: float
    spread: float | None = None
    """Spread of the measured seconds: 90th percentile minus minimum, divided by the median."""

    @property
    def error(self) -> float:
        """Signed relative error: predicted over measured, minus one; 0 where both are 0."""
        if self.measured == 0:
            return 0.0 if self.predicted == 0 else float("inf")
        return self.predicted / self.measured - 1.0


class ErrorSummary(NamedTuple):
    """Mean absolute error, and mean signed error, of one kind of figure."""

    what: Quantity
    n: int
    median: float
    mean: float
    worst: float
    worst_name: str
    bias: float


def summarize(found: Iterable[PredictionRow]) -> list[ErrorSummary]:
    """Errors per kind of figure, in the order of first appearance."""
    by_kind: dict[Quantity, list[PredictionRow]] = grouped(found, lambda row: row.what)
    return [_summary(what, rows) for what, rows in by_kind.items()]


def _summary(what: Quantity, rows: list[PredictionRow]) -> ErrorSummary:
    errors = [abs(row.error) for row in rows]
    worst = max(rows, key=lambda row: abs(row.error))
    bias = mean(row.error for row in rows)
    return ErrorSummary(what, len(rows), median(errors), mean(errors), max(errors), worst.name, bias)


def timing_row(what: Quantity, name: str, predicted: float, timing: Timing, statistic: Statistic) -> PredictionRow:
    """Seconds by the statistic that is used for the device."""
    return PredictionRow(what, name, "s", predicted, float(getattr(timing, statistic)), timing.spread)


def gemms(
    found: Estimate, measured: Iterable[timings.GemmTiming], dtype: str, statistic: Statistic
) -> list[PredictionRow]:
    """The config's projections in its own dtype, one call each."""
    expected: dict[tuple[str, str], GemmRow] = {(row.name, row.pass_): row for row in found.gemms}
    return [
        timing_row("gemm", f"{row.name} {row.direction}", one.time_s, row.timing, statistic)
        for row in measured
        if row.dtype == dtype and (one := expected.get((row.name, row.direction)))
    ]


def attention(
    found: Estimate, measured: Iterable[timings.AttentionTiming], dtype: str, statistic: Statistic
) -> list[PredictionRow]:
    """The config's attention, forward and backward, with the back end that torch chooses."""
    timing, part = found.timing, found.assembly.kinds[0]
    op = next((op for op in part.ops if isinstance(op, Attention)), None)
    if op is None:
        return []
    seconds = {
        "forward": compute.forward(op, timing.rates, part.sizes).time_s,
        "backward": compute.backward(op, timing.rates, part.sizes)[0].time_s,
    }
    size = (op.batch, op.q_len, op.n_q_heads, op.n_kv_heads, op.d_qk)
    return [
        timing_row("attention", row.direction, float(seconds[row.direction]), row.timing, statistic)
        for row in measured
        if (row.dtype, row.backend) == (dtype, "default")
        and row.direction in seconds
        and row.causal
        and (row.batch, row.seqlen, row.n_q_heads, row.n_kv_heads, row.head_dim) == size
    ]


def moves(
    found: Estimate, measured: Iterable[timings.MoveTiming], dtype: str, statistic: Statistic
) -> list[PredictionRow]:
    """Memory-bound work: the bytes that the model counts, at the rate that it assumes for them."""
    rates = found.timing.rates
    rows = []
    for row in (row for row in measured if row.dtype == dtype):
        name = row.name if row.name in UPDATES else f"{row.name} {row.direction}"
        took = compute.move_pass(row.bytes, 1.0, rates).time_s
        rows.append(timing_row("memory_bound", name, took, row.timing, statistic))
    return rows


def collectives(
    machine: Machine, measured: Sequence[timings.CollectiveTiming], groups: dict[str, Group]
) -> list[PredictionRow]:
    """Each collective on its axis, compared with the fastest call: other processes can only slow a call down."""
    rows = []
    for row in measured:
        name, timing = f"{row.kind} {row.axis} {row.bytes} B", row.timing
        took = float(collective(row.kind, float(row.bytes), groups[row.axis], machine.tiers).time_s)
        rows.append(PredictionRow("collective", name, "s", took, timing.min_s, timing.spread))
    return rows
