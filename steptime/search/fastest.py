"""A search for the best layout only: layouts slower than those found so far are skipped."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from steptime.job.job import Job
from steptime.search.pipeline_rows import LayoutRows
from steptime.search.recompute import RecomputeChoice
from steptime.search.run import run
from steptime.search.search import SLACK, Asked, Search
from steptime.search.space import Shape

KEPT = 20
"""Number of layouts that likely include the best: the screen is not exact, and one that may fit may not."""


class Fastest:
    """Layouts slower than the fastest `KEPT` found so far are of no use."""

    def __init__(self, plan: Job, capacity_bytes: float) -> None:
        """`capacity_bytes`: of a device; only layouts that may fit in it count."""
        self.search = Search(plan, Asked((), ()))
        """What is found so far."""
        self.capacity_bytes = capacity_bytes
        self._seen = 0
        self._best: list[float] = []

    def changes(self, shape: Shape) -> int:  # noqa: ARG002
        """The number of changes does not matter."""
        return 0

    def near(self, shape: Shape, rows: LayoutRows, least: Any) -> Any:  # noqa: ARG002
        """All rows: none is known to be as fast as another."""
        return rows.tp > 0

    def limits_s(self, shape: Shape, choices: Sequence[RecomputeChoice], rows: LayoutRows) -> Any:  # noqa: ARG002
        """One limit for all layouts of a pipeline."""
        import numpy as np

        return np.full((len(choices), rows.at.size), self.limit_s())

    def limit_s(self) -> float:
        """Seconds from which on layouts are left out: those of the slowest of the fastest."""
        import numpy as np

        for found in self.search.found[self._seen :]:
            steps = np.sort(found.within(self.capacity_bytes).step_s)[:KEPT]
            self._best = sorted([*self._best, *steps.tolist()])[:KEPT]
        self._seen = len(self.search.found)
        return self._best[-1] * (1.0 + SLACK) if len(self._best) == KEPT else inf


def fastest(plan: Job, asked: Asked, small: Job | None = None) -> Search:
    """The search with all that the best layout may be, of one number of devices and one batch, by step time.

    `small`: the plan where devices have less memory; its best layout is among them, too.

    Raises:
        ConfigError: no devices, or an axis that has no value left.
    """
    bound = Fastest(plan, (small or plan).machine.accelerator.usable_memory_bytes)
    found = run(plan, asked, bound=bound)
    if found.interrupted or ((best := within(found, small or plan).best) and best.step_s <= bound.limit_s()):
        return found
    return run(plan, asked)  # what was left out may be faster than the best of what fits


def within(found: Search, small: Job) -> Search:
    """What of a search may fit where devices have less memory."""
    if small is found.plan:
        return found
    return Search(
        small, found.asked, found=[of.within(small.machine.accelerator.usable_memory_bytes) for of in found.found]
    )
