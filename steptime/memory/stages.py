"""Device memory of every pipeline stage: states, what is saved for backward, what lives beside it at the peak."""

from __future__ import annotations

from typing import NamedTuple

from steptime.job.assembly import Assembly, Chunk, Part, local_elements
from steptime.memory.op_walk import Autograd, PartMemory, Peak, chunk_peaks, walk_forward, walk_part
from steptime.schedule import in_flight, peaks
from steptime.software.performance import EAGER_TORCH
from steptime.software.recomputation import RecomputePlan


class Held(NamedTuple):
    """Beside the states, at the worst moment of one stage [B]."""

    activations_bytes: float
    transient_bytes: float
    peak_op: str
    due_bytes: float = 0.0
    """Gradients not made yet at that moment, where they do not persist from step to step."""

    @property
    def beside_bytes(self) -> float:
        """All that the moment adds to full states."""
        return self.activations_bytes + self.transient_bytes - self.due_bytes


class PartMemories:
    """Memory of each part of a job under its recomputation, walked once."""

    def __init__(self, assembly: Assembly, *, weight_grads_stay: bool = False) -> None:
        """`weight_grads_stay`: gradients of a part's parameters stay beside it until its backward ends."""
        self.assembly = assembly
        self.known: dict[tuple[int, bool, bool, int], PartMemory] = {}
        job, software = assembly.job, assembly.job.software
        itemsize = software.itemsize if weight_grads_stay else weight_grad_itemsize(assembly)
        early = software.activations.recompute_stops_early
        self.autograd = Autograd(job.parallelism.tp, itemsize, weight_grads_stay, early, buffered(assembly))
        self.plan: RecomputePlan = job.recompute
        self.plain = self.walk(assembly.block)
        self.embedding = self.walk(assembly.embedding)
        self.head = self.walk(assembly.head)
        self.selective = self.walk(assembly.block, self.plan.modules) if self.plan.modules else self.plain

    def walk(self, part: Part, modules: frozenset[str] = frozenset()) -> PartMemory:
        """One part's walk."""
        inside = self.autograd._replace(elsewhere=self.autograd.elsewhere & part.sizes.keys())
        return walk_part(part.ops, part.x, part.out, modules, inside)

    def checkpointed(self, layers: int) -> PartMemory:
        """A group of layers of which only the first one's input is kept, run again before its backward.

        While the last layer's backward runs, the layers before it hold all they save; forward holds one layer at a time.
        """
        block = self.assembly.block
        x = float(block.x.bytes)
        through = walk_forward(block.ops, block.sizes, {block.x.name}, block.x.name, block.out)
        apart = 0.0 if input_kept(block) else x
        below = (layers - 1) * self.plain.saved + apart
        replay = Peak(below + self.plain.forward.bytes + x, self.plain.forward.op)
        backward = Peak(below + self.plain.backward.bytes, self.plain.backward.op)
        return PartMemory(x, through, max(replay, backward))

    def blocks(self, chunk: Chunk) -> list[tuple[int, PartMemory]]:
        """The blocks of a chunk, alike ones together, in depth order."""
        if self.plan.granularity != "full":
            return [(chunk.layers, self.selective)]
        count = self.plan.n_layers[chunk.depth]
        if self.plan.method == "block":
            full = min(count, chunk.layers)
            return [(full, self.checkpointed(1)), (chunk.layers - full, self.plain)]
        groups, rest = divmod(chunk.layers, count) if count else (0, chunk.layers)
        return [(groups, self.checkpointed(count)), (1 if rest else 0, self.checkpointed(max(rest, 1)))]

    def alike(self, chunk: Chunk) -> PartMemory:
        """`chunk`, once for all chunks that hold the same parts."""
        layers = self.plan.n_layers
        key = (chunk.layers, chunk.embedding, chunk.head, layers[chunk.depth] if layers else 0)
        if key not in self.known:
            self.known[key] = self.chunk(chunk)
        return self.known[key]

    def chunk(self, chunk: Chunk) -> PartMemory:
        """One chunk of one micro-batch."""
        return chunk_peaks(self.parts(chunk))

    def parts(self, chunk: Chunk) -> list[tuple[int, PartMemory]]:
        """The parts of a chunk in depth order, alike neighbours together.

        A tied head's weight gradient waits in autograd for the embedding's, beside the backward of every block between them; then
        both lie beside their sum.
        """
        parts = self.blocks(chunk)
        embedding = self.embedding
        if chunk.embedding and chunk.head and self.assembly.job.model.tie_embeddings:
            parts = [(count, waiting(part, self.tied_gradient)) for count, part in parts]
            embedding = waiting(embedding, 2.0 * self.tied_gradient)
        if chunk.embedding:
            parts = [(1, embedding), *parts]
        return [*parts, (1, self.head)] if chunk.head else parts

    @property
    def head_gradient(self) -> float:
        """Bytes of the gradients that the head's backward leaves; a tied weight's waits for the embedding."""
        own = [
            p
            for p in self.assembly.head_params
            if p.name != "head.weight" or not self.assembly.job.model.tie_embeddings
        ]
        return self.autograd.weight_grad_itemsize * sum(local_elements(p, self.assembly.block.tp) for p in own)

    @property
    def tied_gradient(self) -> float:
        """Bytes of the tied weight's gradient before it is accumulated."""
        table = next(p for p in self.assembly.embedding.params if p.name == "embedding.weight")
        return self.autograd.weight_grad_itemsize * local_elements(table, self.assembly.block.tp)


