"""Estimates and plans in notebooks: the sections of the text report, and the settings of a plan, as HTML tables."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from steptime.answer.result import Estimate, estimate
from steptime.base.config import Config, show
from steptime.hardware.machine import Machine
from steptime.job.job import Job
from steptime.job.mesh import Parallelism
from steptime.job.sections import Data
from steptime.model.model import Model
from steptime.report.estimate_text import above, sections
from steptime.report.headline import headline
from steptime.report.html import html
from steptime.report.table import Table
from steptime.search import lazy_fixes
from steptime.software.performance import Performance

__all__ = ["Data", "Estimate", "Job", "Machine", "Model", "Parallelism", "Performance", "estimate", "estimate_html"]


def estimate_html(estimate: Estimate) -> str:
    """The report as an HTML fragment without scripts or styles of its own: a notebook's `_repr_html_`."""
    heading = "<br>".join(escape(" ".join(line.split())) for line in headline(estimate))
    parts = [f"<p><b>{heading}</b></p>"]
    parts += [f"<p>{escape(note)}</p>" for note in above(estimate)]
    parts += [html(section) for section in sections(estimate)]
    if estimate.assumptions:
        items = "".join(f"<li>{escape(text)}</li>" for text in estimate.assumptions)
        parts.append(f"<details><summary>assumed</summary><ul>{items}</ul></details>")
    return "\n".join(parts)


def config_html(section: Config) -> str:
    """What a plan, a machine or a section of one says, key by key; what is not set is not shown."""
    rows = list(_said(section.model_dump(exclude_unset=True, exclude_none=True), ""))
    if not rows:
        return html(Table(type(section).__name__, [], [["nothing is set: defaults apply"]]))
    return html(Table(type(section).__name__, ["key", "value"], rows, left=2))


def _said(value: object, path: str) -> Iterator[list[str]]:
    """Keys with dots, and their values."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if inside is None or (isinstance(value, list) and not any(isinstance(one, dict) for one in value)):
        yield [
            path,
            ", ".join(map(str, value)) if isinstance(value, list) else value if isinstance(value, str) else show(value),
        ]
        return
    for key, one in inside:
        yield from _said(one, f"{path}.{key}" if path else str(key))


Estimate.draw = staticmethod(estimate_html)
Config.draw = staticmethod(config_html)
lazy_fixes.attach()
