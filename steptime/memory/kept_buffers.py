"""Allocated by a stage's first micro-batch and kept: Megatron's grow-only buffer, dummy weight gradients, routing maps."""

from __future__ import annotations

from steptime.base.num import Num, maximum
from steptime.job.assembly import Assembly
from steptime.memory.states import pieces_of
from steptime.model.ops import Move


def pooled_bytes(assembly: Assembly) -> list[Num]:
    """Bytes of the tensors that are stored in Megatron's grow-only buffer."""
    parts = (*assembly.kinds, assembly.head)
    return [t.bytes for part in parts for op in part.ops for t in op.allocates if t.pooled]


def comm_buffer_bytes(assembly: Assembly) -> Num:
    """Megatron's grow-only buffer: the largest sequence-parallel gather, or unfused attention's scores [B].

    megatron/core/utils.py, GlobalMemoryBuffer; megatron/core/transformer/dot_product_attention.py, matmul_input_buffer.
    """
    largest: Num = 0.0
    for bytes_ in pooled_bytes(assembly) if assembly.job.software.activations.comm_buffer else []:
        largest = maximum(largest, bytes_)
    return largest


def dummy_wgrad_bytes(assembly: Assembly, stage: int) -> Num:
    """One dummy weight gradient per shape of a stage's projections, made at the first backward and kept [B]."""
    software, chunks = assembly.job.software, assembly.stages[stage]
    if software.states.dummy_wgrads != "kept" or not software.states.grad_accumulation_fusion:
        return 0.0
    parts = [part for chunk in chunks for part, _ in chunk.runs] + [assembly.head for chunk in chunks if chunk.head]
    every = [p for part in dict.fromkeys(parts) for p in part.registered_params if len(p.param.shape) > 1]
    weights = {"vocab" if p.param.vocab else p.param.shape: p for p in every}
    return software.itemsize * sum([pieces_of(assembly.job, p).elements for p in weights.values()])


def dispatcher_bytes(assembly: Assembly, stage: int) -> Num:
    """Bytes that the token dispatchers of a stage's layers reference until their next forward."""
    if assembly.job.model.moe is None:
        return 0.0
    chunks = assembly.stages[stage]
    runs = [run for chunk in chunks for run in chunk.runs] + [(assembly.head, 1) for chunk in chunks if chunk.head]
    staying = {part: [op.stays_bytes for op in part.ops if isinstance(op, Move)] for part, _ in runs}
    return sum([count * bytes_ for part, count in runs for bytes_ in staying[part]])
