"""Rotary embedding of query and key, by one kernel or by eager torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from steptime.model.ops import VECTORIZED, ByElement, Move, Op, Tensor
from steptime.model.sublayers import EAGER_ROPE

if TYPE_CHECKING:
    from steptime.base.num import Num
    from steptime.model.shard import Shard


class Turn(NamedTuple):
    """How often each element is read or written, and how often by kernels that move one element at a time."""

    forward: float
    backward: float
    kernels: float
    """Mean of forward and backward, query and key together."""
    by_element: float = 0.0
    """Elements in units of the tensor's; each is read and written."""


TURNS = {
    "fused": Turn(2.0, 2.0, 1.0),
    "composite": Turn(9.0, 9.0, 10.0),  # half turned 2, products 2 * 2, sum 3
    # negation of half 1, concatenation 2, products with broadcast tables 2 * 2, sum 3, concatenation with nothing 2; backward the
    # same but for the last, zeros 1 for the part that is not turned and its sum 3; 12 kernels for the two tables, twice
    "own_tables": Turn(12.0, 14.0, 19.0, 2.5),
    "eager": Turn(EAGER_ROPE, EAGER_ROPE, 10.0),
}
"""By `performance.rope_impl`. own_tables: megatron/core/models/common/embeddings/rope_utils.py, _apply_rotary_pos_emb_bshd, whose
negation reads half of each row, and whose products broadcast."""


def rotary(shard: Shard, q: str, k: str, widths: tuple[Num, Num], d: int) -> tuple[list[Op], str, str]:
    """Rotary embedding of q and k: new tensors. `widths`: elements of either per token; `d`: those of a head.

    Nothing is kept where the tables are shared buffers or the kernel is fused; own_tables keeps cos and sin, once for q and once
    for k.
    """
    size, how = shard.itemsize, shard.software.kernels.rope_impl
    out_q = Tensor("attn.rope.q", shard.tokens * widths[0], size)
    out_k = Tensor("attn.rope.k", shard.tokens * widths[1], size)
    tables = (Tensor("attn.rope.tables", 4.0 * shard.seq * d, size),) if how == "own_tables" else ()
    turn, elements = TURNS[how], out_q.elements + out_k.elements
    slow = ByElement(turn.by_element * elements, 2.0 * turn.by_element * elements * size)
    slow = slow if turn.by_element else VECTORIZED
    op = Move(
        "attn.rope",
        (q, k),
        (out_q, out_k),
        tuple(t.name for t in tables),
        tables,
        forward_bytes=turn.forward * (out_q.bytes + out_k.bytes),
        backward_bytes=turn.backward * (out_q.bytes + out_k.bytes),
        forward_by_element=slow,
        backward_by_element=slow,
        kernels=turn.kernels,
    )
    return [op], out_q.name, out_k.name
