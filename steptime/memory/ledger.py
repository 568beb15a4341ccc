"""Bytes allocated and freed over time, the peak, and the results of a part's walk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from steptime.base.num import PLAIN, Num, is_column, maximum, new_row
from steptime.base.records import ByFields
from steptime.model.ops import Op


class Peak(NamedTuple):
    """Most bytes held at once, and the op that holds them."""

    bytes: Num
    op: str

    def worse(self, other: Peak) -> Peak:
        """The larger of two moments; element by element for columns."""
        if type(self.bytes) in PLAIN and type(other.bytes) in PLAIN:
            return max(self, other)
        return Peak(maximum(self.bytes, other.bytes), "")


class PartMemory(NamedTuple):
    """Memory of one part for one micro-batch [B]. Both peaks include what the part itself keeps."""

    saved: Num
    forward: Peak
    backward: Peak
    n_params: Num = 0.0
    """Parameters whose gradients its backward makes."""
    ahead: Num = 0.0
    """Bytes of it that are back on the device before its backward begins, where it is offloaded to host memory."""


NO_BYTES = Peak(0.0, "")


@dataclass(slots=True, eq=False, repr=False)
class Ledger(ByFields):
    """Bytes allocated now, and the most so far."""

    bytes: Num
    most: Num = 0.0
    op: str = ""
    """The op that held the most."""

    @property
    def peak(self) -> Peak:
        """The peak so far."""
        return new_row(Peak, (self.most, self.op))

    def mark(self, op: str, extra: Num = 0.0) -> None:
        """Record a moment, with `extra` bytes that exist only in it."""
        total = self.bytes + extra
        more = total > self.most
        if more is True:
            self.most, self.op = total, op
        elif more is not False and is_column(more):
            self.most, self.op = maximum(self.most, total), ""
        elif more:
            self.most, self.op = total, op


@dataclass(slots=True, eq=False, repr=False)
class GradBuffer(ByFields):
    """The buffer of a tensor's gradient; a residual's buffer is shared by several tensors."""

    bytes: Num
    users: int = 1


def in_allocator(ops: list[Op], sizes: dict[str, Num]) -> dict[str, Num]:
    """The same `sizes` as the caching allocator has them: 0 for tensors outside of it."""
    outside = {t.name: 0.0 for op in ops for t in op.allocates if t.outside in {"tensor", "both"}}
    return sizes | outside if outside else sizes
