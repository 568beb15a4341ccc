"""Tables that the page's script sorts: matrix multiplies, collectives, the nearest measured runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from steptime.answer.result import Estimate
from steptime.answer.tables import stages_alike
from steptime.report.breakdown import stage_range
from steptime.report.details import joined_boundaries
from steptime.report.format import BINARY, TIME, number, percent, quantity, whole
from steptime.report.page.markup import Html, el, join, table
from steptime.report.table import Table

TALL = 30
"""A table with more rows scrolls on a screen and is printed in full."""


class Cell(NamedTuple):
    """The text of a cell, and the number by which it is sorted; None sorts by the text."""

    text: str
    value: float | None = None


def sortable(caption: str, header: Sequence[str], rows: Sequence[Sequence[Cell]], by: int | None = None) -> Html:
    """A table whose headers are buttons. `by`: the column that its rows are sorted by, largest first."""
    numeric = [bool(rows) and all(row[i].value is not None for row in rows) for i in range(len(header))]
    head = [
        el("th", el("button", text, type="button", data_sort=i), scope="col", class_="n" if numeric[i] else None,
           aria_sort="descending" if i == by else None)
        for i, text in enumerate(header)
    ]  # fmt: skip
    body = [
        el("tr", *(
            el("th" if i == 0 else "td", cell.text, scope="row" if i == 0 else None,
               class_="n" if cell.value is not None else None,
               data_v=None if cell.value is None else f"{cell.value:.9g}")
            for i, cell in enumerate(row)
        ))
        for row in rows
    ]  # fmt: skip
    table = el("table", el("caption", caption), el("thead", el("tr", *head)), el("tbody", *body), class_="sortable")
    return el("div", table, class_="scroll tall" if len(rows) > TALL else "scroll")


def gemms(estimate: Estimate) -> Html:
    """Every projection by pass and by the stages that are alike, the largest of the step first."""
    rows, alike = [], stages_alike(estimate.assembly)
    for row in sorted(estimate.gemms, key=lambda row: -row.count_per_step * row.time_s):
        total = row.count_per_step * row.time_s
        bound = "arithmetic" if row.compute_s >= row.bandwidth_s else "memory"
        moved = row.input_bytes + row.weight_bytes + row.output_bytes
        rows.append([
            Cell(row.name), Cell(stage_range(alike[row.stage]), row.stage), Cell(row.pass_),
            Cell(whole(row.count_per_step), row.count_per_step),
            *(Cell(whole(x), x) for x in (row.m, row.n, row.k)), Cell(number(row.flops / 1e9), row.flops),
            Cell(quantity(moved, BINARY), moved), Cell(quantity(row.time_s, TIME), row.time_s), Cell(bound),
            Cell(quantity(total, TIME), total), Cell(percent(total / estimate.step_s), total),
        ])  # fmt: skip
    header = ("projection", "stage", "pass", "calls", *"mnk", "GFLOP", "bytes", "call", "bound by", "step", "of step")
    return sortable("one call on one device; step: all calls of a step on one of its stages", header, rows, by=11)


def collectives(estimate: Estimate) -> Html:
    """Every kind of collective, the most exposed first."""
    rows = []
    found = joined_boundaries(estimate.collectives)
    for row in sorted(found, key=lambda row: (-row.exposed_s, -row.count_per_step * row.time_s)):
        total = row.count_per_step * row.time_s
        rows.append([
            Cell(row.name), Cell(row.kind.replace("_", "-")), Cell(row.axis), Cell(f"{row.ranks:,}", row.ranks), Cell(row.tier),
            Cell(quantity(row.bytes, BINARY), row.bytes), Cell(whole(row.count_per_step), row.count_per_step),
            Cell(quantity(row.latency_s, TIME), row.latency_s), Cell(quantity(row.time_s, TIME), row.time_s),
            Cell(quantity(total, TIME), total), Cell(quantity(row.exposed_s, TIME), row.exposed_s),
        ])  # fmt: skip
    header = ("collective", "kind", "axis", "ranks", "over", "bytes", "calls", "latency", "call", "step", "exposed")
    caption = "bytes: the whole tensor of one call; step: all calls; exposed: the part that lengthens the step"
    return sortable(caption, header, rows, by=10)


def nearest(estimate: Estimate) -> Html | None:
    """The measured runs nearest to this job."""
    found = estimate.time.basis.nearest
    if not found:
        return None
    rows = [
        [Cell(str(run["id"])), Cell(number(float(run["distance"])), float(run["distance"])),
         Cell(f"{float(run['measured_over_predicted']):.3f}", float(run["measured_over_predicted"])),
         Cell(", ".join(run.get("differs", [])))]
        for run in found
    ]  # fmt: skip
    caption = "the nearest measured runs; 3dtrn explain ID traces one to its source"
    return sortable(caption, ("run", "distance", "measured / estimated", "differs"), rows)


def plain_table(found: Table) -> Html:
    """A table of the text report, unchanged."""
    if not found.header:
        title = el("h3", found.title) if found.title else ""
        lines = [el("p", el("code", row[0]) if row[0].startswith("--") else row[0].strip()) for row in found.rows]
        return join(title, *lines, *(el("p", note, class_="note") for note in found.notes))
    classes = [None if i < found.left else "n" for i in range(len(found.header))]
    body = [el("tr", *_cells(row, classes)) for row in found.rows if row]
    return join(
        el("h3", found.title) if found.title else "",
        table(zip(found.header, classes, strict=True), body),
        *(el("p", note, class_="note") for note in found.notes),
    )


def _cells(row: Sequence[str], classes: Sequence[str | None]) -> list[Html]:
    """The cells of a row; a single cell spans the full width: a heading of the rows below, or a layout's changes."""
    if len(row) == 1 < len(classes):
        text = row[0].strip()
        return [el("td", el("code", text) if text.startswith("--") else text, colspan=len(classes), class_="alone")]
    return [el("td", row[i] if i < len(row) else "", class_=kind) for i, kind in enumerate(classes)]
