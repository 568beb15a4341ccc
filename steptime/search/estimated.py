"""Layouts that no columns cover, each estimated: FSDP in a pipeline whose backwards are split, or that is not torch's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from steptime import fsdp
from steptime.answer.verdict import stage_memory
from steptime.base.config import ConfigError
from steptime.job.assembly import Assembly
from steptime.job.job import Job, facts
from steptime.job.layer_counts import layers_per_chunk
from steptime.memory.states import stage_states
from steptime.schedule.orders import described
from steptime.search.grid import with_split
from steptime.search.pipeline import Stages
from steptime.search.pipeline_layouts import Block
from steptime.search.pipeline_rows import legal_rows, rows_of
from steptime.search.recompute import WORD, RecomputeChoice, of_plan
from steptime.search.space import Axes, Grid, Shape
from steptime.software.performance import EAGER_TORCH
from steptime.timing.step_time import step_time

MICROBATCHES = (1, 2, 4, 8)
WORDS = ("none", "selective", "full")
"""Micro-batches and recomputations that are tried in addition to the plan's own where each layout takes an estimate."""


def covered(job: Job) -> bool:
    """Whether columns cover the job's layouts."""
    return not fsdp.applies(job)


def in_pipelines(job: Job) -> bool:
    """Whether columns cover FSDP's pipelines of the job: torch's, whose gradients do not stay from step to step."""
    states = job.software.states
    torch = job.software.family in EAGER_TORCH and not states.gradients_persist and states.dummy_wgrads != "kept"
    return fsdp.applies(job) and torch


def narrowed(plan: Job, axes: Axes) -> Axes:
    """The axes: where each layout takes an estimate, fewer values of those that the caller leaves open."""
    together = plan.parallelism.fsdp is not None and plan.parallelism.pp == 1 and "pp" not in axes.said
    split = [
        name for name in (plan.parallelism.schedule, *axes.said.get("schedule", ())) if name and described(name).split
    ]
    if covered(plan) or together or (in_pipelines(plan) and not split):
        return axes
    said = plan.performance.activation_checkpointing_type
    few: dict[str, tuple[Any, ...]] = {
        "microbatch_sz": tuple(dict.fromkeys((*MICROBATCHES, plan.data.microbatch_sz))),
        "sp": (plan.parallelism.sp is not False,),
    }
    if not of_plan(axes.said):
        few[WORD] = tuple(dict.fromkeys((*WORDS, *([said] if said else []))))
    return Axes({**few, **axes.said})


def outline(job: Job, shape: Shape) -> Stages:
    """A pipeline by its numbers alone."""
    counts = layers_per_chunk(with_split(facts(job)._replace(pp=shape.pp, vpp=shape.vpp), shape.split))
    return Stages(schedule_of(job, shape), shape.pp, shape.vpp, (), (), max(counts), shape.schedule)


def schedule_of(job: Job, shape: Shape) -> str:
    """The schedule of a pipeline: as set, or the usual one."""
    return shape.schedule or ("interleaved" if shape.vpp > 1 else job.schedule)


def blocks(
    job: Job, zero: int, grid: Grid, stages: Stages, shape: Shape, choices: Sequence[RecomputeChoice]
) -> Iterator[Block]:
    """One block for every row of a pipeline, so that a search can report progress."""
    import numpy as np

    rows = rows_of(grid, [zero], shape)
    legal = legal_rows(grid, zero, shape.schedule, rows)
    capacity = job.machine.accelerator.usable_memory_bytes
    for row in np.flatnonzero(legal):
        one = type(rows)(*(column[row : row + 1] for column in rows))
        size = (len(choices), 1)
        empty = np.full(size, np.inf)
        block = Block(
            job, grid.devices, grid.gbs, stages, shape.split, zero, tuple(choices), one, np.array([True]), empty.copy(),
            empty.copy(), empty.copy(), capacity, np.ones((len(choices), 1)), np.zeros(1),
        )  # fmt: skip
        for choice in range(len(choices)):
            try:
                assembly = Assembly(job.replace(**block.changes(choice, 0)))
            except ConfigError:  # a rule that the grid does not know of
                continue
            memory = stage_memory(assembly, fsdp.states(assembly) if fsdp.applies(job) else stage_states(assembly))
            if memory.fits:
                block.step_s[choice, 0] = step_time(assembly).step_s
            block.allocated_bytes[choice, 0] = memory.peak_allocated_bytes + sum(memory.overhead_bytes)
            block.reserved_bytes[choice, 0] = memory.most_bytes
        yield block
