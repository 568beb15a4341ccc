"""The page of `3dtrn search PLAN --html FILE`: the front of memory against step time, each point a plan."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Any

from steptime import __version__
from steptime.report import layout_rows, search_answer, search_tables
from steptime.report.format import GIB, seconds
from steptime.report.page.axis_ticks import round_ticks, time_ticks
from steptime.report.page.diff_page import ComparedPlan, memories, plan_text, steps
from steptime.report.page.markup import Html, el, join, tools
from steptime.report.page.page_tables import plain_table
from steptime.report.page.whole_page import document, facts, section
from steptime.report.table import FactList, ReportSection
from steptime.search.changes import words
from steptime.search.front import REACH
from steptime.search.search import Layout, Search

WIDTH, HEIGHT, LEFT, BOTTOM = 760.0, 380.0, 56.0, 40.0
NEAR = 16.0
"""Points of the front closer than this have their numbers on different sides; so have points close to the capacity's line."""
CELL = 3.0
"""Layouts closer than this are drawn as one dot."""


def page(found: Search, top: int) -> str:
    """The whole document."""
    best = found.best
    name = search_answer.title(found)
    if best is None:
        sections = [_section(table) for table in (search_tables.nothing_fits(found), *search_tables.refused(found))]
        body = join(*sections)
    else:
        body = join(*_sections(found, best, top))
    header = el("header", tools(), el("h1", name), id="answer")
    return document(
        name,
        el("main", header, body, el("footer", f"steptime {__version__}: an analytical model, each plan estimated")),
    )


def _sections(found: Search, best: Layout, top: int) -> list[Html]:
    """The answer, the front, its plans, the best layouts, the best for each choice, rejected layouts."""
    layouts = found.pareto()
    plans = [ComparedPlan(f"{i + 1}", layout.estimate, f"plan-{i + 1}") for i, layout in enumerate(layouts)]
    shown = [*plans, ComparedPlan("the plan", found.given)] if found.given is not None else plans
    details = [
        plan_text(
            plan._replace(
                name=f"{plan.name}: {layout_rows.figures(layout, found.asked.objective)}, {layout_rows.shape(layout)}"
            ),
            el("p", el("code", words(layout.changes) or "no changes: this is the plan")),
        )
        for plan, layout in zip(plans, layouts, strict=True)
    ]
    tables = [
        search_tables.layouts_table(found, "by the objective", found.top(top)),
        search_tables.choices(found, wide=True),
    ]
    answer = search_answer.answer(found, best)
    return [
        section("best", "The best", facts(answer)),
        section("front", "Memory against step time", scatter(found, layouts)),
        section("step", "Where their steps go", steps(shown)),
        section("memory", "Memory of their worst stages", memories(shown)),
        section("plans", "Their plans", join(*details)),
        *map(_section, search_tables.settings(found, best)),
        section("layouts", "Best layouts", join(*map(plain_table, tables))),
        *map(_section, search_tables.refused(found)),
    ]


def _section(of: ReportSection) -> Html:
    if isinstance(of, FactList):
        return section("nothing", of.facts[0].label.capitalize(), facts(of))
    return section(
        of.title.split(",", 1)[0].replace(" ", "-"),
        of.title[0].upper() + of.title[1:],
        plain_table(of._replace(title="")),
    )


