"""The combine of torchtitan from 2025-11-21 to 2026-04-06: a token's rows times its scores, an fp32 product of eager torch.

Source: pytorch/torchtitan v0.2.2 torchtitan/models/moe/moe.py, MoE.forward (pull request 1974; reverted by 2775): rows are put in
the order of their tokens into zeros, cast to fp32 and multiplied by torch.bmm, (T, 1, k) by (T, k, h); not compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.model.ops import ByElement, Move, Op, Tensor
from steptime.model.routing import FP32

if TYPE_CHECKING:
    from steptime.model.routing import Rows

RELEASES = frozenset({"torchtitan@0.2.1"})
"""Releases that combine so."""

SLOW = 2.6
"""Elements of kernels without vector loads (`cost.rates.ELEMENTS_PER_SM`) that take as long as one element of the rows in one of
the three products: cuBLAS has no tensor cores for fp32, nor a kernel for an inner dimension of 1. On B200 that of backward takes
6 to 9 ms for 16 sequences of 4,096 tokens (assumed), top 8, h 2,048: 1.07e9 elements, 0.8 to 1.2e9 a second on each of 148 SMs
(pytorch/torchtitan pull request 2466); 1.0e9, to the 2.6e9 of those kernels. The others are assumed as slow; gpt-oss 20B on H100
then takes as much longer than with one kernel instead as was measured (pull request 2717)."""


def applies(rows: Rows) -> bool:
    """Whether the software combines so."""
    return rows.shard.software.name in RELEASES


def summed(rows: Rows, x: str) -> list[Op]:
    """From rows in the order of the experts to tokens. The fp32 copy of the rows is kept for the gradient of the scores.

    Forward: zeros and an indexed copy; cast, product, cast, and the sum with the shared experts. Backward: the gradient cast,
    both products, the rows' gradient cast and taken by index.
    """
    size = rows.shard.itemsize
    placed = Tensor("moe.unsorted", rows.sent * rows.hidden, size)
    out, wide = Tensor("moe.out", rows.tokens * rows.hidden, size), placed._replace(name="moe.wide", itemsize=FP32)
    put = Move(
        "moe.unsort",
        (x,),
        (placed,),
        ("moe.order",),
        forward_bytes=3.0 * placed.bytes,
        backward_bytes=2.0 * placed.bytes,
        kernels=2.0,
        role="moe",
    )
    product = FP32 * (placed.elements + out.elements)
    casts = (size + FP32) * (placed.elements + out.elements) if size != FP32 else 0.0
    added = 3.0 * out.bytes if rows.moe.n_shared_experts else 0.0
    weigh = Move(
        "moe.weigh",
        (placed.name, "moe.ranked"),
        (out,),
        (wide.name, "moe.ranked"),
        (wide,),
        forward_bytes=casts + product + added,
        backward_bytes=casts + 2.0 * product,
        kernels=4.0,
        forward_temp_bytes=FP32 * out.elements if casts else 0.0,
        backward_temp_bytes=FP32 * placed.elements - out.bytes if casts else 0.0,
        forward_by_element=ByElement(SLOW * placed.elements, product),
        backward_by_element=ByElement(2.0 * SLOW * placed.elements, 2.0 * product),
        role="moe",
    )
    return [put, weigh]
