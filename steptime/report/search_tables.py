"""A search as tables and as JSON: the answer, the best layouts, memory against time, and the effect of each choice."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase
from typing import Any

from steptime.answer.result import estimate
from steptime.answer.switches import LEAST, savings
from steptime.base.rows import Saving
from steptime.base.words import counted
from steptime.report import switch_tables
from steptime.report.format import GIB
from steptime.report.html import html
from steptime.report.layout_rows import figures, head, lines, recomputed, row_of, selection, shape
from steptime.report.search_answer import answer, title
from steptime.report.table import WIDTH, Fact, FactList, ReportSection, Table
from steptime.search.changes import words
from steptime.search.run import search
from steptime.search.search import Layout, Search
from steptime.search.space import EXCESS
from steptime.search.standing import standing

__all__ = ["Search", "csv_text", "document", "front_sections", "search", "sections"]

_AFTER_PIPELINE = ("ep", "etp", "microbatch_sz", "zero_level", "sp", "schedule", "recompute")
AXES = ("tp", "pp", "cp", "vpp", *_AFTER_PIPELINE, "devices", "gbs")
"""Choices that are listed one by one."""
MOST = 8
"""Number of values listed per choice, best first."""


def sections(found: Search, n: int = 10, *, front: bool = True, wide: bool = False) -> list[ReportSection]:
    """The whole answer. `wide`: as in `choices`."""
    best = found.best
    if best is None:
        return [nothing_fits(found), *refused(found)]
    shown: list[ReportSection] = [
        answer(found, best),
        *settings(found, best),
        layouts_table(found, "best layouts", found.top(n)),
    ]
    if front:
        shown.append(_front_table(found))
    shown += [choices(found, wide=wide)] if len(found.found) else []
    return [*shown, *refused(found)]


def front_sections(found: Search) -> list[ReportSection]:
    """The Pareto front only."""
    if found.best is None:
        return [nothing_fits(found), *refused(found)]
    return [_front_table(found)]


def _front_table(found: Search) -> Table:
    layouts = found.pareto()
    table = layouts_table(found, "Pareto front of step time and memory", layouts)
    note = selection(found, layouts)
    return table._replace(notes=[*table.notes, note]) if note else table


def settings(found: Search, best: Layout) -> list[Table]:
    """Settings that are no axes of this search and would shorten the step of its best layout; no table without any."""
    title = f"besides the layout, settings that shorten the best step by {100.0 * LEAST:.0f} % or more"
    notes = ["to rank layouts with one of them: 3dtrn search ... --over KEY=VALUE"]
    table = switch_tables.table(_savings(found, best), title, notes)
    return [table] if table else []


def _savings(found: Search, best: Layout) -> list[Saving]:
    return savings(best.estimate, best.estimate.time.parts_s, estimate, without=found.asked.over)


def layouts_table(found: Search, heading: str, layouts: Sequence[Layout]) -> Table:
    """Layouts one per row, each with its settings."""
    rows: list[list[str]] = []
    for at, layout in enumerate(layouts):
        rows.append(row_of(found, str(at + 1), layout))
        rows += [[f"  {line}"] for line in lines(layout.changes, 74) or ["the plan unchanged"]]
    note = f"append --set ... to: {found.asked.command}" + ("" if found.asked.said else " (the plan states no layout)")
    return keyed(Table(heading, head(found), rows, [*extrapolated(layouts), note]))


def extrapolated(layouts: Sequence[Layout]) -> list[str]:
    """Which rows of a table lie outside of what was measured, in a note for each set of reasons."""
    bases = [layout.estimate.time.basis for layout in layouts]
    reasons: dict[str, list[str]] = {}
    for at, basis in enumerate(bases):
        if basis.evidence == "extrapolated":
            reasons.setdefault("; ".join(basis.extrapolation), []).append(str(at + 1))
    return [f"extrapolated, {_rows(rows, len(layouts))}: {why}" for why, rows in reasons.items()]


def _rows(numbers: Sequence[str], of: int) -> str:
    """Numbers of rows in words."""
    if len(numbers) == of:
        return "all rows" if of > 1 else "the row"
    return f"row{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def choices(found: Search, *, wide: bool = False) -> Table:
    """The best result for each value of each choice, the other choices free.

    `wide`: a row of a recomputation begins with its name; a terminal has no room for it beside the last column.
    """
    rows: list[list[str]] = []
    best = found.best
    assert best is not None
    for name in AXES:
        idle = (name == "schedule" and not found.several_schedules) or (name == "etp" and found.plan.model.moe is None)
        of = [] if idle else found.best_of(name, MOST)
        if len(of) > 1:
            rows.append([f"{_NAMES.get(name, name)}"])
            if name == "recompute":
                names = [recomputed(layout) if wide else "" for _, layout in of]
            else:
                names = [_WORDS.get(str(value), str(value)) for value, _ in of]
            rows += [row_of(found, shown, layout) for shown, (_, layout) in zip(names, of, strict=True)]
    table = Table("best layout for each value of one choice", head(found), rows)
    return table if wide else keyed(table)


def keyed(table: Table) -> Table:
    """A table of layouts in which a letter stands for each recomputation that makes it too wide, and a note for the letter."""
    cells = [table.header, *(row for row in table.rows if len(row) > 1)]
    room = WIDTH - 2 - sum(max(len(row[i]) for row in cells) + 1 for i in range(len(table.header) - 1))
    room = max(room, len(table.header[-1]))
    long = dict.fromkeys(row[-1] for row in cells if len(row[-1]) > room)
    letters = dict(zip(long, ascii_lowercase, strict=False))
    rows = [[*row[:-1], letters.get(row[-1], row[-1])] if len(row) > 1 else row for row in table.rows]
    notes = [f"recompute {letter}: {modules}" for modules, letter in letters.items()]
    return table._replace(rows=rows, notes=[*notes, *table.notes])


_WORDS = {"": "no pipeline", "True": "yes", "False": "no"}
_NAMES = {
    "microbatch_sz": "micro-batch",
    "zero_level": "ZeRO level",
    "sp": "sequence parallelism",
    "schedule": "pipeline schedule",
}


def refused(found: Search) -> list[ReportSection]:
    """Layouts that the rules reject, by rule, and those that do not fit, by how much."""
    counts, shown = found.counts, list[ReportSection]()
    if counts.rejected:
        rows = [[rule, f"{n:,}"] for rule, n in sorted(counts.rejected.items(), key=lambda pair: -pair[1])]
        shown.append(Table("layouts that cannot run, by the first rule broken", ["", "layouts"], rows))
    if any(counts.too_large):
        ends = [f"up to {end:g} x device memory" for end in EXCESS[:-1]] + ["more"]
        rows = [[end, f"{n:,}"] for end, n in zip(ends, counts.too_large, strict=True) if n]
        shown.append(Table("layouts that do not fit, by memory needed", ["", "layouts"], rows))
    return shown


def nothing_fits(found: Search) -> FactList:
    """The layout that needs the least memory, and how much it lacks; of those evaluated before the interrupt."""
    evaluated = counted(found.counts.evaluated, "layout")
    name, looked = "nothing fits", f"of {evaluated} that can run"
    if found.interrupted:
        name, looked = "nothing fits so far", f"of {evaluated} evaluated before the interrupt"
    facts = [Fact(name, [looked], "bad")]
    if found.nearest is not None:
        layout = found.layout(found.nearest[2], fitting=False)
        assert layout is not None
        lacks = layout.held_bytes - layout.estimate.memory.capacity_bytes
        told = [figures(layout, found.asked.objective), shape(layout), *lines(layout.changes, 54)]
        facts.append(Fact("nearest", told))
        facts.append(Fact("missing", [f"{lacks / GIB:.2f} GiB"]))
    return FactList(title(found), facts)


def document(found: Search, n: int = 10) -> dict[str, Any]:
    """The `--json` document; figures are those of the layouts' own estimates, raw SI."""
    counts, best = found.counts, found.best
    result: dict[str, Any] = {
        "schema": "3dtrn-search/1",
        "objective": found.asked.objective,
        "points": counts.points,
        "evaluated": counts.evaluated,
        "fitting": counts.fitting,
        "seconds": found.seconds,
        "interrupted": found.interrupted,
        "rejected": counts.rejected,
        "too_large": dict(zip((f"{end:g}" for end in EXCESS), counts.too_large, strict=True)),
        "given": None if found.given is None else row(Layout({}, found.given, 0.0)),
        "standing": standing(found),
        "best": [row(layout) for layout in found.top(n)] if best else [],
        "tied": None,
        "pareto": [row(layout) for layout in found.pareto()] if best else [],
        "choices": {},
        "settings": [saving._asdict() for saving in _savings(found, best)] if best else [],
        "nearest": None,
    }
    if best is not None:
        count, least = found.tied
        result["tied"] = {"layouts": count, "least_memory": None if least is None else row(least)}
        result["choices"] = {
            name: [{"choice": value} | row(layout) for value, layout in found.best_of(name, MOST)] for name in AXES
        }
    elif found.nearest is not None:
        layout = found.layout(found.nearest[2], fitting=False)
        result["nearest"] = None if layout is None else row(layout)
    return result