def scatter(found: Search, layouts: Sequence[Layout]) -> Html:
    """Every layout that fits as a dot, the front as a line of numbered points that link to their plans."""
    capacity = max(layout.estimate.memory.capacity_bytes for layout in layouts)
    steps_s = [layout.step_s for layout in layouts]
    given = [] if found.given is None else [found.given]
    ends = [*steps_s, *(e.step_s for e in given)]
    low, high = 0.97 * min(ends), 1.06 * max(ends)
    top = 1.04 * max([capacity, *(_needed_bytes(e) for e in given)])

    def at(step_s: Any, needed: Any, ln: Any = log) -> tuple[Any, Any]:
        x = LEFT + (WIDTH - LEFT - 10.0) * (ln(step_s) - log(low)) / (log(high) - log(low))
        return x, 8.0 + (HEIGHT - BOTTOM - 8.0) * (1.0 - needed / top)

    spots = [at(layout.step_s, layout.held_bytes) for layout in layouts]
    line = el("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in sorted(spots)), class_="line")
    full = at(low, capacity)[1]
    near = [abs(y - full) < NEAR or any(0.0 < x - a < NEAR and abs(y - b) < NEAR for a, b in spots) for x, y in spots]
    marks = [
        _point(i, layout, *spot, left=left)
        for i, (layout, spot, left) in enumerate(zip(layouts, spots, near, strict=True), 1)
    ]
    roof = [
        el("line", x1=LEFT, x2=WIDTH, y1=full, y2=full, class_="cap"),
        el("text", f"{capacity / GIB:.1f} GiB usable", x=WIDTH - 4, y=full - 5, text_anchor="end"),
    ]
    for estimate in given:
        x, y = at(estimate.step_s, _needed_bytes(estimate))
        title = el("title", f"the plan: {seconds(estimate.step_s)}, {_needed_bytes(estimate) / GIB:.1f} GiB")
        marks.append(el("path", title, d=f"M{x:.1f} {y - 7:.1f}l7 7l-7 7l-7 -7z", class_="here"))
        marks.append(el("text", "the plan", x=x + 11, y=y + 4))
    cloud = _cloud(found, low, high, at)
    chart = el("svg", *_axes(low, high, top, at), cloud, *roof, line, *marks, viewBox=f"0 0 {WIDTH:.0f} {HEIGHT:.0f}",
               role="group", aria_label="memory against step time", class_="chart")  # fmt: skip
    note = (
        "each numbered point is a plan: no layout that fits is better in both. Small dots: all other layouts that fit. "
        f"Layouts slower than {REACH:g} x the best are left out."
    )
    if some := layout_rows.selection(found, layouts):
        note += f" Numbered: {some}."
    return join(el("div", chart, class_="scroll"), el("p", note, class_="note"))


def _needed_bytes(estimate: Any) -> float:
    return float(estimate.memory.most_bytes)


def _point(number: int, layout: Layout, x: float, y: float, *, left: bool) -> Html:
    """A point of the front: a link to its plan; `left`: its number is below on the left, away from a neighbor or a line."""
    title = f"{number}: {layout_rows.figures(layout)}; {layout_rows.shape(layout)}"
    dot = el("circle", cx=x, cy=y, r=6.0, class_="dot")
    label = el(
        "text",
        str(number),
        x=x - 8 if left else x + 9,
        y=y + 14 if left else y - 5,
        text_anchor="end" if left else None,
    )
    return el("a", el("title", title), dot, label, href=f"#plan-{number}")


def _cloud(found: Search, low: float, high: float, at: Any) -> Html:
    """The layouts within the chart; coinciding ones are drawn once."""
    import numpy as np

    step, needed = found.columns["step_s"], found.columns["held_bytes"]
    inside = (step >= low) & (step <= high)
    x, y = at(step[inside], needed[inside], np.log)
    cells = np.unique(np.stack([np.rint(x / CELL), np.rint(y / CELL)], axis=-1).astype(int), axis=0)
    path = "".join(f"M{CELL * column:g} {CELL * row:g}h2v2h-2z" for column, row in cells.tolist())
    return el("path", d=path, class_="cloud")


def _axes(low: float, high: float, top: float, at: Any) -> list[Html]:
    """Seconds on the x axis, logarithmic; GiB on the y axis."""
    base = HEIGHT - BOTTOM
    found = [el("line", x1=LEFT, x2=WIDTH, y1=base, y2=base, class_="axis-line")]
    for step_s, text in time_ticks(low, high):
        x = at(step_s, 0.0)[0]
        found.append(el("line", x1=x, x2=x, y1=base, y2=base + 4, class_="axis-line"))
        found.append(el("text", text, x=x, y=base + 16, text_anchor="end" if x > WIDTH - 20.0 else "middle"))
    for tick in round_ticks(0.0, top / GIB):
        y = at(low, tick * GIB)[1]
        found.append(el("line", x1=LEFT, x2=WIDTH, y1=y, y2=y, class_="grid"))
        found.append(el("text", f"{tick:g}", x=LEFT - 8, y=y + 4, text_anchor="end"))
    return [
        *found,
        el("text", "seconds a step (ratio scale)", x=WIDTH, y=base + 34, text_anchor="end"),
        el("text", "GiB", x=4, y=14),
    ]
