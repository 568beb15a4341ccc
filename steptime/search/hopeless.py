"""Layouts that need many times what a device has, told by their parameters alone: counted, and never worked out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steptime.job.job import Job
from steptime.memory.states import state_bytes
from steptime.search.parts import code
from steptime.search.space import EXCESS, Counts, Grid
from steptime.search.states import Sketches, Spread

TIMES = EXCESS[-2]
"""From so many times on all that do not fit are of one class."""


def hopeless(zeros: Mapping[int, Job], grid: Grid, sketches: Sketches) -> dict[int, Any]:
    """By ZeRO level the rows of the grid whose mean stage has states of more than `TIMES` what a device has.

    Of its layers alone: parameters, of one byte where they are quantized, and gradients where they are not sharded.
    """
    import numpy as np

    legal = np.zeros(len(grid.splits), dtype=bool)
    for rows in grid.legal.values():
        legal |= rows
    axes = [grid.columns[name][legal] for name in Spread._fields]
    _, first, at = np.unique(code(0, *axes), return_index=True, return_inverse=True)
    spreads = [Spread(*(int(axis[i]) for axis in axes)) for i in first]
    params = np.array([sketches.layer_params(spread) for spread in spreads])
    held = np.zeros(len(grid.splits))
    held[legal] = params[at] / grid.columns["pp"][legal]
    found = {}
    for zero, job in zeros.items():
        size = state_bytes(job)
        each = min(size.params, 1.0) + (size.gradients if zero < 2 else 0.0)
        found[zero] = held * each > TIMES * job.machine.accelerator.usable_memory_bytes
    return found


def without(grid: Grid, lost: Mapping[int, Any]) -> Grid:
    """The grid less the rows that are lost under a ZeRO level."""
    legal = {
        choice: rows & ~lost[choice.zero_level] for choice, rows in grid.legal.items() if choice.zero_level in lost
    }
    return grid._replace(legal=legal)


def count(counts: Counts, grid: Grid, lost: Mapping[int, Any], rows: Any, choices: int) -> None:
    """Count the lost of some rows, each under so many recomputations."""
    each = [
        (legal & lost[choice.zero_level])[rows] for choice, legal in grid.legal.items() if choice.zero_level in lost
    ]
    total = choices * sum(int(mine.sum()) for mine in each)
    counts.evaluated += total
    counts.too_large[-1] += total
