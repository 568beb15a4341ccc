"""MinimalAsyncEP of torchtitan: rows are copied into buffers of other ranks that have room for the most that can arrive.

Source: pytorch/torchtitan@6b960233 torchtitan/distributed/minimal_async_ep.py, torchtitan/models/common/token_dispatcher.py,
MinimalAsyncEPTokenDispatcher, and torchtitan/models/common/moe.py, GroupedExperts. Letters: T tokens of this device, k experts
per token, N = T k rows sent. The host waits for no count. Two buffers in symmetric memory take turns to receive rows: those for
the experts, those that come back, and the gradients of both; products and activations between them are allocated with the room
of a buffer, though their kernels process only rows that arrived.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.model.ops import Comm, Move, Op, Tensor
from steptime.model.routing import INT64, Rows
from steptime.model.sublayers import Sublayer

if TYPE_CHECKING:
    from steptime.base.num import Num

SORT_KERNELS, COUNT_KERNELS = 3.0, 24.0
"""Sort by expert, its quotient by k and its inverse; counts copied to the peers, their sums, differences and views as copies,
and the two kernels that fill destinations (dispatch_op, _compute_direct_metadata)."""


def uses(rows: Rows) -> bool:
    """Whether MinimalAsyncEP carries the rows."""
    how = rows.shard.software.moe
    return how.dispatcher == "flex" and how.flex_backend == "minimal_async_ep" and rows.spread


def dispatch(rows: Rows, x: str, probs: str) -> tuple[list[Op], str]:
    """From tokens to the rows of this device's experts, one copy for each, in their order.

    Kept for backward: by dispatch, where each arrived row came from (rank and row) and where each sent row is; by combine, where
    each sent row went (rank and row) and its token. Backward sums the gradients of a token's rows when they are back.
    """
    sent, size, h = rows.sent, rows.shard.itemsize, rows.hidden
    origins = Tensor("moe.origins", 2.0 * rows.room + sent, INT64)
    places = Tensor("moe.places", 3.0 * sent, INT64)
    arrived = Tensor("moe.rows", rows.room * h, size, outside="tensor")
    order = Move(
        "moe.sort",
        (),
        (),
        (origins.name,),
        (origins, places),
        forward_bytes=2.0 * (origins.bytes + places.bytes),
        backward_bytes=(sent + rows.tokens) * h * size,
        kernels=SORT_KERNELS + COUNT_KERNELS,
        role="moe",
    )
    return [order, _copied("moe.dispatch", (x, probs), arrived, rows)], arrived.name


def combine(rows: Rows, x: str, probs: str) -> Sublayer:
    """The experts' rows back at their tokens, times their scores, summed by one kernel.

    Backward writes the gradient of every row, reads the rows for those of the scores, and sends the former to the experts.
    """
    size, h = rows.shard.itemsize, rows.hidden
    back = Tensor("moe.returned", rows.sent * h, size, outside="tensor")
    out = Tensor("moe.out", rows.tokens * h, size)
    kept = (back.name, probs, "moe.places")
    summed = Move(
        "moe.sum_rows",
        (back.name, probs),
        (out,),
        kept,
        forward_bytes=back.bytes + out.bytes,
        backward_bytes=2.0 * (back.bytes + out.bytes),
        role="moe",
    )
    return [_copied("moe.combine", (x,), back, rows), summed], out.name


def _copied(name: str, inputs: tuple[str, ...], out: Tensor, rows: Rows) -> Comm:
    """Rows written into buffers of their ranks; in backward their gradients into those they came from."""
    sent: Num = rows.received * rows.hidden * rows.shard.itemsize
    return Comm(name, inputs, (out,), kind="all_to_all", backward="all_to_all", axis="ep", bytes=sent, role="moe")
