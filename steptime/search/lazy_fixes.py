"""Fixes of a report from the search, which is imported only where a job does not fit."""

from __future__ import annotations

from steptime.answer.result import Estimate
from steptime.base.recent import Recent
from steptime.base.rows import Fix

FOUND: Recent[list[Fix]] = Recent(4)  # a plan is often shown again, as text, page or JSON


def find(found: Estimate) -> list[Fix]:
    """The cheapest lists of changes that make a job fit."""
    from steptime.search.found_fixes import fixes

    job = found.job
    return list(FOUND.of((job.to_config(), job.machine, found.step_s), lambda: fixes(found)))


def attach() -> None:
    """Make every estimate find its fixes with the search."""
    Estimate.find_fixes = staticmethod(find)
