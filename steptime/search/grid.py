"""The rows of a search: which combinations can run, by the rules of a single job, and their pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from steptime.job.candidates import Candidates
from steptime.job.facts import Facts
from steptime.job.job import Job, facts
from steptime.job.rules import RULES
from steptime.search.part_columns import distinct_microbatches
from steptime.search.space import SPLITS, Axes, Counts, DiscreteChoice, Grid, Shape, Split, numbers, splits


def schedules(plan: Job, axes: Axes) -> list[str | None]:
    """Schedules that are tried in a pipeline: the usual one, and the plan's own; 1F1B with several chunks is interleaved."""
    own = plan.parallelism.schedule
    said: list[str | None] = axes.values("schedule", [own] if own else [])
    usual = {"1f1b", "interleaved"}
    if "schedule" not in axes.said or (usual <= {*said} and plan.software.layout.schedule == "1f1b"):
        return [None, *(name for name in said if name not in usual)]
    return said


def grid(
    job: Job,
    plan: Job,
    axes: Axes,
    devices: int,
    gbs: int,
    counts: Counts,
    weight: Callable[[str | None], int],
    zeros: Sequence[int],
) -> Grid:
    """The rows of one number of devices and one batch.

    `weight`: number of layouts of every legal row with a schedule (recomputations).
    """
    import numpy as np

    columns = numbers(job, plan, axes, devices, gbs)
    row_splits = splits(plan, columns)
    if "split" in axes.said:
        kept = np.isin(row_splits, [SPLITS.index(split) for split in axes.said["split"]])
        columns, row_splits = {name: column[kept] for name, column in columns.items()}, row_splits[kept]
    tried, legal = schedules(plan, axes), dict[DiscreteChoice, Any]()
    said, wide, alone = axes.values("sp", (False, True)), columns["tp"] > 1, columns["pp"] == 1
    for zero, sp, schedule in product(zeros, (False, True), dict.fromkeys([None, *tried])):
        mine = wide & (sp in said) if sp else ~wide | (sp in said)  # without tensor parallelism there is none to set
        if schedule is not None or None not in tried:  # nor a schedule without a pipeline
            mine &= ~alone if schedule is not None else alone
        choice = DiscreteChoice(zero, sp, schedule)
        legal[choice] = judged(job, columns, row_splits, mine, choice, gbs, counts, weight(schedule))
    columns["microbatches"] = distinct_microbatches(job, gbs // (columns["dp"] * columns["microbatch_sz"]))
    return Grid(devices, gbs, columns, row_splits, legal)


def judged(
    job: Job,
    columns: Mapping[str, Any],
    row_splits: Any,
    mine: Any,
    choice: DiscreteChoice,
    gbs: int,
    counts: Counts,
    weight: int,
) -> Any:
    """Which of the rows `mine` can run; the others are counted under the first rule that they break."""
    alive = mine.copy()
    said = {**columns, "gbs": float(gbs)}
    found = facts(Candidates(job, **said).as_job)
    found = found._replace(zero_level=choice.zero_level, zero_said=found.zero_said and choice.zero_level, sp=choice.sp)
    found = found._replace(schedule_said=choice.schedule)
    every = [found, *(found._replace(**run.widths) for run in job.model.layers or [])]
    for at, split in enumerate(SPLITS):
        rows = alive & (row_splits == at)
        if rows.any():
            alive &= ~rows | checked([with_split(f, split) for f in every], rows, counts, weight)
    return alive


def with_split(found: Facts, split: Split) -> Facts:
    """The facts of layers distributed in this way."""
    return found._replace(layers_per_stage="auto" if split == "auto" else None, ends_count=split == "ends")


def checked(every: Sequence[Facts], rows: Any, counts: Counts, weight: int) -> Any:
    """Those of `rows` that break no rule."""
    import numpy as np

    left = np.flatnonzero(rows)
    for facts_of in every:
        found = _some(facts_of, left)
        for rule in RULES:
            if not left.size:
                break
            good = rule.holds(found)
            if good is True:
                continue
            kept = np.broadcast_to(good, left.shape)
            lost = left.size - int(kept.sum())
            if not lost:
                continue
            counts.rejected[rule.name] = counts.rejected.get(rule.name, 0) + lost * weight
            left, found = left[kept], _some(found, kept)
    result = np.zeros(rows.size, dtype=bool)
    result[left] = True
    return result


def _some(found: Facts, which: Any) -> Facts:
    """The facts of some rows."""
    import numpy as np

    return Facts._make(x[which] if isinstance(x, np.ndarray) and x.ndim else x for x in found)


def shapes(found: Grid) -> Iterator[Shape]:
    """Every pipeline that some legal row has."""
    for schedule in dict.fromkeys(choice.schedule for choice in found.legal):
        yield from _shapes(found, schedule)


def _shapes(found: Grid, schedule: str | None) -> Iterator[Shape]:
    import numpy as np

    runs = np.zeros(len(found.splits), dtype=bool)
    for choice, legal in found.legal.items():
        if choice.schedule == schedule:
            runs |= legal
    rows = np.flatnonzero(runs)
    if not rows.size:
        return
    keys = np.stack([found.columns["pp"][rows], found.columns["vpp"][rows], found.splits[rows]], axis=-1)
    order = np.lexsort(keys.T)
    edges = np.flatnonzero(np.any(np.diff(keys[order], axis=0), axis=1)) + 1
    for mine in np.split(order, edges):
        pp, vpp, split = keys[mine[0]]
        yield Shape(schedule, int(pp), int(vpp), SPLITS[int(split)], rows[mine])
