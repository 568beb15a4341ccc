"""Device memory of every pipeline stage besides its states: what is saved for backward, and what exists only at the peak."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from steptime.base.num import Num, is_column, where
from steptime.job.assembly import Assembly, Chunk
from steptime.job.job import Job
from steptime.memory.chunked_loss import hidden_bytes, in_chunks, saved_by_chunk
from steptime.memory.ledger import PartMemory
from steptime.memory.op_walk import chunk_peaks
from steptime.memory.part_memories import PartMemories
from steptime.schedule import SplitBytes, in_flight, peaks
from steptime.schedule.actions import ActionKind
from steptime.schedule.orders import described
from steptime.software.performance import EAGER_TORCH


class PeakMoment(NamedTuple):
    """The worst moment of one stage: what it holds besides the states [B]."""

    activations_bytes: Num
    transient_bytes: Num
    op: str
    grads_not_yet_allocated_bytes: Num = 0.0
    """Gradients not allocated yet at that moment, where they are not kept from step to step."""
    most_bytes: Num = 0.0
    """Of FSDP's walk: most activations and transients of any moment in the memory of the stream that computes."""
    gathers_bytes: Num = 0.0
    """Of FSDP's walk: most bytes of all-gathers' inputs and outputs, which have memory of their own."""

    @property
    def added_bytes(self) -> Num:
        """All bytes that the moment adds to the full states."""
        return self.activations_bytes + self.transient_bytes - self.grads_not_yet_allocated_bytes

    def worse(self, other: PeakMoment) -> PeakMoment:
        """The moment that adds more, this one where both are equal; element by element for columns."""
        more = other.added_bytes > self.added_bytes
        if not is_column(more):
            return other if more else self
        return PeakMoment(
            where(more, other.activations_bytes, self.activations_bytes),
            where(more, other.transient_bytes, self.transient_bytes),
            "",
            where(more, other.grads_not_yet_allocated_bytes, self.grads_not_yet_allocated_bytes),
        )


def peak_moments(assembly: Assembly) -> list[PeakMoment]:
    """Activations and transients of every stage at its worst moment, over the whole schedule."""
    job = assembly.job
    p = job.parallelism
    if one_backward(job):
        return [first_backward(assembly, assembly.chunks[0])]
    walked, weights, forward, backward, halves = assembly.once(chunk_bytes)
    shape = (job.schedule, p.pp, p.vpp, job.schedule_microbatches)
    worst = peaks(*shape, weights, forward, backward, p.microbatch_group_sz, halves=halves)
    result = []
    for stage, peak in enumerate(worst):
        memory = walked[stage][peak.action.chunk]
        op = moment_op(memory, peak.action.kind)
        early = before_gradients(assembly, stage, weights[stage], backward[stage])
        result.append(early or PeakMoment(peak.saved_bytes, peak.bytes - peak.saved_bytes, op))
    return result


class ChunkBytes(NamedTuple):
    """Bytes of every model chunk, [stage][virtual chunk], for one micro-batch."""

    walked: list[list[PartMemory]]
    weights: list[list[Num]]
    """What it keeps for backward, including what the pipeline holds of its output."""
    forward: list[list[Num]]
    """The peak of its forward beyond that."""
    backward: list[list[Num]]
    """The peak of its backward beyond that."""
    halves: SplitBytes | None
    """The same for a schedule whose backwards run in two halves."""


def chunk_bytes(assembly: Assembly) -> ChunkBytes:
    """Bytes that every chunk holds, by pass."""
    memories = PartMemories(assembly)
    walked = assembly.by_chunk(memories.chunk)
    activations = assembly.job.software.activations
    output = 0.0 if activations.deallocate_pipeline_outputs else assembly.boundary_bytes
    logits = logits_kept(assembly)
    weights = assembly.by_stage(
        lambda stage, chunks: [
            m.saved + (logits if c.head else output) for m, c in zip(walked[stage], chunks, strict=True)
        ]
    )
    forward = assembly.by_stage(lambda stage, _: [m.forward.bytes - m.saved for m in walked[stage]])
    backward = assembly.by_stage(lambda stage, _: [m.backward.bytes - m.saved for m in walked[stage]])
    halves = split_bytes(memories, walked) if described(assembly.job.schedule).split else None
    return ChunkBytes(walked, weights, forward, backward, halves)


def moment_op(memory: PartMemory, kind: ActionKind) -> str:
    """What runs at the worst moment of a kind of action."""
    if kind == "W":
        return "gradients of the weights"
    return f"forward of {memory.forward.op}" if kind == "F" else f"backward of {memory.backward.op}"


