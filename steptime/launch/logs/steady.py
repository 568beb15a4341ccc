"""The steady state of a run: which logged iterations count, and their median with its uncertainty.

Left out: the first max(2, 10 %) iterations of the log and the first 2 after each restart, the iterations next to an evaluation or
a checkpoint, and, where the batch is ramped up, those before the final global batch. A line that covers several iterations
(Megatron's --log-interval) is left out when any of them would be.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from math import comb, sqrt
from typing import NamedTuple

from steptime.base.config import ConfigError
from steptime.launch.logs.entries import Iteration
from steptime.launch.logs.job_log import JobLog

RULE = (
    "median after warm-up: without the first max(2, 10 %) iterations, 2 after a restart, those next to an evaluation or a "
    "checkpoint, and those before the final global batch"
)
WARM_UP, SHARE = 2, 0.1
WARM, RESTART = "warm-up", "after a restart"
PAUSE, RAMP = "next to an evaluation or a checkpoint", "before the final batch"
CONFIDENCE = 0.95


class Steady(NamedTuple):
    """The steady state of a run."""

    step_s: float
    """Median."""
    step_s_p10: float
    step_s_p90: float
    """80 of 100 lines are between these two."""
    median_low_s: float | None
    median_high_s: float | None
    """95 % interval of the median by order statistics, without any assumption on the distribution; None below 6 lines."""
    used: int
    """Lines used."""
    logged: int
    """Lines logged, each iteration once."""
    interval: int
    """Iterations that a line covers."""
    first: int
    last: int
    """Iterations of the first and the last line used."""
    batch: int
    """Global batch of the lines used; 0 where the log does not state it."""
    tflops: float
    """Median TFLOP/s per device as logged; 0 where the log does not state it."""
    flops_per_device: float
    """FLOPs of a step per device as the log counts them: median of TFLOP/s x step time; 0 where the log does not state it."""
    left_out: dict[str, int]
    """Lines left out, by reason."""
    restarts: list[int]
    """First logged iterations after a restart."""
    notes: list[str]


def steady(log: JobLog, tokens_per_device: float = 0.0, batch: int = 0) -> Steady:
    """The steady state of a log.

    `tokens_per_device`, tokens of a step over devices, turns tokens/s into step times, and the global `batch` samples/s.

    Raises:
        ConfigError: the log has rates and `tokens_per_device` is not given.
    """
    numbered = bool(len(log.steps))
    series = log.steps if numbered else log.unnumbered
    lines = [_timed(line, tokens_per_device, batch) for line in series.lines()]
    interval = series.interval
    restarts = sorted(log.starts)[1:] if numbered else []
    out, notes = _left_out(lines, interval, restarts, sorted(log.pauses) if numbered else [])
    used = [line for line, why in zip(lines, out, strict=True) if not why]
    times = sorted(line.step_s for line in used)
    low, high = median_interval(times)
    if series.stride > 1:
        notes.append(f"a long log: one of every {series.stride} iterations is used")
    tflops, work = _flops(used, log)
    return Steady(
        step_s=quantile(times, 0.5),
        step_s_p10=quantile(times, 0.1),
        step_s_p90=quantile(times, 0.9),
        median_low_s=low,
        median_high_s=high,
        used=len(used),
        logged=len(lines),
        interval=interval,
        first=used[0].number,
        last=used[-1].number,
        batch=used[-1].batch,
        tflops=tflops,
        flops_per_device=work,
        left_out=dict(Counter(why for why in out if why)),
        restarts=restarts,
        notes=notes,
    )


def _timed(line: Iteration, tokens_per_device: float, batch: int) -> Iteration:
    if line.step_s > 0.0:
        return line
    if line.samples_per_s > 0.0 and batch:
        return line._replace(step_s=batch / line.samples_per_s)
    if tokens_per_device <= 0.0:
        raise ConfigError("the log has tokens/s only: the tokens of a step are needed")
    return line._replace(step_s=tokens_per_device / line.tokens_per_s)


def _left_out(
    lines: Sequence[Iteration], interval: int, restarts: Sequence[int], pauses: Sequence[int]
) -> tuple[list[str], list[str]]:
    """The reason to leave out each line ("" where it counts), and notes where the rules were relaxed to keep any line."""
    reasons = [_reasons(lines, i, interval, restarts, pauses) for i in range(len(lines))]
    notes: list[str] = []
    for forgiven in (PAUSE, RESTART):
        if all(reasons) and any(forgiven in found for found in reasons):
            reasons = [found - {forgiven} for found in reasons]
            notes.append(f"no lines remain after excluding lines {forgiven}; they are included")
    if all(reasons):
        reasons[-1] = set()
        notes.append("too short, all of it warm-up; only the last line is used")
    order = (WARM, RESTART, RAMP, PAUSE)
    return [next((why for why in order if why in found), "") for found in reasons], notes


def _reasons(
    lines: Sequence[Iteration], i: int, interval: int, restarts: Sequence[int], pauses: Sequence[int]
) -> set[str]:
    """The reason to leave out a line; `restarts` and `pauses` are sorted."""
    line, first, final = lines[i], lines[0].number, lines[-1].batch
    before = line.number - interval
    """The last iteration before those that the line covers."""
    begin = max(first - interval, 0) if first > 0 else first - 1
    found: set[str] = set()
    if before < begin + max(WARM_UP, SHARE * (lines[-1].number - begin)):
        found.add(WARM)
    if bisect_right(restarts, line.number) > bisect_right(restarts, line.number - WARM_UP):
        found.add(RESTART)
    if bisect_right(pauses, line.number) > bisect_left(pauses, before):
        found.add(PAUSE)
    ramped = line.batch != final or (interval > 1 and i > 0 and lines[i - 1].batch != final)
    return found | ({RAMP} if final and ramped else set())


def _flops(used: Sequence[Iteration], log: JobLog) -> tuple[float, float]:
    """Median TFLOP/s per device, and FLOPs of a step per device; Megatron-Bridge has them on lines without a number."""
    said = [line for line in used if line.tflops > 0.0]
    if not said:
        lines = log.unnumbered.lines()
        said = [line for line in lines[min(WARM_UP, len(lines) - 1) :] if line.tflops > 0.0]
    if not said:
        return 0.0, 0.0
    rates, work = sorted(line.tflops for line in said), sorted(line.tflops * 1e12 * line.step_s for line in said)
    return quantile(rates, 0.5), quantile(work, 0.5)


def quantile(ordered: Sequence[float], share: float) -> float:
    """A quantile of ordered values, linear between them.

    >>> quantile([1.0, 2.0, 4.0], 0.5), quantile([1.0, 2.0], 0.25)
    (2.0, 1.25)
    """
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def median_interval(ordered: Sequence[float]) -> tuple[float | None, float | None]:
    """The narrowest pair of order statistics x_(k), x_(n+1-k) that holds the median in 95 of 100 samples; None below 6.

    The number of values below the median is binomial (n, 1/2): Conover, Practical Nonparametric Statistics, section 3.2. Its
    normal approximation from n = 200 on.

    >>> median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    (1.0, 6.0)
    """
    n = len(ordered)
    if n < 6:
        return None, None
    if n >= 200:
        k = max(1, int((n - 1.959964 * sqrt(n)) / 2.0))
        return ordered[k - 1], ordered[n - k]
    tail, k = 0, 0
    while (tail + comb(n, k)) * 2 <= (1.0 - CONFIDENCE) * 2**n:
        tail += comb(n, k)
        k += 1
    return ordered[k - 1], ordered[n - k]
