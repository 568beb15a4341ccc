"""Seconds and bytes of the parts of a job, or of candidates with the same ops, each priced and walked once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from steptime.base.num import Num, is_column
from steptime.cost import compute
from steptime.cost.part_seconds import Context, part_time, segment_replay
from steptime.job.assembly import Assembly
from steptime.job.candidates import Candidates
from steptime.job.job import Job
from steptime.job.parts import Part
from steptime.memory.kept_buffers import ByExperts, comm_buffer_bytes, kept_by_experts
from steptime.memory.ledger import PartMemory
from steptime.memory.part_memories import PartMemories, passing
from steptime.memory.split_backward import SplitMemory
from steptime.memory.stages import result_bytes
from steptime.model.offload import large_tensors
from steptime.model.segments import Segment, find_segments
from steptime.timing.part_times import away_bytes, layer_gap_s, part_gap_s, pricing, whole_replay, woven_share

Modules = frozenset[str | float]
Segments = tuple[Segment, ...]
NO_MODULES: Modules = frozenset()


class PartFigures(NamedTuple):
    """One part over all rows: seconds and bytes of one micro-batch."""

    forward_s: Num
    backward_s: Num
    weight_s: Num
    """Part of backward that makes the gradients of weights."""
    copied_s: tuple[tuple[Num, Num], ...]
    """Forward and backward with the copies of what is offloaded to the host, in the order of `memory`, then run again whole."""
    whole_replay_s: Num
    """Its forward run again, up to the last tensor that backward needs if the framework stops there."""
    replay_s: tuple[Num, ...]
    """What recomputation of each set of modules runs again."""
    memory: tuple[tuple[Num, ...], ...]
    """Saved, forward's and backward's peak, what is back early from the host: nothing recomputed, then each set of modules."""
    first: tuple[tuple[Num, ...], ...]
    """The same where gradients come into being, if they do not stay from step to step."""
    reentrant: tuple[Num, ...]
    """Backward's peak of a layer in a reentrant checkpoint, if checkpoints are: in the one case, then in the other."""
    halves: tuple[Num, ...]
    """What the first half of a split backward leaves, its peak, and the largest gradient of a weight, if a schedule splits it."""
    passing: Num
    """Most bytes of a forward of which only the input stays."""
    x: Num
    """Elements of its input."""
    kept: ByExperts
    """What its modules with experts refer to."""
    n_params: Num


class Whole(NamedTuple):
    """Figures that belong to no part."""

    boundary_bytes: Num
    buffer_bytes: Num
    """The communication buffer that all parts share."""
    logits_bytes: Num
    """What a micro-batch's forward leaves on the last stage, such as the logits (`memory.stages.result_bytes`)."""
    waiting_gradient: Num
    """The embedding's gradient, where it waits for another use of its weight."""


class Fragment(NamedTuple):
    """Some rows whose parts have the same ops."""

    parts: tuple[PartFigures, ...]
    """The embedding, the head, then every kind of layer."""
    whole: Whole


def part_figures(job: Job, module_sets: Sequence[Modules], gbs: int, *, split: bool) -> tuple[Assembly, Fragment]:
    """The parts of a job, or of candidates with the same ops, priced and walked.

    `gbs`: sequences of the layouts' steps; `split`: some backwards run in two halves.
    """
    assembly, context = Assembly(job), context_of(job, gbs)
    gap_s, reentrant = layer_gap_s(job, context), job.software.activations.reentrant
    memories, compiled = PartMemories(assembly), job.software.kernels.compile != "none"
    comes = None if job.software.states.gradients_persist else PartMemories(assembly, weight_grads_stay=True)
    found = []
    for part in (assembly.embedding, assembly.head, *assembly.kinds):
        layer, gaps_s = part in assembly.kinds, part_gap_s(gap_s, assembly, part)
        times = part_time(part.ops, part.sizes, context, [], gaps_s)
        passes = [compute.forward(op, context.rates, part.sizes) for op in part.ops]
        sets = module_sets if layer or (part is assembly.head and job.model.mtp) else ()
        segments = [tuple(find_segments(part.ops, s, compiled=compiled)) for s in sets]
        alike = dict(zip(segments, sets, strict=True))  # modules that this part lacks change nothing
        replays = {one: segment_replay(part.ops, passes, context, list(one), gaps_s).seconds for one in alike}
        bytes_ = part_bytes(memories, part, segments, alike)
        found.append(
            PartFigures(
                times.forward.seconds,
                times.backward.seconds,
                times.backward.weight_s,
                copied_s(assembly, part, context, gaps_s, segments),
                whole_replay(part, times, context).seconds if layer else 0.0,
                tuple(replays[one] for one in segments),
                tuple(map(ends, bytes_)),
                tuple(map(ends, part_bytes(comes, part, segments, alike))) if comes else (),
                tuple(of.reentrant(part).bytes for of in (memories, comes) if of) if layer and reentrant else (),
                half_bytes(memories.split_part(part)) if split else (),
                passing(part).bytes,
                part.x.elements,
                kept_by_experts(assembly, part),
                bytes_[0].n_params,
            )
        )
    whole = Whole(
        assembly.boundary_bytes,
        comm_buffer_bytes(assembly),
        result_bytes(assembly),
        memories.waiting_gradient,
    )
    return assembly, Fragment(tuple(found), whole)


