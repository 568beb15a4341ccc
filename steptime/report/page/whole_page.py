"""The page: `3dtrn PLAN --html FILE`. One file, no network: a policy in its head forbids all but its own script and style."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from steptime import __version__
from steptime.answer.result import Estimate
from steptime.base.rows import Saving
from steptime.base.words import counted
from steptime.launch.plan_yaml import plan_yaml
from steptime.report import details, switch_tables
from steptime.report.estimate_text import above
from steptime.report.headline import answer, fix_cost, fixes, headline, phrases
from steptime.report.page import memory_charts, page_tables, time_charts
from steptime.report.page.markup import Html, el, join, linked, to_copy, tools
from steptime.report.page.schedule_data import schedule, schedule_data
from steptime.report.palette import css
from steptime.report.table import FactList
from steptime.timing.timeline import Timeline

ASSETS = Path(__file__).parent / "assets"


def page(estimate: Estimate) -> str:
    """The whole document."""
    timeline = Timeline(estimate.timing)
    return document(title(estimate), el("main", report(estimate, timeline)), data(estimate, timeline))


def title(estimate: Estimate) -> str:
    """The title in the browser's tab."""
    return f"{estimate.job.model.name or 'unnamed model'} on {counted(estimate.devices, 'device')}"


def document(
    name: str, body: Html, found: dict[str, Any] | None = None, *, script: str = "", connects: bool = False
) -> str:
    """A document with the page's style and script; `script`: a second one; `connects`: it may send requests to its own server."""
    scripts = [asset("page.js"), *([asset(script)] if script else [])]
    allowed = " ".join(f"'sha256-{_hash(text)}'" for text in scripts)
    policy = f"default-src 'none'; script-src {allowed}; style-src 'sha256-{_hash(style())}'; base-uri 'none'; form-action 'none'"
    policy += "; connect-src 'self'" if connects else ""
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", name),
        el("style", Html(style())),
    )
    lines = el("path", d="M0 8L8 0M-2 2L2 -2M6 10L10 6", class_="hatch-line")
    hatch = el("pattern", lines, id="hatch", width=8, height=8, patternUnits="userSpaceOnUse")
    defs = el("svg", el("defs", hatch), class_="defs", width=0, height=0, aria_hidden="true")
    holds = el("script", Html(script_json(found or {})), type="application/json", id="data")
    tail = [el("script", Html(text)) for text in scripts]
    return "<!doctype html>\n" + el("html", head, el("body", defs, body, holds, *tail), lang="en") + "\n"


@cache
def asset(name: str) -> str:
    """A file that is embedded in the page unchanged."""
    return (ASSETS / name).read_text(encoding="utf-8")


@cache
def style() -> str:
    """The style sheet, the palette first."""
    return css() + "\n" + asset("page.css")


def _hash(text: str) -> str:
    return b64encode(sha256(text.encode("utf-8")).digest()).decode()


def script_json(value: Any) -> str:
    """JSON that cannot end its script element early, whatever text it contains."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def data(estimate: Estimate, timeline: Timeline) -> dict[str, Any]:
    """Data for the script's drawings."""
    return {"schedule": schedule_data(estimate, timeline)}


def first_sections(estimate: Estimate) -> Html:
    """Only the answer, the memory and the step: computed at once."""
    found = (
        ("memory", "Memory of a device, by stage", memory_charts.stage_bars(estimate)),
        ("step", "Where the step goes", time_charts.step_bars(estimate)),
    )
    return join(_header(estimate), *(section(*each) for each in found))


def report(estimate: Estimate, timeline: Timeline) -> Html:
    """The whole page, answer first."""
    sections = [section(name, title, body) for name, title, body in _sections(estimate, timeline) if body]
    return join(
        _header(estimate), *sections, el("footer", f"steptime {__version__}: an analytical model; see evidence above")
    )


def section(name: str, title: str, body: Html) -> Html:
    """A section with its heading."""
    return el("section", el("h2", title, id=f"h-{name}"), body, id=name, aria_labelledby=f"h-{name}")


