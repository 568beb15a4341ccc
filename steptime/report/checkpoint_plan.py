"""A checkpoint beside a plan, as tables."""

from __future__ import annotations

from steptime.checkpoint.against_plan import Comparison
from steptime.report.table import Fact, FactList, ReportSection, Style, Table, to_text


def text(found: Comparison, style: Style) -> str:
    """The comparison as text, below a report."""
    return "\n" + to_text(sections(found), style).rstrip("\n")


def sections(found: Comparison) -> list[ReportSection]:
    """Parameters by kind, bytes of weights by stage where both are known, and notes on what differs."""
    total = ("total", sum(row.checkpoint for row in found.rows), sum(row.plan for row in found.rows))
    title = "against the plan: " + ("equal" if found.agrees else "DIFFERENT")
    head = ["checkpoint", "plan", "difference"]
    out: list[ReportSection] = [Table(title, ["parameters", *head], [_row(*row) for row in (*found.rows, total)])]
    if found.ranks:
        rows = [_row(f"stage {stage}", stored, planned) for stage, stored, planned in found.ranks]
        out.append(Table("bytes of weights on a rank", ["stage", *head], rows))
    return [*out, FactList("notes", [Fact("", found.hints)])] if found.hints else out


def _row(name: str, stored: int, planned: int) -> list[str]:
    return [name, f"{stored:,}", f"{planned:,}", f"{stored - planned:+,}"]
