"""A search for the best layout alone: what is slower than those found so far is left out."""

from __future__ import annotations

from math import inf

from steptime.job.job import Job
from steptime.search.run import Tell, run
from steptime.search.search import SLACK, Asked, Search
from steptime.search.space import Shape

KEPT = 20
"""Layouts that the best may be among: the screen is not exact, and one that may fit may not."""


class Fastest:
    """Layouts slower than the fastest `KEPT` found so far are of no use."""

    def __init__(self, plan: Job, capacity_bytes: float) -> None:
        """`capacity_bytes`: of a device; only those count that may fit in it."""
        self.search = Search(plan, Asked((), ()))
        """What is found so far."""
        self.capacity_bytes = capacity_bytes
        self._seen = 0
        self._best: list[float] = []

    def changes(self, shape: Shape) -> int:  # noqa: ARG002
        """No layout is better for changing less."""
        return 0

    def limit_s(self, changes: int) -> float:  # noqa: ARG002
        """Seconds of the slowest of them."""
        import numpy as np

        for found in self.search.found[self._seen :]:
            steps = np.sort(found.within(self.capacity_bytes).step_s)[:KEPT]
            self._best = sorted([*self._best, *steps.tolist()])[:KEPT]
        self._seen = len(self.search.found)
        return self._best[-1] * (1.0 + SLACK) if len(self._best) == KEPT else inf


def fastest(plan: Job, asked: Asked, capacity_bytes: float | None = None, tell: Tell | None = None) -> Search:
    """The search with all that the best layout may be, of one number of devices and one batch, by step time.

    `capacity_bytes`: less memory than the plan's machine has, with which the best layout is of interest, too.

    Raises:
        ConfigError: no devices, or an axis that has no value left.
    """
    capacity = plan.machine.accelerator.usable_memory_bytes if capacity_bytes is None else capacity_bytes
    found = run(plan, asked, tell, Fastest(plan, capacity))
    return found if found.found or found.interrupted else run(plan, asked, tell)
