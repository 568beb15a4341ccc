"""What `3dtrn validate` prints: the errors of all rows, then by slice, the worst, memory, and what could not be judged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptime.report import coverage
from steptime.report.table import Section, Table

if TYPE_CHECKING:
    from collections.abc import Mapping

HEADER = ["rows", "cells", "median", "mean", "p90", "bias"]
FEW = 5
"""Fewer cells than this say nothing of their spread."""
BY = {
    "accelerator": "by accelerator",
    "source": "by source",
    "precision": "by precision",
    "framework": "by framework",
}


def percent(share: float | None, *, signed: bool = False) -> str:
    """A share in per cent with one decimal."""
    if share is None:
        return "-"
    return f"{100.0 * share:+.1f} %" if signed else f"{100.0 * share:.1f} %"


def cells(figures: Mapping[str, Any]) -> list[str]:
    """Rows, cells, median, mean, p90 and bias of one slice as text."""
    errors = [percent(figures[name]) for name in ("median", "mean", "p90")]
    return [f"{figures['rows']:,}", f"{figures['cells']:,}", *errors, percent(figures["bias"], signed=True)]


def table(title: str, groups: Mapping[str, Mapping[str, Any]], notes: tuple[str, ...] = ()) -> Table:
    """One row per slice."""
    return Table(title, ["", *HEADER], [[name, *cells(figures)] for name, figures in groups.items()], notes)


def sections(summary: Mapping[str, Any]) -> list[Section]:
    """The whole report, summary first; slices without rows are left out."""
    found: list[Section] = [_total(summary)]
    found += [table(title, summary["by"][name]) for name, title in BY.items() if summary["by"][name]]
    if summary["worst"]:
        rows = [[row["id"], row["split"], percent(row["step_time_error"], signed=True)] for row in summary["worst"]]
        found.append(Table("worst rows", ["", "split", "error"], rows, left=2))
    if summary["apart"]:
        found.append(table("judged, but beside the figures above", summary["apart"]))
    if summary["memory"]:
        note = "metric, source; unstated is compared with reserved"
        found.append(table("peak memory", summary["memory"], (note,)))
    found += coverage.tables(summary["intervals"])
    found += _fits(summary["fits"])
    if summary["skipped_by_reason"]:
        rows = [[reason, f"{count:,}"] for reason, count in summary["skipped_by_reason"].items()]
        found.append(Table("skipped, and why", ["", "rows"], rows))
    return found


def _total(summary: Mapping[str, Any]) -> Table:
    """The errors of step time: every split, and all."""
    splits = summary["by"]["split"]
    intervals = {**summary["split_interval_5_95"], "all": summary["step_time"]["interval_5_95"]}
    groups = {**splits, "all": summary["step_time"]} if set(splits) != {"none"} else {"all": summary["step_time"]}
    notes = [
        f"{summary['rows']:,} measured rows: {summary['judged']:,} judged, {summary['skipped']:,} skipped",
        "error = predicted / measured - 1; median, mean and p90 of its size",
        "one vote per cell (model, accelerator, layout, batch, precision)",
    ]
    for name in groups:
        if (found := intervals.get(name)) and groups[name]["cells"] >= FEW:
            spans = ", ".join(f"{key} {100 * low:.1f} to {100 * high:.1f}" for key, (low, high) in found.items())
            notes.append(f"5-95 % interval, {name}: {spans} %")
    return table("step time", groups, tuple(notes))


def _fits(fits: Mapping[str, Mapping[str, int]]) -> list[Section]:
    """Runs that ended out of memory, and runs of the same sources that did not."""
    if not fits["ran_out"]["rows"]:
        return []
    rows = [
        ["ran out of memory: called tight or does not fit", *_share(fits["ran_out"])],
        ["ran, same sources: called fits or tight", *_share(fits["ran"])],
    ]
    return [Table("fits or not", ["", "rows", "right"], rows)]


def _share(found: Mapping[str, int]) -> list[str]:
    share = found["right"] / found["rows"] if found["rows"] else None
    return [f"{found['rows']:,}", percent(share)]
