"""Search every layout of a plan: `steptime.search(job, devices=1024)` returns a `Search` with `.best`, `.top(n)`, `.pareto()`.

`job` is a `Job`, a path or a mapping. `devices`, `gbs`, `over`, `objective` ("step", "cost", "energy", "memory") and `axes` are
explained at `steptime.search.run.search`. Every layout that can run is screened in numpy columns, and the best are estimated in
full. The package has the name of its function and is called like it.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from steptime import __getattr__ as public_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from steptime.job.job import Job
    from steptime.search.search import Search
    from steptime.search.space import Axes


class _Search(ModuleType):
    """This module, called like `search.run.search`: the public name, which the report gives its tables for notebooks."""

    def __call__(
        self,
        job: Job | str | Path | Mapping[str, Any],
        devices: int | Sequence[int] | None = None,
        *,
        gbs: int | Sequence[int] | None = None,
        over: Mapping[str, Sequence[Any]] | None = None,
        objective: str = "step",
        axes: Axes | None = None,
    ) -> Search:
        """`search.run.search`."""
        found: Search = public_name("search")(job, devices, gbs=gbs, over=over, objective=objective, axes=axes)
        return found


sys.modules[__name__].__class__ = _Search
