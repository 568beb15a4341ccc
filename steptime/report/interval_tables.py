"""How many measured values lie inside their 80 % intervals, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from steptime.report.table import Table

HEADER = ["", "split", "rows", "series", "inside", "error", "below", "above", "median width"]
NOTES = (
    "a row of the split fit is judged without its own cell",
    "series: rows of one source, accelerator and model, which tend to be inside or outside together",
    "error: standard error of inside, with a series as one draw",
    "width: (p90 - p10) / estimate",
)
TITLES = {"step": "80 % intervals of step time", "memory": "80 % intervals of peak memory"}


def cells(figures: Mapping[str, Any]) -> list[str]:
    """One line of coverage as text."""
    shares = [f"{100.0 * figures[name]:.1f} %" for name in ("covered", "error", "below", "above", "width")]
    return [figures["what"], figures["split"] or "none", f"{figures['rows']:,}", f"{figures['series']:,}", *shares]


def tables(intervals: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Table]:
    """Step time, then memory; what has no rows is left out."""
    return [
        Table(TITLES[of], HEADER, [cells(figures) for figures in found], NOTES, left=2)
        for of, found in intervals.items()
        if found
    ]
