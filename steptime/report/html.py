"""Sections of a report as HTML tables, by tabulate.

Every cell has its own alignment: Jupyter's style sheet right-aligns table cells (.jp-RenderedHTMLCommon td), bars too.
A table wider than the page scrolls in a box of its own, from the keyboard too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from steptime.report.table import FactList, ReportSection


def html(section: ReportSection) -> str:
    """One section as an HTML fragment, every text escaped."""
    title = f"<p><b>{escape(section.title)}</b></p>" if section.title else ""
    if isinstance(section, FactList):
        rows = [[fact.label if i == 0 else "", line] for fact in section.facts for i, line in enumerate(fact.lines)]
        return title + _table([[escape(cell) for cell in row] for row in rows], [], [])
    notes = "".join(f"<p><small>{escape(note)}</small></p>" for note in section.notes)
    if not section.header:
        lines = "\n".join(escape(row[0]) for row in section.rows)
        return f'{title}<p style="white-space: pre-wrap;">{lines}</p>{notes}'
    body = []
    for i, row in enumerate(section.rows):
        cells = [escape(cell) for cell in row] + [""] * (len(section.header) - len(row))
        if i < len(section.bar_colors) and row:
            cells[-1] = f'<span style="color: {section.bar_colors[i]};">{cells[-1]}</span>'
        body += [cells] if row else []
    columns = range(len(section.header))
    bars = {len(section.header) - 1} if section.bar_colors else set[int]()
    align = ["left" if i < section.left or i in bars else "right" for i in columns]
    return title + _table(body, [escape(name) for name in section.header], align) + notes


def _table(rows: Sequence[Sequence[str]], header: Sequence[str], align: Sequence[str]) -> str:
    """Rows of escaped cells; a column without an alignment is left-aligned."""
    from tabulate import tabulate

    markup = str(tabulate(rows, header, tablefmt="unsafehtml", disable_numparse=True, colalign=align or None))
    left = ' style="text-align: left;">'
    markup = re.sub(r"<th([^>]*)>\s*</th>", r"<td\1></td>", markup)  # a column without a name has no heading
    markup = markup.replace("<td>", f"<td{left}").replace("<th>", f"<th{left}")
    return f'<div style="overflow-x: auto;" tabindex="0">{markup}</div>'
