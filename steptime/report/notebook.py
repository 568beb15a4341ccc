"""Estimates in notebooks: the sections of the text report as HTML tables."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from steptime.answer.result import Estimate, estimate
from steptime.report.estimate_text import sections
from steptime.report.headline import headline
from steptime.report.table import FactList

if TYPE_CHECKING:
    from steptime.report.table import Section

__all__ = ["Estimate", "estimate", "estimate_html", "table"]


def estimate_html(estimate: Estimate) -> str:
    """The report as an HTML fragment without scripts or styles of its own: a notebook's `_repr_html_`."""
    heading = "<br>".join(escape(" ".join(line.split())) for line in headline(estimate))
    parts = [f"<p><b>{heading}</b></p>"]
    parts += [table(section) for section in sections(estimate)]
    if estimate.assumptions:
        items = "".join(f"<li>{escape(text)}</li>" for text in estimate.assumptions)
        parts.append(f"<details><summary>assumed</summary><ul>{items}</ul></details>")
    return "\n".join(parts)


def table(section: Section) -> str:
    """One section."""
    from tabulate import tabulate  # 40 ms, which a text report need not pay

    title = f"<p><b>{escape(section.title)}</b></p>" if section.title else ""
    if isinstance(section, FactList):
        rows = [[fact.label if i == 0 else "", line] for fact in section.facts for i, line in enumerate(fact.lines)]
        return title + str(tabulate(rows, tablefmt="html", disable_numparse=True))
    notes = "".join(f"<p><small>{escape(note)}</small></p>" for note in section.notes)
    if not section.header:
        return title + "".join(f"<p>{escape(row[0])}</p>" for row in section.rows) + notes
    body = [row + [""] * (len(section.header) - len(row)) for row in section.rows if row]
    align = ["left"] * section.left + ["right"] * (len(section.header) - section.left)
    html = tabulate(body, section.header, tablefmt="html", disable_numparse=True, colalign=align)
    return title + str(html) + notes


Estimate.draw = staticmethod(estimate_html)
