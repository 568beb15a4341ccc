"""Sections of a report as HTML tables, by tabulate."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from steptime.report.table import FactList

if TYPE_CHECKING:
    from steptime.report.table import ReportSection


def html(section: ReportSection) -> str:
    """One section as an HTML fragment, every text escaped."""
    from tabulate import tabulate

    title = f"<p><b>{escape(section.title)}</b></p>" if section.title else ""
    if isinstance(section, FactList):
        rows = [[fact.label if i == 0 else "", line] for fact in section.facts for i, line in enumerate(fact.lines)]
        return title + str(tabulate(rows, tablefmt="html", disable_numparse=True))
    notes = "".join(f"<p><small>{escape(note)}</small></p>" for note in section.notes)
    if not section.header:
        return title + "".join(f"<p>{escape(row[0])}</p>" for row in section.rows) + notes
    body = [row + [""] * (len(section.header) - len(row)) for row in section.rows if row]
    bars = {i for row in body for i, cell in enumerate(row) if cell.startswith(("█", "▌"))}
    align = ["left" if i < section.left or i in bars else "right" for i in range(len(section.header))]
    return title + str(tabulate(body, section.header, tablefmt="html", disable_numparse=True, colalign=align)) + notes
