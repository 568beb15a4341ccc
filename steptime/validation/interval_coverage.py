"""How many measured values lie inside their 80 % intervals, and the width of the intervals.

A row of the fit split is judged by the other cells alone; rows of any other split are in no interval. The interval of memory is
fitted on counters of torch's allocator; rows that read another counter, or do not name theirs, are listed separately.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import exp, log
from statistics import median
from typing import Any, NamedTuple

from steptime.answer.interval import Interval, interval, interval_at
from steptime.answer.measured import FitRun, Measured, measured
from steptime.validation.judgement import Judgement
from steptime.validation.measured_figures import ALLOCATOR
from steptime.validation.measurements import shipped

FEW_ROWS = 20
"""Rows that an accelerator or framework needs to be listed separately."""
OTHER_READINGS = "read by nvidia-smi or unstated"


class Coverage(NamedTuple):
    """Coverage of rows by their intervals, as shares."""

    rows: int
    covered: float
    below: float
    """Faster, or smaller, than the 10th percentile."""
    above: float
    width: float
    """Median of (p90 - p10) / estimate."""


def coverage(found: Iterable[tuple[float, Interval]]) -> Coverage | None:
    """Coverage of (log of measured over predicted, its interval) pairs; None without any."""
    pairs = list(found)
    if not pairs:
        return None
    n = len(pairs)
    below, above = sum(ratio < span.low for ratio, span in pairs), sum(ratio > span.high for ratio, span in pairs)
    width = median(exp(span.high) - exp(span.low) for _, span in pairs)
    return Coverage(n, (n - below - above) / n, below / n, above / n, width)


def ratio_of(j: Judgement, of: str) -> float | None:
    """Log of measured over predicted step time, or peak memory."""
    measured, predicted = (j.measured_step_s, j.predicted_step_s)
    if of == "memory":
        measured, predicted = (j.measured_bytes, j.predicted_bytes)
    return log(measured / predicted) if measured and predicted and j.place else None


def lines(judged: Sequence[Judgement], of: str) -> list[dict[str, Any]]:
    """Coverage by slice and split: all rows, then accelerators and frameworks with `FEW_ROWS` rows, most rows first."""
    groups: dict[tuple[str, str], list[tuple[float, Interval]]] = {}
    for j in judged:
        ratio = ratio_of(j, of)
        if ratio is None or j.place is None:
            continue
        span = interval_at(of, j.place, j.row.id if j.row.published else "")
        for name in ("all", j.accelerator, j.framework) if of == "step" or j.metric in ALLOCATOR else (OTHER_READINGS,):
            groups.setdefault((name, j.row.text("split")), []).append((ratio, span))
    sizes = Counter({name: 0 for name, _ in groups})
    for (name, _), pairs in groups.items():
        sizes[name] += len(pairs)
    found = []
    for name, split in sorted(groups, key=lambda key: (key[0] != "all", -sizes[key[0]], key[0], key[1] != "test")):
        figures = coverage(groups[name, split])
        if figures and (figures.rows >= FEW_ROWS or name == "all"):
            found.append({"what": name, "split": split} | figures._asdict())
    return found


def left_out(judged: Sequence[Judgement], of: str, what: str) -> Coverage | None:
    """Coverage where the interval has no run of the row's source, accelerator or framework: what a new one can expect."""
    known = measured(of)
    sources = {row.id: row.group for row in shipped()}

    def group_of(run: FitRun) -> str:
        kind = run.place.kind
        return {"source": sources.get(run.id, ""), "accelerator": kind.accelerator, "framework": kind.family}[what]

    def group(j: Judgement) -> str:
        if j.place is None:
            return ""
        return {"source": j.row.group, "accelerator": j.place.kind.accelerator, "framework": j.place.kind.family}[what]

    others = {
        name: Measured((run for run in known.runs if group_of(run) != name), known.constants)
        for name in set(map(group, judged))
    }
    ratios = [(j, ratio_of(j, of)) for j in judged]
    return coverage(
        (ratio, interval(j.place, others[group(j)])) for j, ratio in ratios if ratio is not None and j.place
    )


def summary_of(judged: Sequence[Judgement]) -> dict[str, list[dict[str, Any]]]:
    """The `intervals` of the summary of `3dtrn validate --json`."""
    found = {of: lines(judged, of) for of in ("step", "memory")}
    if any(j.row.published for j in judged):
        for what in ("source", "accelerator", "framework"):
            if new := left_out(judged, "step", what):
                found["step"].append({"what": f"all, their {what} left out", "split": "all"} | new._asdict())
    return found
