"""Rotary embedding of queries and keys: the kernels that the implementations run, by the bytes that they move."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.model.ops import Move, Op, Tensor

if TYPE_CHECKING:
    from steptime.base.num import Num
    from steptime.model.model import Model
    from steptime.model.shard import Shard

ACCESSES = {
    "fused": (2.0, 2.0),
    "composite": (10.0, 15.0),
    "own_tables": (10.0, 15.0),
    "complex": (10.0, 10.0),
    "upcast": (26.0, 36.0),
    "eager": (20.0, 20.0),
}
"""Reads and writes of every element, of the compute dtype's width, forward and backward, by `KernelSettings.rope_impl`.

Counted on torch's own functions (tests/truth/test_torch_rotary.py). composite, forward: x times cos (2), half of x negated (1),
halves joined (2), times sin (2), sum (3); backward: two products (4), gradients of two halves widened by zeros (4), one of them
negated (1), two sums (6). complex, both ways: to fp32 (3), times a complex64 table (4), back (3). upcast: composite in fp32 (20
and 30) between casts (6). torchtitan measured upcast's at 8.23 and 10.68 ms for 262,144 tokens of 9 heads of 128, 604 MB (its
commit 8ee8b42f7): 0.80 and 0.85 of the 2.4 TB/s of H100 at 500 W. eager: Hugging Face's over transposed tensors, 3,817 us on A100
for 16,384 tokens of 40 heads of 128 (linkedin/Liger-Kernel@ead96b61 benchmark/data/all_benchmark_data.csv), at 0.85 of 2.04
TB/s."""
ROTATED = ("attn.rope.q", "attn.rope.k")
"""Queries and keys after it."""
KERNELS = 10.0
"""Launches of q and k together where no kernel is fused."""


def rotary(model: Model, shard: Shard, qk: tuple[str, str], heads: tuple[Num, Num], ranks: Num = 1.0) -> list[Op]:
    """Rotary embedding of q and k, of so many heads of this device, into "attn.rope.q" and "attn.rope.k".

    Nothing is kept where the tables are shared buffers or the kernel is fused; own_tables keeps cos and sin, once for q and
    once for k (megatron/core/models/common/embeddings/rope_utils.py, _apply_rotary_pos_emb_bshd).
    `ranks`: forward rotates the heads of that many ranks; the gradients are of this device's own.
    """
    size, how, d = shard.itemsize, shard.software.kernels.rope_impl, model.head_dim
    q, k = (Tensor(name, shard.tokens * n * ranks * d, size) for name, n in zip(ROTATED, heads, strict=True))
    forward, backward = ACCESSES[how]
    tables = (Tensor("attn.rope.tables", 4.0 * shard.seq * d, size),) if how == "own_tables" else ()
    saves, turned = tuple(t.name for t in tables), q.bytes + k.bytes
    kernels = 1.0 if how == "fused" else KERNELS
    return [Move("attn.rope", qk, (q, k), saves, tables, (), forward * turned, backward * turned / ranks, kernels)]
