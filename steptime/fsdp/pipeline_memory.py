"""FSDP2 under a pipeline: what a stage holds in each of its actions.

Parameters stay gathered from a chunk's first forward to its reduction, or are freed by each forward (reshard_after_forward).
Gradients of all micro-batches add up unsharded in the dtype of the reduction, and are reduced once, group by group, after the
last (torch 2.13: distributed/pipelining/stage.py, perform_reduce_grad; distributed/fsdp/_fully_shard/_fsdp_param.py,
to_accumulated_grad_if_needed).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from steptime.base.num import Num
from steptime.fsdp.groups import options, sharded_elements
from steptime.fsdp.memory_walk import peak_moment
from steptime.fsdp.pipeline_chunks import Gradients, Passing, ShardedChunk, chunk_bytes
from steptime.job.assembly import Assembly
from steptime.job.job import Job
from steptime.memory.part_memories import PartMemories
from steptime.memory.stages import PeakMoment
from steptime.memory.states import state_bytes
from steptime.schedule import Action, order
from steptime.schedule.orders import described, shortened
from steptime.schedule.sharded import HOOKED, ShardedStep, sharded_steps

REPEATS = 3
"""Repeats of a long step that are walked: in the first one gradients may still be allocated."""


class ActionHeld(NamedTuple):
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
    return job.parallelism.vpp > 1 or job.schedule not in HOOKED


def stage_steps(assembly: Assembly, stage: int, actions: Sequence[Action]) -> list[ShardedStep]:
    """A stage's actions with their gathers and reductions."""
    first = next((i for i, chunk in enumerate(assembly.stages[stage]) if chunk.embedding), None)
    split = first if described(assembly.job.schedule).split else None
    reshard = options(assembly).reshard_after_forward
    return sharded_steps(tuple(actions), ahead=fetches_ahead(assembly.job), reshard=reshard, first=split)


def peak_moments(assembly: Assembly) -> list[PeakMoment]:
    """Activations and transients of every stage at its worst moment, FSDP's buffers among the transients."""
    return [peak_moment(assembly)] if assembly.job.parallelism.pp == 1 else stage_peaks(assembly)


def stage_peaks(assembly: Assembly) -> list[PeakMoment]:
    """The worst moment of every stage. A step with a repeating middle holds no more than one with a few repeats."""
    job, p = assembly.job, assembly.job.parallelism
    short, period, _ = shortened(job.schedule, p.pp, p.vpp, job.schedule_microbatches, p.microbatch_group_sz, REPEATS)
    orders = order(job.schedule, p.pp, p.vpp, short, period)
    found = []
    for stage, chunks in enumerate(stage_chunks(assembly)):
        held = [action.moment for action in stage_actions(assembly, stage, chunks, orders[stage])]
        worst = held[0]
        for moment in held:
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
) -> Iterator[ActionHeld]:
    """Each action of a stage in order."""
    count, kept = range(len(chunks)), [chunk.saved for chunk in chunks]
    whole, late = [0] * len(chunks), [0] * len(chunks)
    gradients = [Gradients()] * len(chunks)
    to_come = [state_bytes(assembly.job).gradients * n for n in shards(assembly, stage)]
    worst, unsharded = ([cache(of) for of in same] for same in zip(*((c.worst, c.held) for c in chunks), strict=True))

    def saved() -> Num:
        return sum([whole[c] * kept[c] + late[c] * chunks[c].half[0] for c in count])

    for step in stage_steps(assembly, stage, actions):
        kind, _, at = step.action
        whole[at] -= kind in "BI"
        late[at] -= kind == "W"
        own = worst[at](Passing(kind, at in step.fetched, at in step.layers_held, step.roots, gradients[at]))
        others = sum([beside(chunks[c], step, c) + unsharded[c](gradients[c]) for c in count if c != at])
        moment = PeakMoment(saved() + own.activations_bytes, others + own.transient_bytes, own.op, sum(to_come))
        whole[at] += kind == "F"
        late[at] += kind == "I"
        gradients[at] = gradients[at].after(kind)
        if step.reduces:
            reduced = chunks[at].reduction(gradients[at])
            moment = moment.worse(PeakMoment(saved(), others + reduced.transient_bytes, reduced.op, sum(to_come)))
            to_come[at], gradients[at] = 0.0, Gradients()
        yield ActionHeld(step.action, moment, saved(), sum(to_come))


def shards(assembly: Assembly, stage: int) -> list[Num]:
    """Sharded elements of each chunk of a stage."""
    return [sharded_elements(assembly, [chunk]) for chunk in assembly.stages[stage]]


def beside(chunk: ShardedChunk, step: ShardedStep, at: int) -> Num:
    """Bytes of a chunk's gathered parameters while another one runs."""
    layers = chunk.parameters if at in step.layers_held else 0.0
    return layers + (chunk.root.unsharded if at in step.roots_held else 0.0)
