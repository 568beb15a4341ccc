"""A bounded search in two rounds: layouts like the plan's first, then those whose bare work is no slower than what was found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from steptime.job.job import Job
from steptime.search.estimated import outline
from steptime.search.lower_bounds import least_s
from steptime.search.part_columns import KeyRows, PartKey, alike_groups, by_sp
from steptime.search.part_figures import work_s
from steptime.search.pipeline_rows import LayoutRows, rows_of
from steptime.search.space import Grid, Shape


def kept(
    found: Grid, zeros: Sequence[int], listed: Sequence[Shape], wanted: Callable[[Shape, LayoutRows], Any]
) -> Grid:
    """The grid with only those rows of some pipelines that are `wanted`, a bool for each row."""
    import numpy as np

    masks: dict[tuple[str | None, bool], Any] = {}
    for shape in listed:
        rows = rows_of(found, zeros, shape)
        at = wanted(shape, rows) if rows.at.size else rows.sp
        for sp in (False, True):
            mask = masks.setdefault((shape.schedule, sp), np.zeros(len(found.splits), dtype=bool))
            mask[rows.at[at & (rows.sp == sp)]] = True
    legal = {choice: rows & masks[choice.schedule, choice.sp] for choice, rows in found.legal.items() if rows.any()}
    return found._replace(legal=legal)


def others(found: Grid, done: Grid) -> Grid:
    """The grid without the rows that are done."""
    return found._replace(
        legal={choice: rows & ~done.legal[choice] for choice, rows in found.legal.items() if choice in done.legal}
    )


@dataclass
class LeastSeconds:
    """Seconds that layouts of a grid take at least, by their parts with nothing recomputed; priced when first asked for."""

    job: Job
    zeros: Mapping[int, Job]
    keys: list[PartKey]
    grid: Grid

    @cached_property
    def works(self) -> Any:
        """Seconds of one micro-batch through the whole model, one for each of `keys`."""
        import numpy as np

        seconds = np.zeros(len(self.keys))
        for rows, one in alike_groups(by_sp(next(iter(self.zeros.values()))), self.keys, self.grid.devices):
            seconds[rows] = work_s(one.as_job, self.grid.gbs)
        return seconds

    @cached_property
    def places(self) -> KeyRows:
        """Where each key is."""
        return KeyRows(self.keys)

    def __call__(self, shape: Shape, rows: LayoutRows) -> Any:
        """Of some rows of a pipeline."""
        at = self.places.find(*(getattr(rows, name) for name in PartKey._fields))
        return least_s(self.works[at], rows, outline(self.job, shape), self.grid.gbs)
