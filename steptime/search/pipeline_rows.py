"""The rows of one pipeline: the values in which layouts differ, in columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from steptime.search.part_columns import PartKey, code
from steptime.search.sharded_weights import WeightSharding
from steptime.search.space import Grid, Shape


class LayoutRows(NamedTuple):
    """The rows of one pipeline, in columns."""

    sp: Any
    tp: Any
    cp: Any
    ep: Any
    etp: Any
    microbatch_sz: Any
    microbatches: Any
    """As in `parts.PartKey`."""
    dp: Any
    at: Any
    """Index into the grid."""
    part: Any
    """Index into the parts."""

    def some(self, which: Any) -> LayoutRows:
        """A selection of rows."""
        return LayoutRows(*(column[which] for column in self))


def shardings_of(tp: Any, ep: Any, etp: Any) -> tuple[list[WeightSharding], Any]:
    """The different (tp, ep, etp) of some rows, and which of them each row has."""
    import numpy as np

    _, first, at = np.unique(code(tp, ep, etp), return_index=True, return_inverse=True)
    return [WeightSharding(int(tp[i]), int(ep[i]), int(etp[i])) for i in first], at


def rows_of(grid: Grid, zeros: Sequence[int], shape: Shape) -> LayoutRows:
    """The rows of a pipeline that can run under any of some ZeRO levels, those with sequence parallelism after those without."""
    import numpy as np

    places: list[Any] = []
    said_sp: list[Any] = []
    for said in (False, True):
        runs = grid.can_run(shape.rows, shape.schedule, zeros, sp=said)
        places.append(shape.rows[runs])
        said_sp.append(np.full(int(runs.sum()), said))
    at, sp = np.concatenate(places), np.concatenate(said_sp)
    key = {name: grid.columns[name][at] for name in PartKey._fields[1:]}
    return LayoutRows(sp=sp, **key, dp=grid.columns["dp"][at], at=at, part=at)


def legal_rows(grid: Grid, zero: int, schedule: str | None, rows: LayoutRows) -> Any:
    """Which of the rows of a pipeline can run under a ZeRO level."""
    import numpy as np

    without, with_sp = (grid.can_run(rows.at, schedule, {zero}, sp=sp) for sp in (False, True))
    return np.where(rows.sp, with_sp, without)
