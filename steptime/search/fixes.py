"""What to change when a job does not fit: lists of changes out of the search of all its layouts, cheapest first.

A list of several changes is worth telling only where it is faster than every shorter one; the fastest change of one key is always
told. Layouts keep the devices and the batch, so dp, which follows from the other degrees, is no change of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from steptime.answer import fixes as single
from steptime.answer.result import Estimate, estimate
from steptime.base.config import ConfigError
from steptime.base.rows import Fix
from steptime.search import walked
from steptime.search.changes import words
from steptime.search.run import run
from steptime.search.search import Asked, Layout, Search

MOST = 3
"""Lists that are told."""
TRIES = 6
"""Layouts of one length that are estimated until one fits."""
FREE = frozenset({"parallelism.dp", "parallelism.schedule", "parallelism.microbatch_group_sz", "data.gbs"})
"""Keys that follow from others."""
BY_ROW = frozenset({"data.microbatch_sz", *(f"parallelism.{name}" for name in ("tp", "cp", "sp", "ep", "etp"))})
"""Keys that differ from row to row of a block."""


def fixes(found: Estimate) -> list[Fix]:
    """The cheapest lists of changes that make a job fit, by step time; single changes where the search does not cover it."""
    job = found.job
    if not walked.covered(job):  # every layout would be estimated
        return single.cheapest(job, found.step_s, estimate)
    try:
        searched = run(job, Asked((job.parallelism.devices,), (job.data.gbs,)))
    except ConfigError:
        return single.cheapest(job, found.step_s, estimate)
    listed = list(_lists(searched))  # the shortest first: it stays, whatever beats it
    best = sorted(listed[:1] + sorted(listed[1:], key=_step)[: MOST - 1], key=_step)
    return [
        Fix(
            words(layout.changes),
            layout.estimate.memory.peak_reserved_bytes,
            layout.step_s,
            layout.step_s / found.step_s - 1.0,
        )
        for layout in best
    ]


def _step(layout: Layout) -> float:
    return layout.step_s


def _lists(searched: Search) -> Iterator[Layout]:
    """The fastest layout of every number of changes that is faster than all with fewer, and more of the shortest."""
    import numpy as np

    value, places = searched.ranking
    if not value.size:
        return
    lengths = np.concatenate([_lengths(searched, at) for at in range(len(searched.found))])
    fastest = np.inf
    for length in range(1, int(lengths.max()) + 1):
        rows = np.flatnonzero((lengths == length) & (value < fastest))
        wanted = MOST if fastest == np.inf else 1
        for i in rows[np.argsort(value[rows], kind="stable")][:TRIES]:
            layout = searched.walked(places[i])
            if layout is not None and wanted:
                yield layout
                fastest, wanted = min(fastest, layout.value), wanted - 1


def _lengths(searched: Search, at: int) -> Any:
    """How many keys every layout of a block changes."""
    import numpy as np

    found, plan = searched.found[at], searched.plan
    block, row, p = found.block, found.row, plan.parallelism
    axes = block.rows
    sp = (plan.software.layout.sp if p.sp is None else p.sp) & (axes.tp[row] > 1)
    changed = 1 * (axes.tp[row] != p.tp) + (axes.cp[row] != p.cp) + (axes.sp[row] != sp)
    changed = changed + (axes.microbatch_sz[row] != plan.data.microbatch_sz)
    changed = changed + ((axes.ep[row] != p.ep) | (axes.etp[row] != p.etp)) * (plan.model.moe is not None)
    lists = [searched.fewest(block.changes(i, 0)).keys() - FREE - BY_ROW for i in range(len(block.choices))]
    return changed + np.array([len(keys) for keys in lists])[found.choice]
