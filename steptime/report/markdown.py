"""Sections of a report as Markdown: tables for pages that are generated."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from steptime.report.table import Table


def markdown(table: Table, level: int = 3) -> str:
    """A heading, the table, its notes as a list; a row of one cell becomes a row in bold, an empty row is left out."""
    columns = len(table.header)
    rule = ["---" if i < table.left else "---:" for i in range(columns)]
    rows = [[f"**{row[0]}**", *[""] * (columns - 1)] if len(row) == 1 else row for row in table.rows if row]
    lines = [_line(table.header), f"|{'|'.join(rule)}|", *(_line(row) for row in rows)]
    notes = ["", *(f"- {note}" for note in table.notes)] if table.notes else []
    return "\n".join([f"{'#' * level} {_capital(table.title)}", "", *lines, *notes]) + "\n"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _capital(title: str) -> str:
    return title[:1].upper() + title[1:]
