"""The page of `3dtrn diff A B ... --html FILE`: plans side by side, with bars of step and memory on one scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from steptime import __version__
from steptime.answer.result import Estimate
from steptime.launch.plan_yaml import plan_yaml
from steptime.report.breakdown import part_name
from steptime.report.format import gib, percent, seconds
from steptime.report.headline import VERDICTS
from steptime.report.page.markup import Html, el, join, legend, table, to_copy, tools
from steptime.report.page.memory_charts import memory_bar, memory_legend, parts_of
from steptime.report.page.page_tables import plain_table
from steptime.report.page.whole_page import document, section
from steptime.report.palette import time_class
from steptime.report.table import ReportSection, Table

WIDTH = 1000.0


class ComparedPlan(NamedTuple):
    """One of the plans, by the name that the page shows."""

    name: str
    estimate: Estimate
    target: str | None = None
    """Its results on the page."""

    @property
    def head(self) -> Html:
        """Its name at the start of a row."""
        label = el("a", self.name, href=f"#{self.target}") if self.target else self.name
        return el("th", label, scope="row")


def steps(plans: Sequence[ComparedPlan]) -> Html:
    """The parts of each step, largest first; with unequal batches a bar is device time per token."""
    alike = len({(plan.estimate.job.data.gbs, plan.estimate.job.data.seqlen) for plan in plans}) == 1
    lengths = [
        plan.estimate.step_s if alike else 1.0 / plan.estimate.throughput.tokens_per_s_per_device for plan in plans
    ]
    names = sorted(
        {name for plan in plans for name, s in plan.estimate.time.parts_s.items() if s > 0.0},
        key=lambda name: -max(plan.estimate.time.parts_s.get(name, 0.0) for plan in plans),
    )
    rows = []
    for plan, length in zip(plans, lengths, strict=True):
        time = plan.estimate.time
        share = length / max(lengths) / time.step_s
        cells = [
            el("td", _step_bar(plan.estimate, names, WIDTH * share), class_="bar"),
            el("td", seconds(time.step_s), class_="n"),
            el("td", f"{seconds(time.step_s_p10)} to {seconds(time.step_s_p90)}", class_="n"),
            el("td", percent(plan.estimate.throughput.mfu), class_="n"),
            el("td", f"{plan.estimate.throughput.tokens_per_s_per_device:,.1f}", class_="n"),
        ]
        rows.append(el("tr", plan.head, *cells))
    told = "the step" if alike else "device-seconds of a token"
    head = [("plan", ""), (told, "bar"), ("step", "n"), ("80 % interval", "n"), ("MFU", "n"), ("tokens/s/device", "n")]
    colors = legend((time_class(name), part_name(name)) for name in names)
    return join(colors, table(head, rows, "bars"))


def _step_bar(estimate: Estimate, names: Sequence[str], width_of_s: float) -> Html:
    """The exposed parts of one step."""
    pieces, at = [], 0.0
    for name in names:
        took = max(0.0, estimate.time.parts_s.get(name, 0.0))
        if took > 0.0:
            title = el("title", f"{part_name(name)}: {seconds(took)}, {percent(took / estimate.step_s)}")
            pieces.append(
                el("rect", title, x=at, y=0, width=took * width_of_s, height=16, class_=f"{time_class(name)} edge")
            )
            at += took * width_of_s
    words = f"step {seconds(estimate.step_s)}"
    return el("svg", *pieces, viewBox="0 -2 1000 20", preserveAspectRatio="none", role="img", aria_label=words)


def memories(plans: Sequence[ComparedPlan]) -> Html:
    """The worst stage of each, with a line at its device's capacity."""
    worst = [plan.estimate.memory.stages[plan.estimate.memory.worst_stage] for plan in plans]
    over = [float(sum(plan.estimate.memory.overhead_bytes)) for plan in plans]
    needs = [plan.estimate.memory.most_bytes for plan in plans]
    scale = 1.02 * max([*needs, *(plan.estimate.memory.capacity_bytes for plan in plans)])
    rows = []
    for plan, row, more, need in zip(plans, worst, over, needs, strict=True):
        memory = plan.estimate.memory
        cells = [
            el("td", memory_bar(parts_of(row, more), need, memory.capacity_bytes, scale), class_="bar"),
            el("td", f"{gib(memory.least_bytes)} to {gib(need)}", class_="n"),
            el("td", gib(memory.capacity_bytes), class_="n"),
            el("td", VERDICTS[memory.verdict][0]),
            el("td", f"stage {row.stage}, {row.peak_op}"),
        ]
        rows.append(el("tr", plan.head, *cells))
    head = [("plan", ""), ("its worst stage", "bar"), ("GiB needed", "n"), ("usable", "n"), ("", ""), ("peak at", "")]
    return join(memory_legend(), table(head, rows, "bars memory"))


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
