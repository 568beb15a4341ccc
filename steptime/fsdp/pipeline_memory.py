"""FSDP2 under a pipeline: what a stage holds in each of its actions.

Parameters stay gathered from a chunk's first forward to its reduction, or are freed by each forward (reshard_after_forward).
Gradients of all micro-batches add up unsharded in the dtype of the reduction, and are reduced once, group by group, after the
last (torch 2.13: distributed/pipelining/stage.py, perform_reduce_grad; distributed/fsdp/_fully_shard/_fsdp_param.py,
to_accumulated_grad_if_needed).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from steptime.base.num import Num
from steptime.fsdp.groups import options
from steptime.fsdp.left_by_pipeline import last_reduction, outputs
from steptime.fsdp.of_job import syncs_last
from steptime.fsdp.passes import peak_moment
from steptime.fsdp.pipeline_chunks import Gradients, Passing, ShardedChunk, chunk_bytes
from steptime.fsdp.sharded_states import sharded_elements
from steptime.job.assembly import Assembly
from steptime.job.job import Job
from steptime.memory.part_memories import PartMemories
from steptime.memory.stages import PeakMoment
from steptime.schedule import Action, order
from steptime.schedule.orders import described, shortened
from steptime.schedule.sharded import HOOKED, ShardedStep, sharded_steps

REPEATS = 3
"""Repeats of a long step that are walked: in the first one gradients may still be allocated."""


class ActionMemory(NamedTuple):
    """A stage in one of its actions."""

    action: Action
    moment: PeakMoment
    """The worst moment of the action, or of the reduction that follows it."""
    kept: Num
    """Bytes saved for backward after it."""
    to_come: Num
    """Bytes of the sharded gradients that are not allocated yet."""


def fetches_ahead(job: Job) -> bool:
    """Whether the schedule requests parameters before an action needs them."""
    return job.software.layout.stage_exchange != "time_steps" and (
        job.parallelism.vpp > 1 or job.schedule not in HOOKED
    )


def stage_steps(assembly: Assembly, stage: int, actions: Sequence[Action]) -> list[ShardedStep]:
    """A stage's actions with their gathers and reductions."""
    first = None
    if described(assembly.job.schedule).split:
        first = next((i for i, chunk in enumerate(assembly.stages[stage]) if chunk.embedding), None)
    reshard = options(assembly).reshard_after_forward
    return sharded_steps(tuple(actions), ahead=fetches_ahead(assembly.job), reshard=reshard, first=first)


def peak_moments(assembly: Assembly) -> list[PeakMoment]:
    """Activations and transients of every stage at its worst moment, FSDP's buffers among the transients."""
    return [assembly.once(peak_moment)] if assembly.job.parallelism.pp == 1 else stage_peaks(assembly)


def stage_peaks(assembly: Assembly) -> list[PeakMoment]:
    """The worst moment of every stage. A step with a repeating middle holds no more than one with a few repeats."""
    job, p = assembly.job, assembly.job.parallelism
    short, period, _ = shortened(job.schedule, p.pp, p.vpp, job.schedule_microbatches, p.microbatch_group_sz, REPEATS)
    orders = order(job.schedule, p.pp, p.vpp, short, period)
    found = []
    for stage, chunks in enumerate(stage_chunks(assembly)):
        moments = [action.moment for action in stage_actions(assembly, stage, chunks, orders[stage])]
        worst = moments[0]
        for moment in moments:
            worst = worst.worse(moment)
        found.append(worst)
    return found


def stage_chunks(assembly: Assembly) -> list[list[ShardedChunk]]:
    """The chunks of every stage."""
    memories, plain = PartMemories(assembly, weight_grads_stay=True), PartMemories(assembly)
    split = described(assembly.job.schedule).split
    return [
        [chunk_bytes(assembly, chunk, memories, plain, split=split) for chunk in chunks] for chunks in assembly.stages
    ]


def stage_actions(
    assembly: Assembly, stage: int, chunks: list[ShardedChunk], actions: Sequence[Action]
) -> Iterator[ActionMemory]:
    """Each action of a stage in order; of a pipeline that reduces gradients several times a step, in a later pass."""
    steps = stage_steps(assembly, stage, actions)
    job = assembly.job
    reduced = job.parallelism.pipeline_passes > 1 and not syncs_last(job)  # by the passes before
    to_come = [0.0 if reduced else job.software.state_bytes.gradients * n for n in shards(assembly, stage)]
    stage_walk = ShardedStage(chunks, to_come)
    for step, one in zip(steps, situations(steps, len(chunks)), strict=True):
        yield ActionMemory(
            step.action, stage_walk.moment(one), stage_walk.saved(one.after), stage_walk.waiting(one.after)
        )


class Outstanding(NamedTuple):
    """What a stage holds between two actions, by chunk."""

    whole: tuple[int, ...]
    """Micro-batches that no backward has begun."""
    late: tuple[int, ...]
    """Those whose gradients of weights are still to come."""
    unreduced: tuple[bool, ...]
    """Whether the gradients are still to be reduced."""