def split_bytes(memories: PartMemories, walked: list[list[PartMemory]]) -> SplitBytes:
    """Inputs of `peaks` for a schedule whose backwards are split."""
    split = [[memories.split(chunk) for chunk in chunks] for chunks in memories.assembly.stages]
    both = [list(zip(*pair, strict=True)) for pair in zip(split, walked, strict=True)]
    return SplitBytes(
        [[half.kept for half, _ in chunks] for chunks in both],
        [[half.inputs.bytes - whole.saved for half, whole in chunks] for chunks in both],
        [[half.weights for half, _ in chunks] for chunks in both],
    )


def one_backward(job: Job) -> bool:
    """Whether the step has one micro-batch, in whose backward the gradients are allocated."""
    alone = job.parallelism.pp == 1 and job.single_microbatch and job.zero_level < 2
    return alone and not job.software.states.gradients_persist


def before_gradients(assembly: Assembly, stage: int, weights: list[Num], backward: list[Num]) -> PeakMoment | None:
    """The worst moment of a stage that runs all forwards before its first backward, where gradients are not kept between steps.

    Every micro-batch is held then and no gradient is allocated; from the second backward on all gradients are, with one
    micro-batch less. None for other stages: a forward that follows a backward meets full gradients and as many micro-batches.
    """
    job = assembly.job
    p, chunks = job.parallelism, assembly.stages[stage]
    if p.pp == 1 or len(chunks) > 1 or job.software.states.gradients_persist or described(job.schedule).split:
        return None
    live = in_flight(job.schedule, p.pp, p.vpp, job.schedule_microbatches, p.microbatch_group_sz)
    if live[stage] < job.schedule_microbatches:
        return None
    others = (job.schedule_microbatches - 1) * weights[0]
    first = first_backward(assembly, chunks[0], others, weights[0])
    later = PeakMoment(others, backward[0], "backward of a later micro-batch")
    return first.worse(later) if job.schedule_microbatches > 1 else first


def logits_kept(assembly: Assembly) -> Num:
    """Bytes of the logits where torch's pipeline holds them till their backward, as its loss does not (stage.py, fwd_cache)."""
    job = assembly.job
    if job.parallelism.pp == 1 or job.software.family not in EAGER_TORCH:
        return 0.0
    return result_bytes(assembly)


def result_bytes(assembly: Assembly) -> Num:
    """Bytes that the last stage's forward leaves besides what its parts keep: the logits.

    A loss in chunks has run its own backward: in place of what a chunk keeps there is the gradient of the hidden states.
    """
    head = assembly.head
    return hidden_bytes(head) - saved_by_chunk(head) if in_chunks(assembly.job) else head.sizes.get("head.logits", 0.0)


def first_backward(assembly: Assembly, chunk: Chunk, others: Num = 0.0, own: Num | None = None) -> PeakMoment:
    """The worst moment of the micro-batch in whose backward a chunk's gradients are allocated.

    `others`: bytes that other micro-batches hold meanwhile; `own`: what this one holds when its forward ends, if that is more
    than its parts save.
    """
    moments = first_backward_moments(assembly, chunk, others, own)
    worst = next(moments)
    for moment in moments:
        worst = worst.worse(moment)
    return worst


def first_backward_moments(assembly: Assembly, chunk: Chunk, others: Num, own: Num | None) -> Iterator[PeakMoment]:
    """The moments of `first_backward`: the forward's worst, then the worst of each part's backward."""
    parts = PartMemories(assembly, weight_grads_stay=True).parts(chunk)
    return moments_of_first(assembly.job, parts, assembly.local_params(chunk), others, own)


def moments_of_first(
    job: Job, parts: list[tuple[int, PartMemory]], n_params: Num, others: Num, own: Num | None
) -> Iterator[PeakMoment]:
    """The same for a chunk's `parts` when all gradients are allocated, `n_params` in all."""
    stored = job.software.bytes_of(job.software.states.main_grad_dtype)
    to_come = 1.0 * n_params * stored
    whole = chunk_peaks(parts)
    saved = others + (whole.saved if own is None else own)
    yield PeakMoment(saved, whole.forward.bytes - whole.saved, f"forward of {whole.forward.op}", to_come)
    for count, part in reversed(parts):
        for _ in range(count):
            yield PeakMoment(saved, part.backward.bytes - part.saved, f"backward of {part.backward.op}", to_come)
            saved = saved - part.saved
            to_come = to_come - part.n_params * stored
