"""Device memory of every pipeline stage beside its states: what is saved for backward, and what lives only at the peak."""

from __future__ import annotations

from typing import NamedTuple

from steptime.base.num import Num, is_column, where
from steptime.job.assembly import Assembly, Chunk, Part, Runs, take
from steptime.job.job import Job
from steptime.memory.op_walk import NO_BYTES, Autograd, PartMemory, Peak, chunk_peaks, walk_forward, walk_part
from steptime.schedule import in_flight, peaks
from steptime.software.performance import EAGER_TORCH


class PeakMoment(NamedTuple):
    """The worst moment of one stage: what it holds beside the states [B]."""

    activations_bytes: Num
    transient_bytes: Num
    op: str
    grads_not_yet_allocated_bytes: Num = 0.0
    """Gradients not made yet at that moment, where they do not persist from step to step."""

    @property
    def added_bytes(self) -> Num:
        """All that the moment adds to full states."""
        return self.activations_bytes + self.transient_bytes - self.grads_not_yet_allocated_bytes

    def worse(self, other: PeakMoment) -> PeakMoment:
        """The one that adds more, this one where they are equal; row by row for columns."""
        more = other.added_bytes > self.added_bytes
        if not is_column(more):
            return other if more else self
        return PeakMoment(
            where(more, other.activations_bytes, self.activations_bytes),
            where(more, other.transient_bytes, self.transient_bytes),
            "",
            where(more, other.grads_not_yet_allocated_bytes, self.grads_not_yet_allocated_bytes),
        )


class PartMemories:
    """Memory of each part of a job under its recomputation, walked once."""

    def __init__(self, assembly: Assembly, *, weight_grads_stay: bool = False) -> None:
        """`weight_grads_stay`: gradients of a part's parameters stay beside it until its backward ends."""
        self.assembly = assembly
        job, software = assembly.job, assembly.job.software
        itemsize = software.itemsize if weight_grads_stay else weight_grad_itemsize(job)
        self.autograd = Autograd(
            job.parallelism.tp,
            itemsize,
            weight_grads_stay,
            software.activations.recompute_stops_early,
            software.activations.comm_buffer,
        )
        self.recompute = job.recompute
        self.untied_head = [p for p in assembly.head_params if not (job.model.tie_embeddings and p.vocab)]
        self.embedding = self.walk(assembly.embedding)
        self.head = self.walk(assembly.head)
        self.plain = {part: self.walk(part) for part in assembly.kinds}
        """A layer of each kind, nothing recomputed."""
        modules = self.recompute.modules
        self.selective = {part: self.walk(part, modules) for part in assembly.kinds} if modules else self.plain
        self._chunks: dict[tuple[object, ...], PartMemory] = {}
        self._groups: dict[Runs, PartMemory] = {}

    def walk(self, part: Part, modules: frozenset[str] = frozenset()) -> PartMemory:
        """One part's walk; a tied head's weight gets its gradient with the embedding's."""
        own = self.untied_head if part is self.assembly.head else part.params
        n_params = sum([p.local(part.tp) for p in own])
        return walk_part(part.ops, part.x, part.out, modules, self.autograd)._replace(n_params=n_params)

    def checkpointed(self, layers: Runs) -> PartMemory:
        """A group of layers of which only the first one's input is kept, run again before its backward.

        While a layer's backward runs, the layers before it hold all they save; forward holds one layer at a time.
        """
        if layers not in self._groups:
            x = layers[0][0].x.bytes
            forward = replay = backward = NO_BYTES
            below: Num = 0.0 if input_kept(layers[0][0]) else x
            n_params = sum([count * part.n_params for part, count in layers])
            for part, count in layers:
                forward = forward.worse(walk_forward(part.ops, part.sizes, [part.x.name], part.x.name, part.out))
                plain = self.plain[part]
                below = below + (count - 1) * plain.saved
                replay = replay.worse(Peak(below + plain.forward.bytes + x, plain.forward.op))
                backward = backward.worse(Peak(below + plain.backward.bytes, plain.backward.op))
                below = below + plain.saved
            self._groups[layers] = PartMemory(1.0 * x, forward, replay.worse(backward), n_params)
        return self._groups[layers]

    def layers(self, chunk: Chunk) -> list[tuple[int, Runs, PartMemory]]:
        """The layers of a chunk in depth order: how often a group of layers stands there, the group (of one), its memory."""
        if self.recompute.granularity != "full":
            return [(count, ((part, 1),), self.selective[part]) for part, count in chunk.runs]
        size = self.recompute.n_layers[chunk.depth]
        if self.recompute.method == "block":
            first, rest = take(chunk.runs, size)
            ones = groups_of(first, 1)
            plain = [(count, ((part, 1),), self.plain[part]) for part, count in rest]
            return [*((times, group, self.checkpointed(group)) for times, group in ones), *plain]
        return [(times, group, self.checkpointed(group)) for times, group in groups_of(chunk.runs, size)]

    def chunk(self, chunk: Chunk) -> PartMemory:
        """One chunk of one micro-batch; walked once for all chunks that hold the same parts."""
        sizes = self.recompute.n_layers
        key = (chunk.runs, chunk.embedding, chunk.head, sizes[chunk.depth] if sizes else 0)
        if key not in self._chunks:
            self._chunks[key] = chunk_peaks(self.parts(chunk))
        return self._chunks[key]

    def parts(self, chunk: Chunk) -> list[tuple[int, PartMemory]]:
        """The parts of a chunk in depth order, alike neighbors together.

        A tied head's weight gradient waits in autograd for the embedding's, beside the backward of every layer between them; then
        both lie beside their sum.
        """
        parts = [(count, memory) for count, _, memory in self.layers(chunk)]
        embedding = self.embedding
        if chunk.embedding and chunk.head and self.assembly.job.model.tie_embeddings:
            parts = [(count, with_backward_extra(part, self.tied_gradient)) for count, part in parts]
            embedding = with_backward_extra(embedding, 2.0 * self.tied_gradient)
        if chunk.embedding:
            parts = [(1, embedding), *parts]
        return [*parts, (1, self.head)] if chunk.head else parts

    @property
    def tied_gradient(self) -> Num:
        """Bytes of the tied weight's gradient before it is accumulated."""
        table = next(p for p in self.assembly.embedding.params if p.vocab)
        return self.autograd.weight_grad_itemsize * table.local(self.autograd.tp)


