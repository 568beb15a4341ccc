"""The page of `3dtrn diff A B ... --html FILE`: the plans side by side in one file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime import __version__
from steptime.launch.plan_yaml import plan_yaml
from steptime.report.output_files import write_file
from steptime.report.page.document import document, section
from steptime.report.page.markup import Html, el, join, to_copy, tools
from steptime.report.page.side_by_side import ComparedPlan, memories, steps
from steptime.report.page.tables import plain_table
from steptime.report.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from steptime.answer.result import Estimate
    from steptime.report.table import ReportSection


def write(estimates: Sequence[Estimate], labels: Sequence[str], tables: Sequence[ReportSection], path: str) -> None:
    """Write the page.

    Raises:
        ConfigError: the path cannot be written.
    """
    write_file("--html", path, page(estimates, labels, tables).encode("utf-8"))


def page(estimates: Sequence[Estimate], labels: Sequence[str], tables: Sequence[ReportSection]) -> str:
    """The document: differences, steps, memory, the tables of the text, and the plans to copy.

    `tables`: those that the terminal shows, the settings that differ first.
    """
    plans = [
        ComparedPlan(label, one, f"plan-{i}") for i, (label, one) in enumerate(zip(labels, estimates, strict=True))
    ]
    first, *rest = [table for table in tables if isinstance(table, Table)]
    name = f"{len(labels)} plans side by side"
    body = el(
        "main",
        el("header", tools(), el("h1", name), *(el("p", label, class_="job") for label in labels), id="answer"),
        section("settings", "What differs", plain_table(first)),
        section("step", "Where the step goes", steps(plans)),
        section("memory", "Memory of the worst stage", memories(plans)),
        section("figures", "Figures", join(*(plain_table(table) for table in rest))),
        section("plans", "The plans", join(*map(plan_text, plans))),
        el("footer", f"steptime {__version__}: an analytical model"),
    )
    return document(name, body)


def plan_text(plan: ComparedPlan, *before: Html) -> Html:
    """A plan as YAML, folded, to be copied."""
    text = to_copy(plan_yaml(plan.estimate.job), f"yaml-{plan.target}")
    return el("details", el("summary", plan.name), *before, text, id=plan.target)
