"""Rows of experts padded to a multiple for products in low precision, where no exchange between devices orders them.

Source: pytorch/torchtitan@b5bcd76c torchtitan/models/common/token_dispatcher.py, TorchAOTokenDispatcher: with one rank of
experts, dispatch permutes the ordered rows once more into padded groups (`_permute`), and combine puts them back (`_unpermute`).
With several ranks the permutation after the exchange pads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.model.grouped_casts import padded_to
from steptime.model.ops import Move, Op, Tensor
from steptime.model.routing import INT64

if TYPE_CHECKING:
    from steptime.model.routing import Rows
    from steptime.model.sublayers import Sublayer

PLACES = "moe.places"


def padded(rows: Rows, x: str) -> Sublayer:
    """Ordered rows in groups with room for padding; their tensor."""
    if padded_to(rows.shard) == 1.0:
        return [], x
    out, places = Tensor("moe.rows", rows.room * rows.hidden, rows.shard.itemsize), Tensor(PLACES, rows.room, INT64)
    return [_moved("moe.pad", x, out, (places,))], out.name


def without_padding(rows: Rows, x: str) -> Sublayer:
    """The rows alone, in order."""
    if padded_to(rows.shard) == 1.0:
        return [], x
    out = Tensor("moe.unpadded", rows.sent * rows.hidden, rows.shard.itemsize)
    return [_moved("moe.unpad", x, out, ())], out.name


def _moved(name: str, x: str, out: Tensor, stats: tuple[Tensor, ...]) -> Op:
    """Rows taken by index, and their gradients put back: each read and written."""
    moved = 2.0 * out.bytes
    return Move(name, (x,), (out,), (PLACES,), stats, (), moved, moved, kernels=2.0, role="moe")
