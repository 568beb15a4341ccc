"""Allocated by a stage's first micro-batch and kept: Megatron's grow-only buffer, dummy weight gradients, routing maps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from steptime.base.num import Num, maximum, where
from steptime.job.assembly import Assembly
from steptime.job.parts import Part
from steptime.model.ops import Gemm, Move


def comm_buffer_bytes(assembly: Assembly) -> Num:
    """Megatron's grow-only buffer: the largest sequence-parallel gather, or unfused attention's scores [B].

    megatron/core/utils.py, GlobalMemoryBuffer; megatron/core/transformer/dot_product_attention.py, matmul_input_buffer.
    """
    largest: Num = 0.0
    for part in (*assembly.kinds, assembly.head) if assembly.job.software.activations.comm_buffer else ():
        for bytes_ in part.pooled:
            largest = maximum(largest, bytes_)
    return largest


def dummy_wgrad_bytes(assembly: Assembly, stage: int) -> Num:
    """One dummy weight gradient per shape of a stage's projections, made at the first backward and kept [B]."""
    software, chunks = assembly.job.software, assembly.stages[stage]
    if software.states.dummy_wgrads != "kept" or not software.states.grad_accumulation_fusion:
        return 0.0
    parts = [part for chunk in chunks for part, _ in chunk.runs] + [assembly.head for chunk in chunks if chunk.head]
    weights: dict[object, Num] = {}
    for part in dict.fromkeys(parts):
        weights |= part.registered_params.by_shape
    return software.itemsize * sum(weights.values())


def graph_bytes(assembly: Assembly, part: Part) -> Num:
    """What a part's token dispatchers keep of the last micro-batch's graph where `overlap.ep` runs a layer piece by piece [B].

    `self.probs` of the all-to-all dispatcher holds the graph of the router back to the input of its piece, which is a leaf there:
    that input, unless it went to the host with the norm that reads it, and its gradient (token_dispatcher.py,
    dispatch_preprocess; pipeline_parallel/utils.py, ScheduleNode._forward).
    """
    software = assembly.job.software
    if not software.overlap.ep or software.moe.dispatcher != "alltoall":
        return 0.0
    routers = sum(isinstance(op, Gemm) and op.role == "router" for op in part.ops)
    return routers * (1.0 if "mlp_norm" in assembly.offload_modules(part) else 2.0) * part.x.bytes


def piece_bytes(assembly: Assembly, part: Part) -> Num:
    """Inputs and gradients that the pieces of a part's layers keep after their backward, before core_v0.16 [B].

    By layer: its input and what attention made of it, the gradients of both, that of the residual, and those of the rows before
    and after the dispatch and before the combine (gpt/fine_grained_callables.py of core_v0.15,
    TransformerLayerNode._release_state, which does not clear `inputs` and `output`).
    """
    if not assembly.job.software.moe.overlap_keeps_pieces:
        return 0.0
    kept: Num = 0.0
    for op in part.ops:
        if isinstance(op, Gemm) and op.role == "router":
            kept = kept + 5.0 * part.x.bytes
        if op.step in ("dispatch", "combine"):
            kept = kept + part.sizes[op.inputs[0]]
            if op.step == "dispatch":
                kept = kept + part.sizes[op.outputs[0].name]
    return kept


class ByExperts(NamedTuple):
    """What modules with experts refer to besides what is kept for backward [B]."""

    maps: Num
    """Routing maps and probabilities, until a layer's next forward."""
    graph: Num
    """`graph_bytes`."""
    pieces: Num
    """`piece_bytes`."""


def kept_by_experts(assembly: Assembly, part: Part) -> ByExperts:
    """That of one part."""
    maps = sum([op.stays_bytes for op in part.ops if isinstance(op, Move)])
    return ByExperts(maps, graph_bytes(assembly, part), piece_bytes(assembly, part))


def joined(chunks: Iterable[Iterable[tuple[ByExperts, int]]]) -> ByExperts:
    """That of a stage from the parts of its chunks and their counts: of the pieces those of the chunk that has most."""
    maps: Num = 0.0
    graph: Num = 0.0
    most: Num = 0.0
    for parts in chunks:
        pieces: Num = 0.0
        for one, count in parts:
            maps, graph, pieces = maps + count * one.maps, graph + count * one.graph, pieces + count * one.pieces
        most = maximum(most, pieces)
    return ByExperts(maps, graph, most)


def stage_experts(assembly: Assembly, stage: int) -> ByExperts:
    """That of a stage; a single micro-batch does not alternate with another."""
    if assembly.job.model.moe is None:
        return ByExperts(0.0, 0.0, 0.0)
    chunks = [[*c.runs, *([(assembly.head, 1)] if c.head else [])] for c in assembly.stages[stage]]
    of = {part: kept_by_experts(assembly, part) for part in dict.fromkeys(part for runs in chunks for part, _ in runs)}
    found = joined([(of[part], count) for part, count in runs] for runs in chunks)
    return found._replace(pieces=where(assembly.job.microbatches > 1, found.pieces, 0.0))
