"""Experts that are not grouped: the kernels of one MLP for one expert after the other.

megatron/core/transformer/moe/experts.py, SequentialMLP: received rows are split, each expert is an MLP of its own, and their
outputs are concatenated. Backward of the split concatenates the gradients; that of the concatenation makes views. torchtitan's
_run_experts_for_loop is the same (torchtitan/models/moe/moe.py, before 2026-05).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from steptime.model.ops import Move, Op, Tensor

if TYPE_CHECKING:
    from steptime.model.routing import Rows


def in_turn(rows: Rows, ops: list[Op]) -> list[Op]:
    """Ops of all experts' rows together: unchanged, or their kernels run for each expert."""
    if rows.shard.software.moe.grouped_gemm:
        return ops
    return [replace(op, kernels=op.kernels * rows.local_experts) if isinstance(op, Move) else op for op in ops]


def joined(rows: Rows, x: Tensor) -> tuple[list[Op], Tensor]:
    """The outputs of several experts as one tensor, and in backward the gradients of their inputs, of the same size."""
    if rows.shard.software.moe.grouped_gemm or not rows.several:
        return [], x
    out = x._replace(name=f"{x.name}.joined")
    copied = 2.0 * x.bytes
    join = Move("experts.join", (x.name,), (out,), forward_bytes=copied, backward_bytes=copied, role="moe")
    return [join], out
