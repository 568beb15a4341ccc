"""Estimates in notebooks: the sections of the text report as HTML tables."""

from __future__ import annotations

from html import escape

from steptime.answer.result import Estimate, estimate
from steptime.report.estimate_text import sections
from steptime.report.headline import headline
from steptime.report.html import html
from steptime.search import lazy_fixes

__all__ = ["Estimate", "estimate", "estimate_html"]


def estimate_html(estimate: Estimate) -> str:
    """The report as an HTML fragment without scripts or styles of its own: a notebook's `_repr_html_`."""
    heading = "<br>".join(escape(" ".join(line.split())) for line in headline(estimate))
    parts = [f"<p><b>{heading}</b></p>"]
    parts += [html(section) for section in sections(estimate)]
    if estimate.assumptions:
        items = "".join(f"<li>{escape(text)}</li>" for text in estimate.assumptions)
        parts.append(f"<details><summary>assumed</summary><ul>{items}</ul></details>")
    return "\n".join(parts)


Estimate.draw = staticmethod(estimate_html)
lazy_fixes.attach()
