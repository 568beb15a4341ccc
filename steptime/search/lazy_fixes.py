"""Fixes of a report from the search, which is imported only where a job does not fit."""

from __future__ import annotations

from steptime.answer.result import Estimate
from steptime.base.rows import Fix


def find(found: Estimate) -> list[Fix]:
    """The cheapest lists of changes that make a job fit."""
    from steptime.search.found_fixes import fixes

    return fixes(found)


def attach() -> None:
    """Make every estimate find its fixes with the search."""
    Estimate.find_fixes = staticmethod(find)
