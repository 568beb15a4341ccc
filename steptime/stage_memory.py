"""Device memory of every pipeline stage: states, what is saved for backward, what lives beside it at the peak."""

from __future__ import annotations

from typing import NamedTuple

from steptime.assembly import Assembly, Chunk, Part
from steptime.memory import PartMemory, Peak, chunk_peaks, walk_forward, walk_part
from steptime.performance import ITEMSIZE, RecomputePlan
from steptime.schedule import peaks


class Held(NamedTuple):
    """Beside the states, at the worst moment of one stage [B]."""

    activations_bytes: float
    transient_bytes: float
    peak_op: str


class PartMemories:
    """Memory of each part of a job under its recomputation, walked once."""

    def __init__(self, assembly: Assembly, *, weight_grads_stay: bool = False) -> None:
        """`weight_grads_stay`: gradients of a part's parameters stay beside it until its backward ends (FSDP)."""
        self.assembly = assembly
        self.stay = weight_grads_stay
        self.known: dict[tuple[int, bool, bool, int], PartMemory] = {}
        self.plan: RecomputePlan = assembly.job.recompute
        self.plain = self.walk(assembly.block)
        self.embedding = self.walk(assembly.embedding)
        self.head = self.walk(assembly.head)
        self.selective = self.walk(assembly.block, self.plan.modules) if self.plan.modules else self.plain

    def walk(self, part: Part, modules: frozenset[str] = frozenset()) -> PartMemory:
        """One part's walk."""
        job = self.assembly.job
        return walk_part(
            part.ops,
            part.x,
            part.out,
            modules,
            weight_grad_itemsize=weight_grad_itemsize(self.assembly) if not self.stay else job.software.itemsize,
            tp=job.parallelism.tp,
            weight_grads_stay=self.stay,
        )

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
        parts = self.blocks(chunk)
        if chunk.embedding:
            parts = [(1, self.embedding), *parts]
        return chunk_peaks([*parts, (1, self.head)] if chunk.head else parts)


def input_kept(part: Part) -> bool:
    """Whether a part keeps its own input (a composite norm keeps an fp32 copy instead)."""
    return any(part.x.name in op.saves for op in part.ops)


def weight_grad_itemsize(assembly: Assembly) -> float:
    """Bytes per element of a weight gradient beside the one it is added to; 0 where it is that one.

    Megatron without fusion frees it in the parameter's hook; torch's first micro-batch keeps it as the gradient.
    """
    job = assembly.job
    software = job.software
    if software.grad_accumulation_fusion:
        return 0.0
    own = software.bytes_of(software.main_grad_dtype) == software.itemsize and not software.gradients_persist
    return 0.0 if own and job.microbatches == 1 else ITEMSIZE[software.precision]


def held(assembly: Assembly) -> list[Held]:
    """Activations and transients of every stage at its worst moment, over the whole schedule."""
    job = assembly.job
    memories = PartMemories(assembly)
    walked = [[memories.alike(c) for c in chunks] for chunks in assembly.stages]
    kept_output = 0.0 if job.software.deallocate_pipeline_outputs else assembly.boundary_bytes
    weights = [
        [m.saved + (0.0 if c.head else kept_output) for m, c in zip(memory, chunks, strict=True)]
        for memory, chunks in zip(walked, assembly.stages, strict=True)
    ]
    fwd = [[m.forward.bytes - m.saved for m in memory] for memory in walked]
    bwd = [[m.backward.bytes - m.saved for m in memory] for memory in walked]
    p = job.parallelism
    worst = peaks(job.schedule, p.pp, p.vpp, job.microbatches, weights, fwd, bwd)
    result = []
    for stage, peak in enumerate(worst):
        memory = walked[stage][peak.action.chunk]
        op = memory.forward.op if peak.action.kind == "F" else memory.backward.op
        where = "forward" if peak.action.kind == "F" else "backward"
        buffer = comm_buffer_bytes(assembly)
        result.append(Held(peak.saved_bytes, peak.bytes - peak.saved_bytes + buffer, f"{where} of {op}"))
    return result


def comm_buffer_bytes(assembly: Assembly) -> float:
    """Megatron's grow-only buffer: the largest sequence-parallel gather, or unfused attention's scores [B].

    megatron/core/utils.py, GlobalMemoryBuffer; megatron/core/transformer/dot_product_attention.py, matmul_input_buffer.
    """
    if not assembly.job.software.comm_buffer:
        return 0.0
    sizes = assembly.block.sizes
    gathered = [size for name, size in sizes.items() if name.endswith(".gathered")]
    return max([sizes.get("attn.core.scores.out", 0.0), *gathered])
