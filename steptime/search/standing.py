"""How the given plan stands beside the best layout of a search: whether their difference means anything."""

from __future__ import annotations

from math import exp
from typing import Literal, TypeAlias

from steptime.answer.ratio_interval import tied_within
from steptime.search.objective import ranked
from steptime.search.search import Search

COMPARED = 0.05
"""Median error of the ratio of two layouts' step times, of measured pairs on the same devices with the same batch: 4.0 % in
NVIDIA's frameworks, 4.7 % in others (benchmarks/accuracy.md, Ratios)."""

Standing: TypeAlias = Literal["best", "within the error", "tied", "slower", "does not fit"]


def standing(found: Search) -> Standing | None:
    """How the plan compares with the best layout by the objective; None without a plan's own layout or a layout that fits.

    within the error: the difference is less than `COMPARED`. tied: it is more, but 80 % of measured pairs of layouts do not
    exclude that the plan is the faster one (`ratio_interval`).
    """
    best, given = found.best, found.given
    if best is None or given is None:
        return None
    if not given.peaks.fits:
        return "does not fit"
    value = ranked(given, found.asked.objective)
    if value <= best.value:
        return "best"
    if found.asked.objective == "memory":  # bytes are counted, and held to no interval of the step
        return "slower"
    if value < best.value * (1.0 + COMPARED):
        return "within the error"
    return "tied" if value <= best.value * exp(tied_within(best.job, given.job)) else "slower"