def _sections(estimate: Estimate, timeline: Timeline) -> Iterator[tuple[str, str, Html | None]]:
    """Name, heading and body of every section."""
    found = fixes(estimate)
    if found is not None:
        alone = " (one change at a time)" if estimate.fixes and type(estimate).find_fixes is None else ""
        yield "fixes", found.title[0].upper() + found.title[1:] + alone, _fixes(estimate)
    yield "memory", "Memory of a device, by stage", memory_charts.stage_bars(estimate)
    yield "step", "Where the step goes", time_charts.step_bars(estimate)
    yield (
        "settings",
        switch_tables.TITLE[0].upper() + switch_tables.TITLE[1:],
        _settings(estimate.savings) if estimate.savings else None,
    )
    yield (
        "schedule",
        "The step in time",
        join(schedule(estimate), el("h3", "Memory over the step"), memory_charts.over_time(estimate, timeline)),
    )
    yield "gemms", "Matrix multiplies", page_tables.gemms(estimate)
    yield "collectives", "Collectives", page_tables.collectives(estimate) if estimate.collectives else None
    pipeline, run = details.pipeline(estimate), details.run(estimate)
    yield "pipeline", "Pipeline", facts(pipeline) if pipeline else None
    yield "scaling", "Weak scaling: the same work per device", time_charts.weak_scaling(estimate)
    yield "run", "The whole run", facts(run) if run else None
    yield "evidence", "Evidence", _evidence(estimate)
    yield "assumed", "Assumptions and sources", _assumed(estimate)
    yield "plan", "The plan", to_copy(plan_yaml(estimate.job), "plan-yaml")


def _header(estimate: Estimate) -> Html:
    """The job, the verdict, the main figures."""
    name, *rest = [phrase for line in headline(estimate) for phrase in phrases(line)]
    found = answer(estimate)
    verdict = found.facts[0]
    box = el(
        "div",
        el("strong", verdict.label),
        el("p", " ".join(verdict.lines)),
        class_=f"verdict v-{estimate.memory.verdict}",
    )
    return el(
        "header",
        tools(),
        el("h1", name),
        el("p", ", ".join(rest), class_="job"),
        *(el("p", el("strong", note)) for note in above(estimate)),
        box,
        facts(FactList("", found.facts[1:])),
        id="answer",
    )


def facts(found: FactList) -> Html:
    """Labels and their lines."""
    items = []
    for fact in found.facts:
        items += [el("dt", fact.label), el("dd", *map(_line, fact.lines))]
    return el("dl", *items)


def _line(line: str) -> Html:
    """Settings to copy as they are typed; of other lines, the phrases."""
    return el("p", el("code", line)) if line.startswith("--") else el("p", ", ".join(phrases(line)))


def _fixes(estimate: Estimate) -> Html:
    """The changes that make the job fit, each to be copied whole."""
    items = [el("li", el("code", fix.set), el("p", fix_cost(fix))) for fix in estimate.fixes]
    return el("div", el("ol", *items) if items else None, class_="fixes")


def _settings(found: Sequence[Saving]) -> Html:
    """The settings that shorten the step, each to be copied whole."""
    items = [el("li", el("code", one.set), el("p", switch_tables.described(one))) for one in found]
    return el("div", el("ol", *items), class_="fixes")


def _evidence(estimate: Estimate) -> Html:
    """The interval, its evidence, and what was not measured."""
    basis = estimate.time.basis
    words = f"The interval is intended to contain 80 of 100 measured steps of similar jobs; {basis.evidence}, "
    words += f"{counted(basis.n, 'measured cell') if basis.n else 'no measured cell'} nearby"
    beyond = (
        el("ul", *(el("li", f"extrapolated: {text}") for text in basis.extrapolation)) if basis.extrapolation else None
    )
    return join(time_charts.interval(estimate), el("p", words), beyond, page_tables.nearest(estimate))


def _assumed(estimate: Estimate) -> Html:
    """Defaults and assumptions, then the source of every figure."""
    job = estimate.job
    texts = el("ul", *(el("li", linked(text)) for text in estimate.assumptions))
    figures = [(f"model {job.model.name}", job.model.source)] if job.model.source else []
    figures += [(path or "all else", source) for path, source in job.machine.provenance.items()]
    figures += [(f"{job.software.name}: {key}", source) for key, source in job.software.sources.items()]
    rows = [el("tr", el("th", name, scope="row"), el("td", linked(source))) for name, source in figures]
    table = el("div", el("table", el("tbody", *rows), class_="sources"), class_="scroll")
    return join(texts, el("details", el("summary", f"{len(rows)} figures and settings, each with its source"), table))
