"""The rows of one pipeline: what differs from layout to layout, in columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from steptime.search.parts import PartKey, code
from steptime.search.sketches import Spread
from steptime.search.space import Grid


class Rows(NamedTuple):
    """The rows of one pipeline, in columns."""

    sp: Any
    tp: Any
    cp: Any
    ep: Any
    etp: Any
    microbatch_sz: Any
    dp: Any
    at: Any
    """Row of the grid."""
    part: Any
    """Row of the parts."""

    def some(self, which: Any) -> Rows:
        """Some of them."""
        return Rows(*(column[which] for column in self))


def spreads_of(tp: Any, ep: Any, etp: Any) -> tuple[list[Spread], Any]:
    """The different (tp, ep, etp) of some rows, and which of them each row has."""
    import numpy as np

    _, first, at = np.unique(code(0, tp, ep, etp), return_index=True, return_inverse=True)
    return [Spread(int(tp[i]), int(ep[i]), int(etp[i])) for i in first], at


def rows_of(grid: Grid, zeros: Sequence[int], which: Any) -> Rows:
    """The rows of a pipeline that can run under any of some ZeRO levels, those with sequence parallelism after those without."""
    import numpy as np

    places: list[Any] = []
    said_sp: list[Any] = []
    for said in (False, True):
        runs = np.zeros(len(which), dtype=bool)
        for choice, legal in grid.legal.items():
            if choice.sp == said and choice.zero_level in zeros:
                runs |= legal[which]
        places.append(which[runs])
        said_sp.append(np.full(int(runs.sum()), said))
    at, sp = np.concatenate(places), np.concatenate(said_sp)
    key = {name: grid.columns[name][at] for name in PartKey._fields[1:]}
    return Rows(sp=sp, **key, dp=grid.columns["dp"][at], at=at, part=at)


def legal_rows(grid: Grid, zero: int, rows: Rows) -> Any:
    """Which of the rows of a pipeline can run under a ZeRO level."""
    import numpy as np

    legal = np.zeros(rows.at.size, dtype=bool)
    for choice, can in grid.legal.items():
        if choice.zero_level == zero:
            legal |= (rows.sp == choice.sp) & can[rows.at]
    return legal
