"""The report of one estimate as text, 80 columns wide, answer first."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING

from steptime.report import breakdown, details, headline
from steptime.report.table import PLAIN, WIDTH, ReportSection, Style, layout

if TYPE_CHECKING:
    from steptime.answer.result import Estimate


def report(estimate: Estimate, style: Style = PLAIN, *, brief: bool = False) -> str:
    """The whole report; `brief` ends it after step time breakdown and the memory of the stages."""
    lines = [style.paint(line, "head" if i == 0 else "plain") for i, line in enumerate(headline.headline(estimate))]
    out = [[style.fold(line) for line in lines]]
    out += [layout(section, style) for section in sections(estimate, brief=brief)]
    out.append(assumptions(estimate.assumptions, style))
    return "\n\n".join("\n".join(block) for block in out if block) + "\n"


def sections(estimate: Estimate, *, brief: bool = False) -> list[ReportSection]:
    """What the report consists of, in order. Tables of a brief report leave the lazy parts of an estimate alone."""
    found: list[ReportSection | None] = [
        headline.answer(estimate),
        headline.fixes(estimate),
        breakdown.step_parts(estimate),
        breakdown.memory(estimate),
    ]
    if not brief:
        found += [details.gemms(estimate), details.collectives(estimate), details.pipeline(estimate)]
        found.append(details.weak_scaling(estimate.weak_scaling, estimate.job.parallelism.dp))
    found.append(details.run(estimate))
    return [section for section in found if section is not None and not _empty(section)]


def _empty(section: ReportSection) -> bool:
    """Whether a table has a header and nothing under it (one device has no collectives)."""
    return bool(getattr(section, "header", None)) and not getattr(section, "rows", None)


def assumptions(texts: list[str], style: Style = PLAIN) -> list[str]:
    """What the figures rest on, one item each, wrapped."""
    if not texts:
        return []
    out = [style.paint("assumed", "head")]
    for text in texts:
        out += wrap(text, WIDTH, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False)
    return [style.fold(line) for line in out]