def row(layout: Layout) -> dict[str, Any]:
    """One layout: its settings, its config and its figures."""
    e = layout.estimate
    from steptime.answer.result import config

    return {
        "set": words(layout.changes),
        "config": config(e),
        "step_s": e.step_s,
        "step_s_p10": e.time.step_s_p10,
        "step_s_p90": e.time.step_s_p90,
        "evidence": e.time.basis.evidence,
        "extrapolation": e.time.basis.extrapolation,
        "mfu": e.throughput.mfu,
        "tokens_per_s": e.throughput.tokens_per_s,
        "verdict": e.memory.verdict,
        "peak_allocated_bytes": e.memory.peak_allocated_bytes,
        "peak_reserved_bytes": e.memory.peak_reserved_bytes,
        "overhead_bytes": sum(e.memory.overhead_bytes),
        "capacity_bytes": e.memory.capacity_bytes,
        "objective_value": layout.value,
    }


def csv_text(found: Search, n: int) -> str:
    """The best layouts as CSV, one per line."""
    import csv
    import io

    out = io.StringIO()
    names = ("devices", "gbs", "tp", "cp", "pp", "vpp", "dp", *_AFTER_PIPELINE)
    fields = ("step_s", "mfu", "tokens_per_s", "peak_reserved_bytes", "overhead_bytes", "set")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, *fields])
    for layout in found.top(n):
        p, job, figures_of = layout.job.parallelism, layout.job, row(layout)
        axes: list[object] = [p.devices, job.data.gbs, p.tp, p.cp, p.pp, p.vpp, p.dp, p.ep, p.etp]
        axes += [job.data.microbatch_sz, job.zero_level, job.sp, job.schedule if p.pp > 1 else "", recomputed(layout)]
        writer.writerow([*axes, *(figures_of[name] for name in fields)])
    return out.getvalue()


Search.draw = staticmethod(
    lambda found: "\n".join(html(section) for section in sections(found, front=False, wide=True))
)