class Situation(NamedTuple):
    """A stage in one of its actions: all that decides what it holds."""

    chunk: int
    passing: Passing
    gradients: tuple[Gradients, ...]
    gathered_layers: frozenset[int]
    gathered_roots: frozenset[int]
    reduces: bool
    during: Outstanding
    """What it holds of other micro-batches in the action."""
    after: Outstanding
    """What it holds after it."""


def situations(steps: Sequence[ShardedStep], count: int) -> Iterator[Situation]:
    """A stage of `count` chunks in each of its actions."""
    outstanding = Outstanding((0,) * count, (0,) * count, (True,) * count)
    gradients = (Gradients(),) * count

    def put(of: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
        return (*of[:at], value, *of[at + 1 :])

    for step in steps:
        kind, _, at = step.action
        passing = Passing(kind, at in step.fetched, at in step.gathered_layers, step.roots, gradients[at])
        whole = put(outstanding.whole, at, outstanding.whole[at] - (kind in "BI"))
        during = Outstanding(
            whole, put(outstanding.late, at, outstanding.late[at] - (kind == "W")), outstanding.unreduced
        )
        outstanding = Outstanding(
            put(whole, at, whole[at] + (kind == "F")),
            put(during.late, at, during.late[at] + (kind == "I")),
            put(outstanding.unreduced, at, not step.reduces),
        )
        yield Situation(
            at, passing, gradients, step.gathered_layers, step.gathered_roots, step.reduces, during, outstanding
        )
        gradients = put(gradients, at, Gradients() if step.reduces else gradients[at].after(kind))


class ShardedStage:
    """What a stage holds in its situations."""

    def __init__(self, chunks: Sequence[ShardedChunk], to_come: Sequence[Num], microbatches: Num | None = None) -> None:
        """`to_come`: bytes of the sharded gradients of each chunk; `microbatches`: of a step, unless the job says."""
        job = chunks[0].assembly.job
        self.microbatches: Num = job.schedule_microbatches if microbatches is None else microbatches
        self.keeps = job.software.activations.pipeline_keeps
        self.chunks, self.to_come = chunks, to_come
        self.kept = [chunk.saved for chunk in chunks]
        self.worst = [cache(chunk.worst) for chunk in chunks]
        self.unsharded = [cache(chunk.gradient_bytes) for chunk in chunks]
        self.reduction = [cache(chunk.reduction) for chunk in chunks]

    def saved(self, of: Outstanding) -> Num:
        """Bytes saved for backward."""
        counts = zip(of.whole, self.kept, of.late, self.chunks, strict=True)
        return sum([whole * kept + late * chunk.half[0] for whole, kept, late, chunk in counts])

    def waiting(self, of: Outstanding) -> Num:
        """Bytes of sharded gradients that are not allocated yet."""
        return sum([bytes_ for bytes_, left in zip(self.to_come, of.unreduced, strict=True) if left])

    def left(self, of: Outstanding, at: int, own: int) -> Num:
        """Bytes that the pipeline leaves; chunk `at` has `own` micro-batches in an action, or reduces if it has none."""
        if not self.keeps:
            return 0.0
        counts = [whole + own * (c == at) for c, whole in enumerate(of.whole)]
        sent = [outputs(chunk, self.microbatches, n) for chunk, n in zip(self.chunks, counts, strict=True)]
        return sum(sent) + sum([last_reduction(chunk) for c, chunk in enumerate(self.chunks) if own or c != at])

    def moment(self, one: Situation) -> PeakMoment:
        """The worst moment of an action, or of the reduction that follows it."""
        at, to_come = one.chunk, self.waiting(one.during)
        own = self.worst[at](one.passing)
        others = sum(
            [
                gathered_bytes(chunk, one, c) + self.unsharded[c](one.gradients[c])
                for c, chunk in enumerate(self.chunks)
                if c != at
            ]
        )
        saved = self.saved(one.during)
        left = others + self.left(one.during, at, 1)
        moment = PeakMoment(saved + own.activations_bytes, left + own.transient_bytes, own.op, to_come)
        if not one.reduces:
            return moment
        reduced = self.reduction[at](one.gradients[at].after(one.passing.kind))
        transient = others + self.left(one.after, at, 0) + reduced.transient_bytes
        return moment.worse(PeakMoment(self.saved(one.after), transient, reduced.op, to_come))


def shards(assembly: Assembly, stage: int) -> list[Num]:
    """Sharded elements of each chunk of a stage."""
    return [sharded_elements(assembly, [chunk]) for chunk in assembly.stages[stage]]


def gathered_bytes(chunk: ShardedChunk, step: Situation, at: int) -> Num:
    """Bytes of a chunk's gathered parameters while another one runs."""
    layers = chunk.parameters if at in step.gathered_layers else 0.0
    return layers + (chunk.root.unsharded if at in step.gathered_roots else 0.0)
