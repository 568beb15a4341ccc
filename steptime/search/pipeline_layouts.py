"""All layouts on one pipeline: rows are what parts depend on (sp, tp, cp, micro-batch), times recomputations, times ZeRO levels.

Figures that depend on fewer axes are computed on these only and broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from steptime.answer.verdict import update_temporaries
from steptime.base.num import Num, maximum, minimum, where
from steptime.cost.overlap import contention
from steptime.job.candidates import Candidates, SectionColumns
from steptime.job.job import Job
from steptime.job.mesh import Group
from steptime.memory.buffers import TOKEN, at_peak, gradient_copies, has_batch, masks, step_change, workspaces
from steptime.memory.overhead import overhead, reserved_bytes
from steptime.memory.stages import PeakMoment
from steptime.search import first_gradients, stage_peaks, step_seconds
from steptime.search.lower_bounds import Limits, LowerBounds
from steptime.search.part_columns import PartKey
from steptime.search.pipeline import ChunkFigures, Chunks, Stages, contents, rows_of_all
from steptime.search.pipeline_rows import LayoutRows, legal_rows, rows_of, shardings_of
from steptime.search.pipeline_states import AroundPipeline, StageStates, around
from steptime.search.recompute import RecomputeChoice
from steptime.search.sharded_weights import ShardedWeights
from steptime.search.space import SPLIT_SETTINGS, Grid, Shape, Split
from steptime.software.hidden_shares import Share
from steptime.software.performance import EAGER_TORCH
from steptime.timing.data_parallel import networks
from steptime.timing.part_times import Pricing
from steptime.timing.step_time import straggler_s


class BufferColumns(NamedTuple):
    """What the allocator holds for a stage besides states and activations [B]."""

    staying: Num
    """Both at the peak and between steps."""
    moving: Num
    """Only at the peak."""
    between: Num
    """Only between micro-batches."""


class Block(NamedTuple):
    """The layouts of one pipeline under one ZeRO level: figures are [recomputation, row]."""

    job: Job
    """The job on as few devices as possible; every layout is a change of it."""
    devices: int
    gbs: int
    stages: Stages
    split: Split
    zero_level: int
    choices: tuple[RecomputeChoice, ...]
    rows: LayoutRows
    legal: Any
    """By row: whether it can run."""
    step_s: Any
    """Computed only where a layout may fit."""
    allocated_bytes: Any
    """Of the stage with the most, including memory outside the allocator."""
    reserved_bytes: Any
    """The same for reserved memory."""
    capacity_bytes: float
    most: Any
    """By recomputation [:, 1], the least 90th percentile of reserved memory over the estimate."""
    outside: Any
    """Bytes outside the allocator, by row."""

    @property
    def needed_bytes(self) -> Any:
        """What is compared with the capacity (`Memory.most_bytes`): an estimate's own margin may be a little wider."""
        return (self.reserved_bytes - self.outside) * self.most + self.outside

    @property
    def fits(self) -> Any:
        """Where a layout may fit."""
        return self.legal & (self.needed_bytes <= self.capacity_bytes)

    def key(self, row: int) -> PartKey:
        """The values that the parts of a row depend on."""
        r = self.rows
        return PartKey(bool(r.sp[row]), *(int(getattr(r, name)[row]) for name in PartKey._fields[1:]))

    def changes(self, choice: int, row: int) -> dict[str, Any]:
        """A layout as changes of the plan, by dotted key."""
        key, pp = self.key(row), self.stages.pp
        found: dict[str, Any] = {"parallelism.tp": key.tp, "parallelism.cp": key.cp, "parallelism.pp": pp}
        found |= {"parallelism.vpp": self.stages.vpp, "parallelism.dp": self.devices // (pp * key.tp * key.cp)}
        found |= {"data.gbs": self.gbs, "data.microbatch_sz": key.microbatch_sz, "parallelism.sp": key.sp}
        if self.job.model.moe is not None:
            found |= {"parallelism.ep": key.ep, "parallelism.etp": key.etp}
        found |= {} if self.job.parallelism.fsdp else {"parallelism.zero_level": self.zero_level}
        found |= {"parallelism.schedule": self.stages.said, "parallelism.pipeline_passes": 1}
        found |= {"parallelism.microbatch_group_sz": None}
        return found | SPLIT_SETTINGS[self.split] | dict([self.choices[choice].setting])


@dataclass
class Pipelines:
    """Data that all pipelines of one job on one number of devices share."""

    job: Job
    zeros: Mapping[int, Job]
    grid: Grid
    chunks: Chunks
    weights: ShardedWeights
    priced: Pricing
    most: Callable[[Sequence[RecomputeChoice]], Any]

    @cached_property
    def bounds(self) -> LowerBounds:
        """Lower bounds on what layouts take."""
        return LowerBounds(self.zeros, self.grid.gbs, self.chunks)

    def rows(self, shape: Shape) -> LayoutRows:
        """The rows of a pipeline with their parts."""
        rows = rows_of(self.grid, list(self.zeros), shape)
        key = (getattr(rows, name) for name in PartKey._fields)
        return rows._replace(part=self.chunks.parts.find(*key)) if rows.at.size else rows

    def blocks(
        self,
        stages: Stages,
        shape: Shape,
        choices: tuple[RecomputeChoice, ...],
        share: Share | None,
        limits_s: Limits | None = None,
    ) -> Iterator[Block]:
        """One block for every ZeRO level, its seconds where a layout may fit.

        `limits_s`: layouts whose step is sure to take longer may be left out.
        """
        import numpy as np

        rows, limit_s = self.bounds.useful(self.rows(shape), stages, choices, limits_s)
        if not rows.at.size:
            return
        chunk_figures = self.chunk_figures(stages, choices, rows.part)
        microbatches = self.grid.gbs // (rows.dp * rows.microbatch_sz)
        peaks = [stage_peaks.peaks(stages, kind, mine, microbatches) for kind, mine in enumerate(chunk_figures)]
        outside = sum(overhead(self.view(stages, rows))) + 0.0 * rows.tp
        shardings, at = shardings_of(rows.tp, rows.ep, rows.etp)
        found: list[tuple[Job, Block, AroundPipeline]] = []
        for zero, job in self.zeros.items():
            legal = legal_rows(self.grid, zero, shape.schedule, rows)
            capacity = job.machine.accelerator.usable_memory_bytes
            if limits_s:
                least = self.bounds.of_activations(peaks[0]) + self.bounds.of_states(job, rows, stages.pp)
                legal &= (least <= capacity).any(axis=0)
            if not legal.any():
                continue
            ends = around(
                job, self.weights, stages, self.chunks.parts.assembly, shardings, self.grid.devices, self.priced
            )
            known = self.chunks, choices, rows.part
            moments = first_gradients.worst(job, stages, chunk_figures, peaks, microbatches, known, ends, at)
            allocated, reserved = self.memory(stages, moments, ends, rows, at)
            block = Block(
                self.job, self.grid.devices, self.grid.gbs, stages, shape.split, zero, choices, rows, legal,
                np.full_like(reserved, np.inf), allocated + outside, reserved + outside, capacity, self.most(choices), outside,
            )  # fmt: skip
            found.append((job, block, ends))
        self.time(found, chunk_figures, at, share, limit_s)
        yield from (block for _, block, _ in found)

    def time(
        self,
        found: Sequence[tuple[Job, Block, AroundPipeline]],
        chunk_figures: Sequence[Sequence[ChunkFigures]],
        at: Any,
        share: Share | None,
        limit_s: Num,
    ) -> None:
        """Fill in the seconds of a pipeline's blocks where layouts fit. `at`: the sharding of each row."""
        import numpy as np

        fits: Any = sum([block.fits for _, block, _ in found])
        useful = np.flatnonzero(np.any(fits, axis=0)) if found else ()
        if not len(useful):
            return
        stages, rows = found[0][1].stages, found[0][1].rows.some(useful)
        some = [rows_of_all(mine, useful) for mine in chunk_figures]
        microbatches = self.grid.gbs // (rows.dp * rows.microbatch_sz)
        sent, said = self.sends(stages, rows), self.job.software.layout.stage_exchange
        limit = np.broadcast_to(limit_s, fits.shape)[:, useful]
        pipe = step_seconds.pipe(stages, some, microbatches, sent, share, fits[:, useful] > 0, limit, said=said)
        for job, block, ends in found:
            step = self.step_s(job, stages, some, pipe, ends, rows, at[useful])
            block.step_s[:, useful] = np.where(block.fits[:, useful], step, np.inf)

    def chunk_figures(
        self, stages: Stages, choices: tuple[RecomputeChoice, ...], part: Any
    ) -> list[list[ChunkFigures]]:
        """The chunks of every kind of stage, for some rows of the parts."""
        unlike = {contents(chunk): chunk for chunks in stages.chunks for chunk in chunks}
        known = {key: self.chunks.of(chunk, choices, part, split=stages.split) for key, chunk in unlike.items()}
        return [[known[contents(chunk)] for chunk in chunks] for chunks in stages.chunks]

    def view(self, stages: Stages, rows: LayoutRows) -> Job:
        """The job with the rows as columns."""
        said = {"tp": rows.tp, "cp": rows.cp, "dp": rows.dp, "pp": stages.pp, "vpp": stages.vpp}
        said |= {"ep": rows.ep, "etp": rows.etp}
        return Candidates(self.job, **said, microbatch_sz=rows.microbatch_sz, gbs=self.grid.gbs).as_job

    def sends(self, stages: Stages, rows: LayoutRows) -> step_seconds.Sends:
        """Seconds of the sends between stages."""
        if stages.pp == 1:
            return step_seconds.NO_SENDS
        said = {"tp": 1, "cp": 1, "dp": self.grid.devices // stages.pp, "pp": stages.pp}
        whole: Any = SectionColumns(self.job, {"parallelism": SectionColumns(self.job.parallelism, said)})
        sent = self.chunks.parts.whole.boundary_bytes[rows.part]
        groups = {**self.priced.context.groups, "tp": Group("tp", rows.tp, 1)}
        priced = self.priced._replace(context=replace(self.priced.context, groups=groups, known={}))
        return step_seconds.sends(stages, whole, priced, sent, rows.tp, rows.sp)

    def step_s(
        self,
        job: Job,
        stages: Stages,
        figures: Any,
        pipe: step_seconds.Pipe,
        ends: AroundPipeline,
        rows: LayoutRows,
        at: Any,
    ) -> Num:
        """Seconds of a step: around the pipeline gradients, parameters, optimizer, what tensor-parallel and end stages reduce."""
        m = self.grid.gbs // (rows.dp * rows.microbatch_sz)
        share, net = job.software.overlap.dp, networks(ends.view, ends.tiers)["dense"]
        slowed = contention(net.shards, ends.tiers) + 0.0 * ends.states.optimizer_s
        reduced = step_seconds.reduce_s(
            stages, figures, pipe, ends.reductions, at, m if job.zero_level == 2 else 1.0, share, slowed[at]
        )
        gathered: Num = 0.0
        if ends.gathers:
            cast = job.software.comm.sharded_gather == "broadcast"
            gathered = step_seconds.gather_s(stages, figures, pipe, ends.gathers, at, share, slowed[at], broadcast=cast)
        partials = [of.partial for of in ends.states.stages]
        partial = rows.sp * step_seconds.partial_s(pipe, partials, at, self.priced, ends.view.parallelism.tp)
        updated = step_seconds.update_s(job, self.priced, pipe, ends.states, at, m)
        after = reduced + gathered + ends.states.embedding_s[at] + partial + updated
        return pipe.makespan_s + after + straggler_s(self.view(stages, rows), pipe.makespan_s)

    def memory(
        self, stages: Stages, moments: list[tuple[int, PeakMoment]], ends: AroundPipeline, rows: LayoutRows, at: Any
    ) -> tuple[Num, Num]:
        """Allocated and reserved bytes of the stage with the most; `moments`: the worst of every kind of stage."""
        most: tuple[Num, Num] = 0.0, 0.0
        own = self.job.software
        for kind, moment in moments:
            of = StageStates(*(column[at] for column in ends.states.stages[kind]))
            states, buffers = of.states, self.buffers(stages, kind, rows, of.dummies + of.rest)
            copies = gradient_copies(self.job, states)
            updating = update_temporaries(self.job, states) + (buffers.between - buffers.moving + step_change(copies))
            moving, gradients = moment.activations_bytes + moment.transient_bytes, states.gradients_bytes
            if own.states.gradients_persist:
                moving = maximum(moving, updating)
            else:
                more = updating > moment.added_bytes
                moving = where(more, updating, moving)
                gradients = gradients - where(more, 0.0, moment.grads_not_yet_allocated_bytes)
            staying = buffers.staying + buffers.moving + at_peak(copies)
            fixed = states.params_bytes + gradients + states.optimizer_bytes + staying
            reserved = reserved_bytes(fixed, moving, expandable=own.buffers.expandable_segments)
            most = maximum(most[0], fixed + moving), maximum(most[1], reserved)
        return most

    def buffers(self, stages: Stages, kind: int, rows: LayoutRows, kept: Num) -> BufferColumns:
        """Buffers of a kind of stage, as `memory.buffers.stage_buffers`; `kept`: those that follow from its parameters."""
        software, data, whole = self.job.software, self.job.data, self.chunks.parts.whole
        chunks, one = stages.chunks[kind], whole.boundary_bytes[rows.part]
        microbatches = self.grid.gbs // (rows.dp * rows.microbatch_sz)
        staying = sum(item.bytes for item in workspaces(self.job)) + kept + whole.buffer_bytes[rows.part]
        moving: Num = 0.0
        between: Num = 0.0
        if self.job.model.moe:
            stay, between, pieces = self.chunks.kept_by_experts(chunks, rows.part)
            staying, moving = staying + stay, where(microbatches > 1, pieces, 0.0)
        inputs = sum(not chunk.embedding for chunk in chunks)
        if stages.pp > 1 and software.family in EAGER_TORCH:
            staying = staying + microbatches * ((inputs + sum(not chunk.head for chunk in chunks)) * one)
        elif stages.pp > 1 and software.buffers.stage_inputs_stay:
            moving = moving + (0.0 if inputs == 0 else 3.0 if stages.vpp > 1 else 2.0) * one
            between = between + 2.0 * inputs * one
        if stages.pp > 1 and software.buffers.deferred_head_wgrads and any(chunk.head for chunk in chunks):
            waiting = minimum(1.0 * software.buffers.deferred_head_wgrads, microbatches - 1.0)
            moving = moving + waiting * (whole.logits_bytes[rows.part] + one)
        if software.buffers.logits_stay and any(chunk.head for chunk in chunks):
            ranks = rows.tp if software.comm.gathered_logits else 1.0
            moving = moving + where(microbatches > 1, ranks * whole.logits_bytes[rows.part], 0.0)
        tokens = 1.0 * rows.microbatch_sz * (data.seqlen / rows.cp)
        mask = tokens * float(data.seqlen) if masks(software, chunks) else 0.0
        if not (software.buffers.batches_stay and has_batch(chunks)):
            return BufferColumns(staying, moving + mask, between)
        return BufferColumns(staying + microbatches * (mask + TOKEN * tokens), moving, between)