def input_kept(part: Part) -> bool:
    """Whether a part keeps its own input (a composite norm keeps an fp32 copy instead)."""
    return any(part.x.name in op.saves for op in part.ops)


def weight_grad_itemsize(assembly: Assembly) -> float:
    """Bytes per element of a weight gradient beside the one it is added to; 0 where it is that one.

    Megatron without fusion frees it in the parameter's hook; torch's first micro-batch keeps it as the gradient.
    """
    job = assembly.job
    software, states = job.software, job.software.states
    if states.grad_accumulation_fusion:
        return software.itemsize if states.dummy_wgrads == "freed" else 0.0
    own = software.bytes_of(states.main_grad_dtype) == software.itemsize and not states.gradients_persist
    return 0.0 if own and job.microbatches == 1 else software.itemsize


def waiting(part: PartMemory, bytes_: float) -> PartMemory:
    """A part whose backward runs beside `bytes_` of others."""
    return part._replace(backward=Peak(part.backward.bytes + bytes_, part.backward.op))


def held(assembly: Assembly) -> list[Held]:
    """Activations and transients of every stage at its worst moment, over the whole schedule."""
    job = assembly.job
    freed = not job.software.states.gradients_persist
    if job.parallelism.pp == 1 and job.microbatches == 1 and job.zero_level < 2 and freed:
        return [held_first(assembly, assembly.chunks[0])]
    memories = PartMemories(assembly)
    walked = [[memories.alike(c) for c in chunks] for chunks in assembly.stages]
    kept_output = 0.0 if job.software.activations.deallocate_pipeline_outputs else assembly.boundary_bytes
    kept_logits = logits_kept(assembly)
    weights = [
        [m.saved + (kept_logits if c.head else kept_output) for m, c in zip(memory, chunks, strict=True)]
        for memory, chunks in zip(walked, assembly.stages, strict=True)
    ]
    fwd = [[m.forward.bytes - m.saved for m in memory] for memory in walked]
    bwd = [[m.backward.bytes - m.saved for m in memory] for memory in walked]
    p = job.parallelism
    worst = peaks(job.schedule, p.pp, p.vpp, job.microbatches, weights, fwd, bwd)
    buffer = comm_buffer_bytes(assembly)
    result = []
    for stage, peak in enumerate(worst):
        memory = walked[stage][peak.action.chunk]
        op = f"forward of {memory.forward.op}" if peak.action.kind == "F" else f"backward of {memory.backward.op}"
        apart = buffer + kept_dummies(assembly, head=any(c.head for c in assembly.stages[stage]))
        worst_held = Held(peak.saved_bytes, peak.bytes - peak.saved_bytes + apart, op)
        result.append(held_before_gradients(assembly, stage, weights[stage], bwd[stage]) or worst_held)
    return result


