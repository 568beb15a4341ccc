"""FSDP's layouts in columns: those that differ in numbers alone are estimated together, by an estimate's own functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

from steptime import fsdp
from steptime.answer.verdict import stage_rows
from steptime.base.config import ConfigError
from steptime.base.num import Num
from steptime.job.assembly import Assembly
from steptime.job.candidates import Candidates
from steptime.job.job import Job
from steptime.memory.overhead import overhead
from steptime.search.pipeline import Stages
from steptime.search.pipeline_layouts import Block
from steptime.search.pipeline_rows import LayoutRows, legal_rows, rows_of
from steptime.search.recompute import RecomputeChoice
from steptime.search.space import Grid, Shape
from steptime.timing.node_waits import exposed_past_host, on_device
from steptime.timing.optimizer import optimizer_step
from steptime.timing.part_times import chunk_times, part_times, pricing
from steptime.timing.step_time import layer_replays_s, norm_reduce, straggler_s


def blocks(
    job: Job,
    zero: int,
    grid: Grid,
    stages: Stages,
    shape: Shape,
    choices: Sequence[RecomputeChoice],
    most: Callable[[Sequence[RecomputeChoice]], Any],
) -> Iterator[Block]:
    """One block for each recomputation of the layouts without a pipeline. `most`: as `Pipelines`'."""
    import numpy as np

    rows = rows_of(grid, [zero], shape)
    rows = rows.some(legal_rows(grid, zero, shape.schedule, rows))
    capacity = job.machine.accelerator.usable_memory_bytes
    for choice in choices if rows.at.size else ():
        step, allocated, reserved, outside = (np.full(rows.at.size, np.inf) for _ in range(4))
        for sp, alone in product((False, True), repeat=2):
            mine = np.flatnonzero((rows.sp == sp) & ((rows.dp * rows.cp == 1) == alone))
            try:
                said = job.replace(**dict([choice.setting]), **{"parallelism.sp": sp}) if mine.size else job
            except ConfigError:  # a rule that the grid does not have
                continue
            for at, group in _candidates(said, grid, rows.some(mine)).alike_parts() if mine.size else ():
                group.all_on(grid.devices)
                step[mine[at]], found, outside[mine[at]] = figures(group.as_job)
                allocated[mine[at]], reserved[mine[at]] = found
        yield Block(
            job, grid.devices, grid.gbs, stages, shape.split, zero, (choice,), rows, np.isfinite(step), step[None],
            (allocated + outside)[None], (reserved + outside)[None], capacity, most([choice]), outside,
        )  # fmt: skip


def _candidates(job: Job, grid: Grid, rows: LayoutRows) -> Candidates:
    """Some rows as layouts of a job."""
    said = {name: getattr(rows, name) for name in ("tp", "cp", "ep", "etp", "dp", "microbatch_sz")}
    return Candidates(job, **said, gbs=1.0 * grid.gbs + 0.0 * rows.tp)


def figures(job: Job) -> tuple[Num, tuple[Num, Num], Num]:
    """Seconds of a step, bytes allocated and reserved, and bytes outside the allocator, of layouts alike but for numbers."""
    assembly = Assembly(job)
    priced = pricing(job)
    parts = part_times(assembly, priced)
    chunk = chunk_times(assembly, parts)[0][0]
    alone, tiers = on_device(parts), priced.dp_tiers
    replays = layer_replays_s(alone, assembly.chunks[0])
    directions = fsdp.group_seconds(assembly, tiers, alone.of, replays, priced.context.rates)
    exposed = exposed_past_host(assembly, parts, fsdp.step_exposed(assembly, tiers, directions))
    inside = job.microbatches * (chunk.forward_s + chunk.backward_s) + exposed
    update, partial = optimizer_step(assembly, priced.context).time_s, norm_reduce(assembly, priced, 0)
    step = inside + partial.calls * partial.cost.time_s + update + straggler_s(job, inside)
    (row,) = stage_rows(assembly, fsdp.states(assembly))
    return step, (row.allocated_bytes, row.reserved_bytes), sum(overhead(job))
