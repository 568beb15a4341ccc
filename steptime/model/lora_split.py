"""Adapters under Megatron's tensor parallelism: how A (r x k) and B (n x r) are split, and what they communicate.

Where a projection's output columns are split, B has its rows of the output; where its input is split, A has its columns of the
input, and its results are summed. With split "both" the other matrix is split too, and its results are gathered
(NVIDIA-NeMo/Megatron-Bridge@067f987d src/megatron/bridge/peft/utils.py, ParallelLinearAdapter, and NeMo's of the same name); with
"one" every rank holds all of it (modelscope/ms-swift swift/megatron/tuners/lora.py, LoraParallelLinear).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from steptime.model.ops import Comm, Gemm, Move, Op, Tensor

if TYPE_CHECKING:
    from steptime.base.num import Num
    from steptime.model.lora import Split
    from steptime.model.shard import Shard


@dataclass(frozen=True)
class AdapterSplit:
    """One adapter's share of tensor parallelism; without it (`tp` false) nothing is split and nothing is sent."""

    name: str
    row: bool
    """Whether the projection's input is split, else its output."""
    both: bool
    tp: bool
    shard: Shard
    hidden: Num
    """Columns of the projection's whole input."""

    @property
    def dims(self) -> tuple[int | None, int | None]:
        """The dimension in which A and B are split: 0 rows, 1 columns, None whole on every rank."""
        if not self.tp:
            return None, None
        other = 0 if self.both else None
        return (1, other) if self.row else (other, 0)

    def share(self, whole: Num, split: bool) -> Num:
        """This rank's part of a dimension."""
        return whole / self.shard.tp if split else whole

    def leave(self, comm: Op, base: Tensor, outputs: tuple[Tensor, ...]) -> tuple[Op, str, tuple[Tensor, ...]]:
        """The row-parallel projection's own collective on `base`: the op, the tensor that it leaves, and the adapted sum's."""
        if not comm.outputs:
            return replace(comm, inputs=(base.name,)), base.name, outputs
        left = comm.outputs[0]._replace(name=f"{base.name}.scattered")
        return replace(comm, inputs=(base.name,), outputs=(left,)), left.name, comm.outputs

    def enter(self, read: str, kept: str) -> tuple[list[Op], str]:
        """A's input, of what the projection reads, and would keep if it were trained (its own tokens).

        With sp TransformerEngine returns the norm's gathered output to a split A, unless it overlaps the gather with the
        product; ms-swift gathers its own.
        """
        own = not self.both or bool(self.shard.software.overlap.tp)
        if not self.tp or self.row or kept == read or not own:
            return [], read
        whole = Tensor(f"{self.name}.lora.gathered", self.shard.tokens * self.hidden, self.shard.itemsize)
        gather = Comm(
            f"{self.name}.lora.gather",
            (kept,),
            (whole,),
            kind="all_gather",
            backward="reduce_scatter",
            bytes=whole.bytes,
        )
        return [gather], whole.name

    def before_a(self, x: str, bytes_: Num) -> list[Op]:
        """The sum over ranks of the input's gradient of a split A; with sp it is in the projection's own reduce-scatter."""
        if not self.tp or self.row or not self.both or self.shard.sp:
            return []
        return [Comm(f"{self.name}.lora_a.copy", (x,), backward="all_reduce", bytes=bytes_)]

    def between(self, low: Tensor, elements: Num) -> tuple[list[Op], str]:
        """A's output made whole on every rank, and the sum of its gradient from a split B."""
        if not self.tp:
            return [], low.name
        ops: list[Op] = []
        name, bytes_ = low.name, elements * low.itemsize
        if self.row:
            ops.append(Comm(f"{self.name}.lora_a.reduce", (name,), kind="all_reduce", bytes=bytes_))
        elif self.both:
            ops += self.joined(f"{self.name}.lora_a", low, elements)
            name = f"{low.name}.joined"
        if self.dims[1] == 0:
            ops.append(Comm(f"{self.name}.lora_b.copy", (name,), backward="all_reduce", bytes=bytes_))
        return ops, name

    def after_b(self, up: Tensor, elements: Num) -> tuple[list[Op], str]:
        """B's output as the projection leaves its own: beside a row-parallel one gathered if split; with sp one's own tokens."""
        if not self.tp or not self.row:
            return [], up.name
        ops: list[Op] = []
        name = up.name
        if self.both:
            ops += self.joined(f"{self.name}.lora_b", up, elements)
            name = f"{up.name}.joined"
        if self.shard.sp:
            mine = Tensor(f"{up.name}.mine", elements / self.shard.tp, up.itemsize)
            bytes_ = elements * up.itemsize
            ops.append(Comm(f"{self.name}.lora_b.scatter", (name,), (mine,), backward="all_gather", bytes=bytes_))
            name = mine.name
        return ops, name

    @staticmethod
    def joined(name: str, part: Tensor, elements: Num) -> list[Op]:
        """All ranks' columns: an all-gather and the copy that puts them side by side; backward takes one's own again.

        Source: megatron-core 0.16.1 tensor_parallel/mappings.py, _gather_along_last_dim and _split_along_last_dim.
        """
        pieces = Tensor(f"{part.name}.pieces", elements, part.itemsize)
        whole = pieces._replace(name=f"{part.name}.joined")
        moved, back = 2.0 * pieces.bytes, 2.0 * part.bytes
        return [
            Comm(f"{name}.gather", (part.name,), (pieces,), kind="all_gather", bytes=pieces.bytes),
            Move(f"{name}.join", (pieces.name,), (whole,), forward_bytes=moved, backward_bytes=back),
        ]


def split_of(op: Gemm, split: Split, shard: Shard) -> AdapterSplit:
    """How the adapter beside a projection is split."""
    row = shard.split and op.params[0].split_dim == 1
    return AdapterSplit(op.name, row, split == "both", shard.split, shard, op.params[0].shape[1])
