"""The report of one estimate as text, 80 columns wide, answer first."""

from __future__ import annotations

from steptime.answer.assumptions import foremost
from steptime.answer.notes import other_meaning
from steptime.answer.refusals import refusals
from steptime.answer.result import Estimate
from steptime.report import breakdown, details, headline, switch_tables
from steptime.report.table import PLAIN, WIDTH, ReportSection, Style, layout, unstyled, wrapped


def report(estimate: Estimate, style: Style = PLAIN, *, brief: bool = False, assumed: bool = False) -> str:
    """The whole report; `brief` is only its answer, `assumed` lists every assumption."""
    lines = [style.paint(line, "head" if i == 0 else "plain") for i, line in enumerate(headline.headline(estimate))]
    lines += [line for note in above(estimate) for line in wrapped(unstyled(note), WIDTH, "  ")]
    out = [[style.fold(line) for line in lines]]
    out += [layout(section, style) for section in sections(estimate, brief=brief)]
    out.append(_assumptions(estimate, style, brief=brief, every=assumed))
    return "\n\n".join("\n".join(block) for block in out if block) + "\n"


def above(estimate: Estimate) -> list[str]:
    """Notes below the first lines, not repeated among the first assumptions.

    What the framework refuses, a word that means something else, devices.
    """
    return [*refusals(estimate.job), *other_meaning(estimate.job), *_of_devices(estimate)]


def _of_devices(estimate: Estimate) -> list[str]:
    """Notes on the number of devices, and on a model in place of a launch file's."""
    if not estimate.job.notes:
        return []
    from steptime.launch.devices import is_told_first
    from steptime.launch.replaced_model import MODEL_SET

    job = estimate.job
    devices, on_node = job.parallelism.devices, job.machine.devices_per_node
    return [note for note in job.notes if note.startswith(MODEL_SET) or is_told_first(note, devices, on_node)]


def sections(estimate: Estimate, *, brief: bool = False) -> list[ReportSection]:
    """Sections of the report, in order. A brief report does not compute the estimate's lazy tables."""
    found: list[ReportSection | None] = [headline.answer(estimate, brief=brief), headline.fixes(estimate)]
    if not brief:
        found += [breakdown.step_parts(estimate), switch_tables.of_report(estimate), breakdown.memory(estimate)]
        found += [details.gemms(estimate), details.collectives(estimate), details.pipeline(estimate)]
        found.append(details.scaling(estimate.weak_scaling, estimate.job.parallelism.dp))
        found.append(details.run(estimate))
    return [section for section in found if section is not None and not _empty(section)]


def _empty(section: ReportSection) -> bool:
    """Whether a table has a header but no rows (one device has no collectives)."""
    return bool(getattr(section, "header", None)) and not getattr(section, "rows", None)


def _assumptions(estimate: Estimate, style: Style, *, brief: bool, every: bool) -> list[str]:
    """The first assumptions and the number of further ones; or all of them, or only their number."""
    texts = estimate.assumptions
    if every:
        return assumptions(texts, style)
    said = [*above(estimate), *([] if brief else headline.host(estimate))]
    if brief:
        first, *more = [text for text in (*foremost(estimate.job), *texts) if text not in said]
        lines = wrapped(f"assumed  {first}; {len({*more} - {first})} more: --assumed", WIDTH, "         ")
        return [style.fold(unstyled(line)) for line in lines]
    shown = [text for text in (*estimate.host_bound, *foremost(estimate.job)) if text not in said]
    left = len(texts) - len(shown) - len([text for text in texts if text in said])
    return assumptions([*shown, f"{left} more: --assumed"] if left else shown, style)


def assumptions(texts: list[str], style: Style = PLAIN) -> list[str]:
    """What the figures are based on, one item each, wrapped."""
    if not texts:
        return []
    out = [style.paint("assumed", "head")]
    for text in texts:
        out += wrapped(f"  - {unstyled(text)}", WIDTH, "    ")
    return [style.fold(line) for line in out]