def groups_of(runs: Runs, size: int) -> list[tuple[int, Runs]]:
    """Layers in groups of `size` in depth order, the last one perhaps smaller; alike neighboring groups with their count."""
    found: list[tuple[int, Runs]] = []
    while runs:
        part, count = runs[0]
        if count >= size:  # whole groups of one kind at once
            times = count // size
            group: Runs = ((part, size),)
            runs = take(runs, times * size)[1]
        else:
            times, (group, runs) = 1, take(runs, size)
        if found and found[-1][1] == group:
            times += found.pop()[0]
        found.append((times, group))
    return found


def input_kept(part: Part) -> bool:
    """Whether a part keeps its own input (a composite norm keeps an fp32 copy instead)."""
    return any(part.x.name in op.saves for op in part.ops)


def weight_grad_itemsize(job: Job) -> float:
    """Bytes per element of a weight gradient beside the one it is added to; 0 where it is that one.

    Megatron without fusion frees it in the parameter's hook; torch's first micro-batch keeps it as the gradient.
    """
    software = job.software
    if software.states.grad_accumulation_fusion:
        return software.itemsize if software.states.dummy_wgrads == "freed" else 0.0
    own = (
        software.bytes_of(software.states.main_grad_dtype) == software.itemsize
        and not software.states.gradients_persist
    )
    return 0.0 if own and job.single_microbatch else software.itemsize


def with_backward_extra(part: PartMemory, bytes_: Num) -> PartMemory:
    """A part whose backward runs beside `bytes_` of others."""
    return part._replace(backward=Peak(part.backward.bytes + bytes_, part.backward.op))


def peak_moments(assembly: Assembly) -> list[PeakMoment]:
    """Activations and transients of every stage at its worst moment, over the whole schedule."""
    job = assembly.job
    p, software = job.parallelism, job.software
    if p.pp == 1 and job.single_microbatch and job.zero_level < 2 and not software.states.gradients_persist:
        return [first_backward(assembly, assembly.chunks[0])]
    memories = PartMemories(assembly)
    walked = [[memories.chunk(c) for c in chunks] for chunks in assembly.stages]
    output = 0.0 if software.activations.deallocate_pipeline_outputs else assembly.boundary_bytes
    logits = logits_kept(assembly)
    weights = [
        [m.saved + (logits if c.head else output) for m, c in zip(memory, chunks, strict=True)]
        for memory, chunks in zip(walked, assembly.stages, strict=True)
    ]
    forward = [[m.forward.bytes - m.saved for m in memory] for memory in walked]
    backward = [[m.backward.bytes - m.saved for m in memory] for memory in walked]
    worst = peaks(job.schedule, p.pp, p.vpp, job.schedule_microbatches, weights, forward, backward)
    result = []
    for stage, peak in enumerate(worst):
        memory = walked[stage][peak.action.chunk]
        op = f"forward of {memory.forward.op}" if peak.action.kind == "F" else f"backward of {memory.backward.op}"
        moment = PeakMoment(peak.saved_bytes, peak.bytes - peak.saved_bytes, op)
        result.append(before_gradients(assembly, stage, weights[stage], backward[stage]) or moment)
    return result


def before_gradients(assembly: Assembly, stage: int, weights: list[Num], backward: list[Num]) -> PeakMoment | None:
    """The worst moment of a stage whose forwards all precede its first backward, where gradients do not persist.

    Every micro-batch is held then and no gradient is there; from the second backward on all are, beside one micro-batch less.
    None for other stages: a forward that follows a backward meets full gradients and as many micro-batches.
    """
    job = assembly.job
    p, chunks = job.parallelism, assembly.stages[stage]
    if p.pp == 1 or len(chunks) > 1 or job.software.states.gradients_persist:
        return None
    if in_flight(job.schedule, p.pp, p.vpp, job.schedule_microbatches)[stage] < job.schedule_microbatches:
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
    return assembly.head.sizes["head.logits"]


def first_backward(assembly: Assembly, chunk: Chunk, others: Num = 0.0, own: Num | None = None) -> PeakMoment:
    """The worst moment of the micro-batch in whose backward a chunk's gradients come into being.

    `others`: bytes that other micro-batches hold meanwhile; `own`: what this one holds when its forward ends, if that is more
    than its parts save.
    """
    memories = PartMemories(assembly, weight_grads_stay=True)
    parts = memories.parts(chunk)
    software = assembly.job.software
    stored = software.bytes_of(software.states.main_grad_dtype)
    to_come = 1.0 * assembly.local_params(chunk) * stored
    whole = chunk_peaks(parts)
    saved = others + (whole.saved if own is None else own)
    worst = PeakMoment(saved, whole.forward.bytes - whole.saved, f"forward of {whole.forward.op}", to_come)
    for count, part in reversed(parts):
        for _ in range(count):
            moment = PeakMoment(saved, part.backward.bytes - part.saved, f"backward of {part.backward.op}", to_come)
            worst = worst.worse(moment)
            saved = saved - part.saved
            to_come = to_come - part.n_params * stored
    return worst
