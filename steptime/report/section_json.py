"""Tables and facts as plain data, for the --json of commands whose output is tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptime.report.table import FactList

if TYPE_CHECKING:
    from collections.abc import Iterable

    from steptime.report.table import ReportSection


def document(sections: Iterable[ReportSection]) -> dict[str, Any]:
    """Sections in order: a table as header and rows, facts as label and lines; cells are the text that is printed."""
    return {"sections": [_section(section) for section in sections]}


def _section(section: ReportSection) -> dict[str, Any]:
    if isinstance(section, FactList):
        return {"title": section.title, "facts": [{"label": fact.label, "lines": fact.lines} for fact in section.facts]}
    rows = [row for row in section.rows if row]
    return {"title": section.title, "header": section.header, "rows": rows, "notes": list(section.notes)}
