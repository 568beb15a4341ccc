"""Rotary embedding of queries and keys: the kernels that the implementations run, by the bytes that they move."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from steptime.model.ops import VECTORIZED, ByElement, Move, Op, Tensor

if TYPE_CHECKING:
    from steptime.base.num import Num
    from steptime.model.model import Model
    from steptime.model.shard import Shard


class Rotation(NamedTuple):
    """Reads and writes of every element, of the compute dtype's width."""

    forward: float
    backward: float
    kernels: float = 10.0
    """Mean of forward and backward, query and key together."""
    by_element: float = 0.0
    """Elements, in units of the tensor's, that kernels without vector loads read and write."""


ROTATIONS = {
    "fused": Rotation(2.0, 2.0, 1.0),
    "composite": Rotation(10.0, 15.0),
    "own_tables": Rotation(12.0, 14.0, 19.0, 2.5),
    "complex": Rotation(10.0, 10.0),
    "upcast": Rotation(26.0, 36.0),
    "eager": Rotation(20.0, 20.0),
}
"""By `KernelSettings.rope_impl`, counted on the functions of torch and Megatron-Core (tests/truth/test_torch_rotary.py and
test_torch_by_element.py).

- composite, forward: x times cos (2), half of x negated (1), halves joined (2), times sin (2), sum (3); backward: two products
  (4), gradients of two halves widened by zeros (4), one of them negated (1), two sums (6).
- own_tables (megatron/core/models/common/embeddings/rope_utils.py, _apply_rotary_pos_emb_bshd), forward: as composite, and joined
  with the empty part that is not rotated (2); backward: without that join, zeros for that part (1) and its sum (3). The negation
  reads half of each row and the products broadcast; 12 kernels make the tables, once for q and once for k.
- complex, both ways: to fp32 (3), times a complex64 table (4), back (3).
- upcast: composite in fp32 (20 and 30) between casts (6). torchtitan measured it at 8.23 and 10.68 ms for 262,144 tokens of 9
  heads of 128, 604 MB (its commit 8ee8b42f7): 0.80 and 0.85 of the 2.4 TB/s of H100 at 500 W.
- eager: Hugging Face's over transposed tensors, 3,817 us on A100 for 16,384 tokens of 40 heads of 128
  (linkedin/Liger-Kernel@ead96b61 benchmark/data/all_benchmark_data.csv), at 0.85 of 2.04 TB/s."""
ROTATED = ("attn.rope.q", "attn.rope.k")
"""Queries and keys after it."""


def rotary(model: Model, shard: Shard, qk: tuple[str, str], heads: tuple[Num, Num], ranks: Num) -> list[Op]:
    """Rotary embedding of q and k, of so many heads of this device, into "attn.rope.q" and "attn.rope.k".

    Nothing is kept where the tables are shared buffers or the kernel is fused; own_tables keeps cos and sin, once for q and once
    for k. `ranks`: forward rotates the heads of that many ranks; the gradients are of this device's own.
    """
    size, how, d = shard.itemsize, shard.software.kernels.rope_impl, model.head_dim
    q, k = (Tensor(name, shard.tokens * n * ranks * d, size) for name, n in zip(ROTATED, heads, strict=True))
    tables = (Tensor("attn.rope.tables", 4.0 * shard.seq * d, size),) if how == "own_tables" else ()
    each, elements, rotated = ROTATIONS[how], q.elements + k.elements, q.bytes + k.bytes
    slow = ByElement(each.by_element * elements, 2.0 * each.by_element * rotated) if each.by_element else VECTORIZED
    op = Move(
        "attn.rope",
        qk,
        (q, k),
        tuple(t.name for t in tables),
        tables,
        forward_bytes=each.forward * rotated,
        backward_bytes=each.backward * rotated / ranks,
        forward_by_element=slow,
        backward_by_element=ByElement(slow.elements / ranks, slow.bytes / ranks),
        kernels=each.kernels,
    )
    return [op]