def context_of(job: Job, gbs: int) -> Context:
    """What prices the parts of layouts with so many sequences per step."""
    return replace(pricing(job).context, woven=woven_share(job, gbs))


def work_s(job: Job, gbs: int) -> Num:
    """Seconds of one micro-batch through all parts with nothing recomputed; arguments as of `part_figures`."""
    assembly, context = Assembly(job), context_of(job, gbs)
    gap_s = layer_gap_s(job, context)
    total: Num = 0.0
    counts = {assembly.embedding: 1, assembly.head: 1}
    for part, count in assembly.runs:
        counts[part] = counts.get(part, 0) + count
    for part, count in counts.items():
        times = part_time(part.ops, part.sizes, context, [], part_gap_s(gap_s, assembly, part))
        total = total + count * (times.forward.seconds + times.backward.seconds)
    return total


def copied_s(
    assembly: Assembly, part: Part, context: Context, gaps_s: Num, segments: Sequence[Segments]
) -> tuple[tuple[Num, Num], ...]:
    """`PartFigures.copied_s` of a part: with nothing recomputed, with each of some recomputations, with its input alone kept."""
    if not assembly.offload_modules(part) and not assembly.job.performance.activation_offload:
        return ()

    def seconds(one: Segments, *, whole: bool) -> tuple[Num, Num]:
        away = away_bytes(assembly, part, list(one), whole=whole)
        times = part_time(part.ops, part.sizes, context, [], gaps_s, away)
        return times.forward.seconds, times.backward.seconds

    found = {one: seconds(one, whole=False) for one in dict.fromkeys([(), *segments])}
    return (*(found[one] for one in ((), *segments)), seconds((), whole=True))


def half_bytes(of: SplitMemory) -> tuple[Num, Num, Num]:
    """What the first half of a split backward leaves, its peak, and the largest gradient of a weight."""
    return of.kept, of.inputs.bytes, of.weights


def ends(of: PartMemory) -> tuple[Num, Num, Num, Num]:
    """What it saves, the peaks of its passes, and what is back early from the host."""
    return of.saved, of.forward.bytes, of.backward.bytes, of.ahead


def part_bytes(
    memories: PartMemories, part: Part, segments: Sequence[Segments], alike: Mapping[Segments, Modules]
) -> list[PartMemory]:
    """A part with nothing recomputed, then under each of some recomputations; those that repeat the same are walked once."""
    plain = memories.walk(part)
    walks = {one: memories.walk(part, modules) if one else plain for one, modules in alike.items()}
    return [plain, *(walks[one] for one in segments)]


def alike_copies(group: Candidates) -> Iterator[tuple[Any, Candidates]]:
    """(row indices, candidates) of every group of those with the same ops that send the same tensors to the host."""
    import numpy as np

    if not group.job.performance.offload_modules:
        yield slice(None), group
        return
    assembly = Assembly(group.as_job)
    parts = (assembly.head, *assembly.kinds)
    found = [flag for part in parts for flag in large_tensors(part.ops, part.x, assembly.offload_modules(part))]
    columns = [flag for flag in found if is_column(flag)]
    if not columns:
        yield slice(None), group
        return
    _, kinds = np.unique(np.stack(np.broadcast_arrays(*columns), axis=-1), axis=0, return_inverse=True)
    for kind in range(int(kinds.max()) + 1):
        which = np.flatnonzero(kinds.reshape(-1) == kind)
        yield which, group.rows(which)
