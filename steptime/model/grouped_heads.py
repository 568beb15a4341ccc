"""Heads of queries, keys and values on one device, and the copies of them made before the flash kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from steptime.base.num import maximum
from steptime.model.ops import Comm, Move, Op, Tensor
from steptime.model.shared_sequence import Names

if TYPE_CHECKING:
    from steptime.base.num import Num
    from steptime.model.model import Model
    from steptime.model.shard import Shard

REPEATED = ("attn.core.q", "attn.core.k", "attn.core.v")
"""Key-value heads repeated for their queries, and a query that is copied with them."""


def heads(model: Model, shard: Shard) -> tuple[Num, Num]:
    """Query and key-value heads on this device; key-value heads are replicated where tp exceeds their number."""
    if model.attention.kind == "mla":
        return model.n_q_heads / shard.tp, model.n_q_heads / shard.tp
    return model.n_q_heads / shard.tp, maximum(model.n_kv_heads / shard.tp, 1.0)


def gathers(model: Model, shard: Shard) -> bool:
    """Whether every tensor-parallel rank has all heads of q and k after their norms."""
    kernels = shard.software.kernels
    return model.qk_norm and kernels.qk_norm_gathered and kernels.attention_impl == "flash" and shard.split


def gather(model: Model, shard: Shard, q: str, k: str) -> tuple[list[Op], str, str]:
    """Heads of q and k gathered from all tensor-parallel ranks after their norms, where a trainer does so.

    torchtitan's Qwen3 did until its commit 8c1d1c5fc of 2025-10-14 (pull request 1870), since its norms returned DTensors that
    are replicated. The gradients that the attention kernel makes are split by heads, so backward has no collective.
    """
    if not gathers(model, shard):
        return [], q, k
    ops: list[Op] = []
    for part, source, n in zip("qk", (q, k), heads(model, shard), strict=True):
        every = Tensor(f"attn.{part}.every", shard.tokens * n * shard.tp * model.head_dim, shard.itemsize)
        ops.append(
            Comm(f"attn.{part}_norm.gather", (source,), (every,), kind="all_gather", bytes=every.bytes, joined=True)
        )
    return ops, "attn.q.every", "attn.k.every"


class Read(NamedTuple):
    """What a flash kernel reads as q, k and v, after the copies that `ops` make."""

    ops: list[Op]
    qkv: Names
    kept: Names
    """What is kept of them for backward."""
    n_kv: Num
    """Key-value heads that it reads."""


def as_read(model: Model, shard: Shard, qkv: Names) -> Read:
    """Keys and values repeated for their queries, and a rank's own heads selected from the gathered ones.

    torch.compile keeps unrepeated keys and values, and repeats them again in backward: its least cut takes the smallest
    of the tensors that lead to one another. Of gathered heads every rank's keys are repeated, and all are kept; the kernel's are
    contiguous, so taking them is a copy, in backward too.
    """
    (q, k, v), ops, kernels = qkv, list[Op](), shard.software.kernels
    n_q, n_kv = heads(model, shard)
    if kernels.repeat_kv and model.n_q_heads != model.n_kv_heads and k != REPEATED[1]:
        ops, (q, k, v) = repeat(model, shard, q, k, v, shard.tp if gathers(model, shard) else 1.0)
    n_kv = n_q if k == REPEATED[1] else n_kv
    kept = (q, k, v) if kernels.compile == "none" else qkv
    if gathers(model, shard):
        width, size = shard.tokens * model.head_dim, shard.itemsize
        own = (Tensor("attn.core.q.own", width * n_q, size), Tensor("attn.core.k.own", width * n_kv, size))
        moved = 2.0 * (own[0].bytes + own[1].bytes)
        ops.append(Move("attn.core.take", (q, k), own, (), (), (), moved, moved, 2.0, role="core_attn"))
        q, k = own[0].name, own[1].name
    return Read(ops, (q, k, v), kept, n_kv)


def repeat(model: Model, shard: Shard, q: str, k: str, v: str, ranks: Num = 1.0) -> tuple[list[Op], Names]:
    """Key-value heads repeated for their queries; a query that is still a view of the fused projection is also copied.

    `ranks`: forward repeats the keys of that many ranks.
    """
    n_q, n_kv = heads(model, shard)
    d, size = model.head_dim, shard.itemsize
    view = q == v
    names = REPEATED[not view :]
    outputs = tuple(
        Tensor(name, shard.tokens * n_q * (ranks if name == REPEATED[1] else 1.0) * d, size) for name in names
    )
    sources = (k,) if view else tuple(dict.fromkeys((k, v)))
    read = shard.tokens * (2.0 * n_kv + (n_q if view else 0.0)) * d * size
    moved = len(names) * outputs[-1].bytes + read
    others = (ranks - 1.0) * shard.tokens * (n_q + n_kv) * d * size
    backward = 2.0 * moved if shard.software.kernels.compile != "none" and shard.software.kernels.repeat_kv else moved
    kernels = float(len(names))
    op = Move("attn.core.repeat", sources, outputs, (), (), (), moved + others, backward, kernels, role="core_attn")
    return [op], (names[0] if view else q, names[-2], names[-1])
