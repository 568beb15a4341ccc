"""Experts that are not grouped: the kernels of one MLP for one expert after the other.

megatron/core/transformer/moe/experts.py, SequentialMLP: received rows are split, each expert is an MLP of its own, and their
outputs are concatenated. Backward of the split concatenates the gradients; that of the concatenation makes views. torchtitan's
_run_experts_for_loop is the same (torchtitan/models/moe/moe.py, before 2026-05).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from steptime.model.ops import ByElement, Move, Op, Tensor

if TYPE_CHECKING:
    from steptime.model.model import Model
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


def bias_in_place(model: Model, rows: Rows, x: Tensor, probs: str) -> list[Op]:
    """The second product's bias times the probability, added to the outputs in place, expert by expert.

    megatron/core/transformer/mlp.py, MLP.forward with per_token_scale. Forward writes the product in the probabilities' dtype,
    then reads it and the outputs, and writes these. Backward casts the gradient to that dtype if it is another, and has a product
    and a sum for the bias and for the probabilities. The products broadcast; the sum and the cast read another dtype than they
    write.
    """
    if not model.bias:
        return []
    wide, size = max(rows.prob, x.itemsize), x.itemsize
    casts = 0.0 if wide == size else 1.0
    one = x.elements / rows.local_experts
    return [
        Move(
            "experts.bias",
            saves=(probs,),
            forward_bytes=(2.0 * wide + 2.0 * size) * x.elements,
            backward_bytes=(6.0 * wide + casts * (wide + size)) * x.elements,
            forward_by_element=ByElement((1.0 + casts) * x.elements, (wide + casts * (wide + 2.0 * size)) * x.elements),
            backward_by_element=ByElement(
                (2.0 + casts) * x.elements, (4.0 * wide + casts * (wide + size)) * x.elements
            ),
            kernels=2.0 * rows.local_experts,
            forward_temp_bytes=wide * one,
            backward_temp_bytes=2.0 * wide * one,
            role="moe",
        )
    ]
