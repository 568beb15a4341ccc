"""A search as tables and as JSON: the answer first, then the best layouts, memory against time, and what each choice is worth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptime.report.format import GIB, percent, seconds
from steptime.report.headline import VERDICTS
from steptime.report.html import html
from steptime.report.table import Fact, FactList, ReportSection, Table
from steptime.search.changes import settings, words
from steptime.search.recompute import label
from steptime.search.run import search
from steptime.search.search import Layout, Search
from steptime.search.space import EXCESS

__all__ = ["Search", "csv_text", "document", "front_sections", "search", "sections"]

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

AXES = (
    "tp",
    "pp",
    "cp",
    "vpp",
    "ep",
    "etp",
    "microbatch_sz",
    "zero_level",
    "sp",
    "schedule",
    "recompute",
    "devices",
    "gbs",
)
"""Choices that are shown one by one."""
MOST = 8
"""Values of a choice that are shown: the best ones."""
_OBJECTIVE = {"step": "seconds per token", "cost": "cost per token", "energy": "energy per token", "memory": "memory"}


def sections(found: Search, n: int = 10, *, front: bool = True) -> list[ReportSection]:
    """The whole answer."""
    best = found.best
    if best is None:
        return [nothing_fits(found), *refused(found)]
    shown: list[ReportSection] = [answer(found, best), layouts_table(found, "best layouts", found.top(n))]
    if front:
        shown.append(layouts_table(found, "least memory for the time (no layout is better in both)", found.pareto()))
    shown += [choices(found)] if len(found.found) else []
    return [*shown, *refused(found)]


def front_sections(found: Search) -> list[ReportSection]:
    """The Pareto front alone."""
    if found.best is None:
        return [nothing_fits(found), *refused(found)]
    return [layouts_table(found, "least memory for the time (no layout is better in both)", found.pareto())]


def answer(found: Search, best: Layout) -> FactList:
    """The winner beside the given plan, what is tied with it, and what was looked at."""
    facts = [Fact("best", [figures(best), shape(best)], "good")]
    if found.given is not None:
        facts.append(Fact("the plan", [figures(Layout({}, found.given, 0.0)), shape(Layout({}, found.given, 0.0))]))
        facts.append(Fact("difference", [difference(found, best)]))
    facts.append(Fact("change", lines(best.changes, 54) or ["nothing: the plan is the best"]))
    count, least = found.tied
    if count:
        low, high = best.estimate.time.step_s_p10, best.estimate.time.step_s_p90
        facts.append(
            Fact("tied", [f"{count:,} layouts lie within its 80 % interval, {seconds(low)} to {seconds(high)}"])
        )
        if least is not None and least.held_bytes < best.held_bytes:
            facts.append(Fact("least memory of these", [figures(least), *lines(least.changes, 54)]))
    counts = found.counts
    looked = f"{counts.points:,} layouts: {counts.evaluated:,} can run, {counts.fitting:,} fit"
    facts.append(
        Fact("searched", [f"{looked}; {found.seconds:.2f} s" + (", interrupted" if found.interrupted else "")])
    )
    return FactList(title(found), facts)


def title(found: Search) -> str:
    """What was searched, in a line."""
    job, asked = found.plan, found.asked
    devices = ", ".join(f"{n:,}" for n in asked.devices)
    machines = ", ".join(asked.over.get("hardware.node_type", ()) or [job.machine.name])
    batch = ", ".join(f"{n:,}" for n in asked.gbs)
    by = "" if asked.objective == "step" and len(asked.gbs) == 1 else f"; by {_OBJECTIVE[asked.objective]}"
    return (
        f"{job.model.name or 'unnamed model'} on {devices} devices of {machines}, gbs {batch} x {job.data.seqlen:,}{by}"
    )


def figures(layout: Layout) -> str:
    """Step, MFU, memory and verdict of a layout."""
    e = layout.estimate
    held = f"{layout.held_bytes / GIB:.1f} of {e.memory.capacity_bytes / GIB:.1f} GiB"
    text = f"{seconds(e.step_s)}, MFU {percent(e.throughput.mfu)}, {held}"
    return text if e.memory.fits else f"{text}, {VERDICTS[e.memory.verdict][0].lower()}"


def difference(found: Search, best: Layout) -> str:
    """What the best layout saves over the plan."""
    given = found.given
    assert given is not None
    mine, theirs = best.estimate, given
    if best.job.data.gbs == given.job.data.gbs and mine.devices == theirs.devices:
        saved = theirs.step_s - mine.step_s
        share = percent(mine.step_s / theirs.step_s - 1.0, signed=True)
        return f"{seconds(abs(saved))} a step {'less' if saved >= 0 else 'more'}, {share}"
    each = mine.throughput.tokens_per_s_per_device / theirs.throughput.tokens_per_s_per_device
    return f"{percent(each - 1.0, signed=True)} tokens/s/device; the plan has {theirs.devices:,} devices"


def shape(layout: Layout) -> str:
    """A layout in words."""
    p, job = layout.job.parallelism, layout.job
    experts = f"  ep {p.ep}  etp {p.etp}" if job.model.moe else ""
    text = f"tp {p.tp}  cp {p.cp}  pp {p.pp}  vpp {p.vpp}  dp {p.dp}{experts}  micro-batch {job.data.microbatch_sz}"
    named = f"  {job.schedule}" if p.schedule is not None and p.pp > 1 else ""
    return f"{text}{named}  zero {job.zero_level}{'  sp' if job.sp else ''}  recompute {recomputed(layout)}"


def recomputed(layout: Layout) -> str:
    """Its recomputation in a word."""
    return label(layout.job.recompute)


def lines(changes: Mapping[str, Any], width: int) -> list[str]:
    """The settings of a layout in lines of about so many characters, as a shell reads them: ends are continued."""
    found: list[str] = []
    for setting in settings(changes):
        if found and len(found[-1]) + len(setting) + 3 <= width:
            found[-1] += f" {setting}"
        else:
            found.append(setting)
    return [f"{line} \\" for line in found[:-1]] + found[-1:]


def head(found: Search) -> list[str]:
    """The columns of a layout."""
    experts = ["ep", "etp"] if found.plan.model.moe else []
    schedule = ["schedule"] if found.several_schedules else []
    axes = ["tp", "cp", "pp", "vpp", "dp", *experts, "mbs", "zero", "sp", *schedule]
    return ["", "step", "MFU", "GiB", *axes, "recompute"]


def row_of(found: Search, name: str, layout: Layout) -> list[str]:
    """A layout as a row under `head`."""
    p, job, e = layout.job.parallelism, layout.job, layout.estimate
    experts = [p.ep, p.etp] if job.model.moe else []
    axes = [p.tp, p.cp, p.pp, p.vpp, p.dp, *experts, job.data.microbatch_sz, job.zero_level]
    held = f"{layout.held_bytes / GIB:.1f}"
    return [
        name, seconds(e.step_s), percent(e.throughput.mfu).removesuffix(" %"), held, *map(str, axes),
        "y" if job.sp else "-", *([job.schedule if p.pp > 1 else "-"] if found.several_schedules else []), recomputed(layout),
    ]  # fmt: skip


def layouts_table(found: Search, heading: str, layouts: Sequence[Layout]) -> Table:
    """Layouts one under the other, each with the settings that print it."""
    rows: list[list[str]] = []
    for at, layout in enumerate(layouts):
        rows.append(row_of(found, str(at + 1), layout))
        rows += [[f"  {line}"] for line in lines(layout.changes, 74) or ["the plan as it is"]]
    return Table(heading, head(found), rows, [_sets_note(found)])


def _sets_note(found: Search) -> str:
    return "--set ...: behind 3dtrn and the plan" + ("" if found.asked.said else "; the plan leaves its layout out")


def choices(found: Search) -> Table:
    """The best that each value of each choice allows, the others free."""
    rows: list[list[str]] = []
    best = found.best
    assert best is not None
    for name in AXES:
        of = found.best_of(name, MOST) if name != "schedule" or found.several_schedules else []
        if len(of) > 1:
            rows.append([f"{_NAMES.get(name, name)}"])
            rows += [row_of(found, "no pipeline" if value == "" else str(value), layout) for value, layout in of]
    return Table("best that each choice allows, the others free", head(found), rows)


_NAMES = {
    "microbatch_sz": "micro-batch",
    "zero_level": "ZeRO level",
    "sp": "sequence parallelism",
    "schedule": "pipeline schedule",
}


def refused(found: Search) -> list[ReportSection]:
    """What the rules reject, rule by rule, and what does not fit, by how much."""
    counts, shown = found.counts, list[ReportSection]()
    if counts.rejected:
        rows = [[rule, f"{n:,}"] for rule, n in sorted(counts.rejected.items(), key=lambda pair: -pair[1])]
        shown.append(Table("cannot run, by the first rule that is broken", ["", "layouts"], rows))
    if any(counts.too_large):
        ends = [f"up to {end:g} times the device" for end in EXCESS[:-1]] + ["more"]
        rows = [[end, f"{n:,}"] for end, n in zip(ends, counts.too_large, strict=True) if n]
        note = "up to 1.1 times holds those, too, that fit by the estimate but not in one run of ten"
        shown.append(Table("do not fit, by what they need", ["", "layouts"], rows, [note]))
    return shown


def nothing_fits(found: Search) -> FactList:
    """The layout that needs least, and what it lacks."""
    facts = [Fact("nothing fits", [f"of {found.counts.evaluated:,} layouts that can run"], "bad")]
    if found.nearest is not None:
        layout = found.layout(found.nearest[2], fitting=False)
        assert layout is not None
        lacks = layout.held_bytes - layout.estimate.memory.capacity_bytes
        facts.append(Fact("nearest", [figures(layout), shape(layout), *lines(layout.changes, 54)]))
        facts.append(Fact("it lacks", [f"{lacks / GIB:.2f} GiB" if lacks > 0 else "room for the 90th percentile"]))
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
        "best": [row(layout) for layout in found.top(n)] if best else [],
        "tied": None,
        "pareto": [row(layout) for layout in found.pareto()] if best else [],
        "choices": {},
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
    """The best layouts as CSV, one a line."""
    import csv
    import io

    out = io.StringIO()
    names = (
        "devices",
        "gbs",
        "tp",
        "cp",
        "pp",
        "vpp",
        "dp",
        "ep",
        "etp",
        "microbatch_sz",
        "zero_level",
        "sp",
        "schedule",
        "recompute",
    )
    fields = ("step_s", "mfu", "tokens_per_s", "peak_reserved_bytes", "overhead_bytes", "set")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, *fields])
    for layout in found.top(n):
        p, job, figures_of = layout.job.parallelism, layout.job, row(layout)
        axes = [p.devices, job.data.gbs, p.tp, p.cp, p.pp, p.vpp, p.dp, p.ep, p.etp]
        axes += [job.data.microbatch_sz, job.zero_level]
        writer.writerow(
            [
                *axes,
                job.sp,
                job.schedule if p.pp > 1 else "",
                recomputed(layout),
                *(figures_of[name] for name in fields),
            ]
        )
    return out.getvalue()


def search_html(found: Search) -> str:
    """The sections as an HTML fragment: a notebook's `_repr_html_`."""
    return "\n".join(html(section) for section in sections(found, front=False))


Search.draw = staticmethod(search_html)
