"""A bounded search in two rounds: layouts like the plan's first, then those whose bare work is no slower than what was found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from steptime.job.job import Job
from steptime.search.part_columns import KeyRows, PartKey, alike_groups
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
        at = wanted(shape, rows)
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


class WorkColumns(KeyRows):
    """Seconds of one micro-batch through the whole model with nothing recomputed, one row for each of `keys`."""

    def __init__(self, jobs: Mapping[bool, Job], keys: list[PartKey], devices: int, gbs: int) -> None:
        """Arguments as of `part_columns.parts_of`."""
        import numpy as np

        super().__init__(keys)
        self.seconds = np.zeros(len(keys))
        for rows, one in alike_groups(jobs, keys, devices):
            self.seconds[rows] = work_s(one.as_job, gbs)

    def of(self, rows: LayoutRows) -> Any:
        """The seconds of each of some rows."""
        return self.seconds[self.find(*(getattr(rows, name) for name in PartKey._fields))]