def held_before_gradients(assembly: Assembly, stage: int, weights: list[float], bwd: list[float]) -> Held | None:
    """The worst moment of a stage whose forwards all precede its first backward, where gradients do not persist.

    Every micro-batch is held then and no gradient is there; from the second backward on all are, beside one micro-batch less.
    None for other stages: a forward that follows a backward meets full gradients and as many micro-batches.
    """
    job = assembly.job
    p, chunks = job.parallelism, assembly.stages[stage]
    if p.pp == 1 or len(chunks) > 1 or job.software.states.gradients_persist:
        return None
    if in_flight(job.schedule, p.pp, p.vpp, job.microbatches)[stage] < job.microbatches:
        return None
    others = (job.microbatches - 1) * weights[0]
    first = held_first(assembly, chunks[0], others, weights[0])
    later = Held(others, bwd[0], "backward of a later micro-batch")
    return max(first, later, key=lambda held: held.beside_bytes) if job.microbatches > 1 else first


def logits_kept(assembly: Assembly) -> float:
    """Bytes of the logits where torch's pipeline holds them till their backward and the loss does not (stage.py, fwd_cache)."""
    job, name = assembly.job, "head.logits"
    if job.parallelism.pp == 1 or job.software.family not in EAGER_TORCH:
        return 0.0
    saved = any(name in op.saves for op in assembly.head.ops)
    return 0.0 if saved else assembly.head.sizes[name]


def held_first(assembly: Assembly, chunk: Chunk, others: float = 0.0, own: float | None = None) -> Held:
    """The worst moment of the micro-batch in whose backward a chunk's gradients come into being.

    `others`: bytes that other micro-batches hold meanwhile; `own`: what this one holds when its forward ends, if that is more
    than its parts save.
    """
    memories = PartMemories(assembly, weight_grads_stay=True)
    parts = memories.parts(chunk)
    software = assembly.job.software
    stored = software.bytes_of(software.states.main_grad_dtype)
    due = float(assembly.local_params(chunk)) * stored
    whole = chunk_peaks(parts)
    saved = others + (whole.saved if own is None else own)
    worst = Held(saved, whole.forward.bytes - whole.saved, f"forward of {whole.forward.op}", due)
    per_block = assembly.block.n_params * stored
    head = memories.head_gradient * stored / software.itemsize
    for at in range(len(parts) - 1, -1, -1):
        count, part = parts[at]
        for _ in range(count):
            moment = Held(saved, part.backward.bytes - part.saved, f"backward of {part.backward.op}", due)
            worst = max(worst, moment, key=lambda held: held.beside_bytes)
            saved -= part.saved
            ends = at == len(parts) - 1 and chunk.head
            due -= head if ends else per_block
    return worst


def buffered(assembly: Assembly) -> frozenset[str]:
    """Tensors that Megatron keeps in its grow-only buffer instead of allocating them."""
    if not assembly.job.software.activations.comm_buffer:
        return frozenset()
    return frozenset(
        name
        for part in (assembly.block, assembly.head)
        for name in part.sizes
        if name.endswith(".gathered") or name == "attn.core.scores.out"
    )


def kept_dummies(assembly: Assembly, *, head: bool) -> float:
    """One dummy weight gradient per shape of a stage's projections, made at the first backward and kept [B]."""
    if assembly.job.software.states.dummy_wgrads != "kept" or not assembly.job.software.states.grad_accumulation_fusion:
        return 0.0
    tp, itemsize = assembly.block.tp, assembly.job.software.itemsize
    weights = {
        p.shape: p for p in (*assembly.block.params, *(assembly.head.params if head else ())) if len(p.shape) == 2
    }
    return itemsize * sum(local_elements(p, tp) for p in weights.values())


def comm_buffer_bytes(assembly: Assembly) -> float:
    """Megatron's grow-only buffer: the largest sequence-parallel gather, or unfused attention's scores [B].

    megatron/core/utils.py, GlobalMemoryBuffer; megatron/core/transformer/dot_product_attention.py, matmul_input_buffer.
    """
    if not assembly.job.software.activations.comm_buffer:
        return 0.0
    sizes = assembly.block.sizes | assembly.head.sizes
    return max((sizes[name] for name in buffered(assembly)), default=0.0)
