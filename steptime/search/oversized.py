"""Layouts that need many times a device's memory, recognized from their parameters alone: counted, not computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steptime import fsdp
from steptime.job.job import Job
from steptime.search.pipeline_rows import shardings_of
from steptime.search.sharded_weights import ShardedWeights, WeightSharding
from steptime.search.space import EXCESS, Counts, Grid, Shape

TIMES = EXCESS[-2]
"""Multiple of the device's memory above which layouts form one class."""


def legal_shardings(grid: Grid) -> tuple[Any, list[WeightSharding], Any]:
    """The rows that can run, their distinct distributions, and the distribution of each row."""
    import numpy as np

    legal = np.zeros(len(grid.splits), dtype=bool)
    for rows in grid.legal.values():
        legal |= rows
    return legal, *shardings_of(*(grid.columns[name][legal] for name in WeightSharding._fields))


def oversized(zeros: Mapping[int, Job], grid: Grid, weights: ShardedWeights) -> dict[int, Any]:
    """By ZeRO level the rows of the grid whose mean stage has states of more than `TIMES` what a device has.

    Of its layers alone: parameters, of one byte where they are quantized, and gradients where they are not sharded.
    """
    import numpy as np

    legal, mine, at = legal_shardings(grid)
    layer_params = np.zeros(len(grid.splits))
    layer_params[legal] = weights.layer_params(mine)[at] / grid.columns["pp"][legal]
    found = {}
    for zero, job in zeros.items():
        if fsdp.applies(job):  # which shards its parameters
            found[zero] = np.zeros_like(layer_params, dtype=bool)
            continue
        size = job.software.state_bytes
        each = min(size.params, 1.0) + (size.gradients if zero < 2 else 0.0)
        found[zero] = layer_params * each > TIMES * job.machine.accelerator.usable_memory_bytes
    return found


def without(grid: Grid, lost: Mapping[int, Any]) -> Grid:
    """The grid without the rows that are hopeless under a ZeRO level."""
    legal = {
        choice: rows & ~lost[choice.zero_level] for choice, rows in grid.legal.items() if choice.zero_level in lost
    }
    return grid._replace(legal=legal)


def count(counts: Counts, grid: Grid, lost: Mapping[int, Any], shape: Shape, choices: int) -> None:
    """Count the hopeless rows of a pipeline, each with its number of recomputations."""
    each = [
        (legal & lost[choice.zero_level])[shape.rows]
        for choice, legal in grid.legal.items()
        if choice.zero_level in lost and choice.schedule == shape.schedule
    ]
    total = choices * sum(int(mine.sum()) for mine in each)
    counts.evaluated += total
    counts.too_large[-1] += total
