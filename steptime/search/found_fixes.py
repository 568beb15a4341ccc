"""What to change when a job does not fit: lists of changes from the search of all its layouts, fastest first.

A list of several changes is reported only where it is faster than every shorter one; the fastest change of one key is always
reported. Layouts keep the devices and the batch, so dp, which follows from the other degrees, does not count as a change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import inf
from typing import Any

from steptime.answer import fixes as single
from steptime.answer.result import Estimate
from steptime.answer.verdict import Candidate
from steptime.base.config import ConfigError
from steptime.base.rows import Fix
from steptime.job.job import Job
from steptime.search import estimated
from steptime.search.changes import fewest, words
from steptime.search.pipeline import counts_of
from steptime.search.pipeline_rows import LayoutRows
from steptime.search.recompute import RecomputeChoice
from steptime.search.run import run
from steptime.search.search import Asked, Layout, Search
from steptime.search.space import SPLIT_SETTINGS, Axes, Shape, chunk_counts, divisors, split_of

MOST = 3
"""Number of lists that are reported."""
TRIES = 6
"""Layouts of one length that are estimated until one fits."""
NEAR, FAR = 1.03, 3.0
"""Multiples of the plan's step up to which all layouts, and those with one key changed, are screened before the others."""
LARGER = 4
"""Largest micro-batch relative to the plan's."""
MOST_CHUNKS = 12
"""Numbers of model chunks per stage that are tried."""
MOST_DEPTHS = 4
"""Depths of multi-token prediction up to which all layouts are searched: each adds some 30 ops to the head of every layout, and
a second."""
FREE = frozenset(
    {"data.gbs", *(f"parallelism.{name}" for name in ("dp", "schedule", "microbatch_group_sz", "pipeline_passes"))}
)
"""Keys that follow from others."""
BY_ROW = frozenset({"data.microbatch_sz", *(f"parallelism.{name}" for name in ("tp", "cp", "sp", "ep", "etp"))})
"""Keys that differ from row to row of a block."""


def fixes(found: Estimate) -> list[Fix]:
    """The lists of changes that make a job fit with the least step time; single changes where the search has none.

    A job of DistributedDataParallel is told of FSDP as well, which is no layout of its own profile.
    """
    job = found.job
    listed: list[Layout] = []
    if estimated.covered(job) and job.model.mtp <= MOST_DEPTHS:  # elsewhere every layout would be estimated
        asked = Asked((job.parallelism.devices,), (job.data.gbs,), axes(job))
        with suppress(ConfigError):
            listed = list(
                lists(run(job, asked, bound=Faster(job, found.step_s)))
            )  # the shortest first: it stays, whatever is faster
    if not listed:
        return single.cheapest(job, found.step_s, Candidate, tight=found.peaks.verdict != "tight")
    other = sorted(
        single.estimated(job, found.step_s, Candidate, single.sharded(job))["fits"], key=lambda fix: fix.step_s
    )[:1]
    best = listed[:1] + sorted(listed[1:], key=lambda layout: layout.step_s)[: MOST - 1 - len(other)]
    told = [
        Fix(
            words(layout.changes),
            layout.estimate.peaks.peak_reserved_bytes,
            layout.step_s,
            layout.step_s / found.step_s - 1.0,
            most_bytes=layout.estimate.peaks.most_bytes,
        )
        for layout in best
    ]
    return sorted([*told, *other], key=lambda fix: fix.step_s)


def axes(job: Job) -> Axes:
    """What is tried: no micro-batch much larger than that of the plan, which does not fit, no odd number of chunks.

    Sequence parallelism needs less memory than none, so it is kept where the plan has it.
    """
    p, layers = job.parallelism, job.model.n_layers
    batches = [n for n in divisors(job.data.gbs) if n <= LARGER * job.data.microbatch_sz]
    pps = [pp for pp in divisors(p.devices) if pp <= layers]
    vpps = [n for n in chunk_counts(layers, pps, ends=split_of(job) != "auto") if n <= max(MOST_CHUNKS, p.vpp)]
    sps = (True,) if job.sp or (p.tp == 1 and job.software.layout.sp and p.sp is None) else (False, True)
    return Axes({"sp": sps, "microbatch_sz": tuple(batches), "vpp": tuple({*vpps, p.vpp})})


class Faster:
    """What no list can have: layouts that are slower than as many as would be tried of those with no more changes."""

    def __init__(self, plan: Job, step_s: float = 0.0) -> None:
        """`step_s`: of the plan, where it is known."""
        self.plan, self.step_s = plan, step_s
        self.search = Search(plan, Asked((), ()))
        """Results so far."""
        self._seen = 0
        self._best: dict[int, list[float]] = {}

    def changes(self, shape: Shape) -> int:
        """Settings that a pipeline changes."""
        said = {"parallelism.pp": shape.pp, "parallelism.vpp": shape.vpp, **SPLIT_SETTINGS[shape.split]}
        return len(fewest(self.plan, said))

    def near(self, shape: Shape, rows: LayoutRows, least: Callable[[Shape, LayoutRows], Any]) -> Any:
        """The plan's own pipeline with at most one key of the rows changed, and what may be about as fast as the plan.

        After these most others are known to be slower.
        """
        alike = (row_changes(self.plan, rows) <= 1) & (self.changes(shape) == 0)
        if not self.step_s:
            return alike
        times = least(shape, rows) / self.step_s
        return (alike & (times <= FAR)) | (times <= NEAR)

    def limits_s(self, shape: Shape, choices: Sequence[RecomputeChoice], rows: LayoutRows) -> Any:
        """Seconds by recomputation and row of a pipeline: `limit_s` of as many changes."""
        import numpy as np

        each = np.array([[self.changes(shape) + len(fewest(self.plan, dict([one.setting])))] for one in choices])
        changes = each + row_changes(self.plan, rows)
        return np.array([self.limit_s(n) for n in range(int(changes.max(initial=0)) + 1)])[changes]

    def limit_s(self, changes: int) -> float:
        """The seconds of the last one that would be tried of those found so far with so many changes at most."""
        for at in range(self._seen, len(self.search.found)):
            for length, step in zip(*_fastest(self.search, at), strict=True):
                self._best[length] = sorted([*self._best.get(length, []), step])[:TRIES]
        self._seen = len(self.search.found)
        known = sorted(step for length, steps in self._best.items() if length <= changes for step in steps)
        return known[TRIES - 1] if len(known) >= TRIES else inf


def _fastest(searched: Search, at: int) -> tuple[list[int], list[float]]:
    """Of a block the fastest layouts of every length: length and seconds."""
    import numpy as np

    lengths, steps = _lengths(searched, at), searched.found[at].step_s
    order = np.argsort(steps, kind="stable")
    rows = np.concatenate([order[lengths[order] == length][:TRIES] for length in counts_of(lengths)])
    return lengths[rows].tolist(), steps[rows].tolist()


def lists(searched: Search) -> Iterator[Layout]:
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
            layout = searched.estimated(places[i]) if wanted else None
            if layout is not None:
                yield layout
                fastest, wanted = min(fastest, layout.value), wanted - 1


def _lengths(searched: Search, at: int) -> Any:
    """Number of keys that every layout of a block changes."""
    import numpy as np

    found = searched.found[at]
    block = found.block
    lists = [searched.fewest(block.changes(i, 0)).keys() - FREE - BY_ROW for i in range(len(block.choices))]
    return row_changes(searched.plan, block.rows)[found.row] + np.array([len(keys) for keys in lists])[found.choice]


def row_changes(plan: Job, rows: LayoutRows) -> Any:
    """Number of the keys in `BY_ROW` that rows change; ep and etp count as one."""
    p = plan.parallelism
    sp = (plan.software.layout.sp if p.sp is None else p.sp) & (rows.tp > 1)
    changed = 1 * (rows.tp != p.tp) + (rows.cp != p.cp) + (rows.sp != sp)
    changed = changed + (rows.microbatch_sz != plan.data.microbatch_sz)
    return changed + ((rows.ep != p.ep) | (rows.etp != p.etp)) * (plan.model.moe is not None)
