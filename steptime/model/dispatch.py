"""How tokens reach their experts and return: permutation, exchange between ranks, sorting by expert; three dispatchers.

Source: megatron/core/transformer/moe/token_dispatcher.py and moe_utils.py (0.16.1). Letters: T tokens of this device, E experts,
k per token, N rows in this device's experts, R rows that DeepEP delivers, p bytes of a probability.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from steptime.base.num import same
from steptime.model.ops import Comm, Move, Op, Tensor
from steptime.model.routing import BOOL, FP32, INT32, INT64, Rows

if TYPE_CHECKING:
    from steptime.base.num import Num
    from steptime.model.ops import Axis

INDEX_KERNELS = 6.0
"""Kernels of an unfused permutation: masks and indices of map and probabilities, then the copies (moe_utils.py, permute)."""


class DispatchedTensors(NamedTuple):
    """Tensors before the experts: the rows, and their probabilities."""

    x: str
    probs: str


def dispatch(rows: Rows, x: str, probs: str) -> tuple[list[Op], DispatchedTensors]:
    """From tokens and probabilities to the rows of this device's experts, in their order."""
    of_dispatcher = {"alltoall": _to_all, "allgather": _gathered, "flex": _exchanged}[
        rows.shard.software.moe.dispatcher
    ]
    return of_dispatcher(rows, x, probs)


def combine(rows: Rows, x: str) -> tuple[list[Op], str]:
    """From the experts' rows back to tokens, summed."""
    of_dispatcher = {"alltoall": _from_all, "allgather": _scattered, "flex": _returned}[
        rows.shard.software.moe.dispatcher
    ]
    return of_dispatcher(rows, x)


def permute(
    rows: Rows, name: str, sources: tuple[str, ...], count: Num, kept: tuple[Tensor, ...], stays: Num = 0.0
) -> tuple[Op, DispatchedTensors]:
    """Copy rows into the order of their experts, with their probabilities; `stays` bytes are kept by the dispatcher."""
    shard = rows.shard
    out = Tensor(f"{name}.out", count * rows.hidden, shard.itemsize)
    probs = Tensor(f"{name}.probs", count, rows.prob)
    kernels = 1.0 if shard.software.moe.permute_fusion else INDEX_KERNELS
    moved = 2.0 * out.bytes + 2.0 * probs.bytes + sum([t.bytes for t in kept])
    names = tuple(t.name for t in kept)
    op = Move(name, sources, (out, probs), names, kept, (), moved, moved, kernels, stays_bytes=stays, role="moe")
    return op, DispatchedTensors(out.name, probs.name)


def unpermute(rows: Rows, name: str, x: str, read: Num, tokens: Num, saves: tuple[str, ...] = ()) -> tuple[Op, str]:
    """Sum rows back into `tokens`, by the indices that `permute` kept."""
    out = Tensor(f"{name}.out", tokens * rows.hidden, rows.shard.itemsize)
    moved = (read + tokens) * rows.hidden * rows.shard.itemsize
    kernels = 1.0 if rows.shard.software.moe.permute_fusion else 3.0
    return Move(name, (x,), (out,), saves, (), (), moved, moved, kernels, role="moe"), out.name


def exchange(
    name: str, x: str, out: Tensor, kind: Any, backward: Any, axis: Axis, bytes_: Num, **more: Any
) -> tuple[Op, str]:
    """One collective that sends rows or probabilities."""
    comm = Comm(name, (x,), (out,), kind=kind, backward=backward, axis=axis, bytes=bytes_, role="moe", **more)
    return comm, out.name


def maps(rows: Rows, tokens: Num, experts: Num, count: Num) -> tuple[Tensor, ...]:
    """Bytes kept by permuting `tokens` for `experts` into `count` rows.

    Fused: TransformerEngine's row map, int32, 2E + 1 columns. Else masks of map and probabilities and the sorted indices; padded
    to capacity, only the indices of both.
    """
    if rows.shard.software.moe.permute_fusion:
        return (Tensor("moe.row_map", tokens * (2.0 * experts + 1.0), INT32),)
    if rows.moe.pad_to_capacity:
        return (Tensor("moe.sorted", 2.0 * count, INT64),)
    mask = Tensor("moe.mask", tokens * experts, BOOL)
    return (mask, Tensor("moe.mask.probs", tokens * experts, rows.prob), Tensor("moe.sorted", count, INT64))


# --- all-to-all ----------------------------------------------------------------------------------------------------------


def _to_all(rows: Rows, x: str, probs: str) -> tuple[list[Op], DispatchedTensors]:
    shard, size, p, h = rows.shard, rows.shard.itemsize, rows.prob, rows.hidden
    ops: list[Op] = []
    if rows.spread and not rows.moe.pad_to_capacity:
        counts = INT64 * rows.moe.n_experts * rows.ranks
        ops.append(Comm("moe.counts", kind="all_gather", axis="ep_etp", bytes=counts, role="moe"))
    kept = maps(rows, rows.tokens, rows.moe.n_experts, rows.sent)
    # self.probs and self.routing_map, unless it is the mask that the router keeps
    mask_bytes = (p if rows.map_kept else BOOL + p) * rows.tokens * rows.moe.n_experts
    op, sent = permute(rows, "moe.permute", (x, probs), rows.sent, kept, mask_bytes)
    ops.append(op)
    if same(shard.ep != 1):
        n = rows.received
        out, out_probs = Tensor("moe.arrived", n * h, size), Tensor("moe.arrived.probs", n, p)
        a, x_in = exchange("moe.dispatch", sent.x, out, "all_to_all", "all_to_all", "ep", out.bytes, step="dispatch")
        b, p_in = exchange(
            "moe.dispatch.probs", sent.probs, out_probs, "all_to_all", "all_to_all", "ep", out_probs.bytes,
            step="dispatch_probs",
        )  # fmt: skip
        ops, sent = [*ops, a, b], DispatchedTensors(x_in, p_in)
    if same(shard.etp != 1):
        out, out_probs = Tensor("moe.gathered", rows.here * h, size), Tensor("moe.gathered.probs", rows.here, p)
        a, x_in = exchange("moe.gather", sent.x, out, "all_gather", "reduce_scatter", "etp", out.bytes)
        b, p_in = exchange(
            "moe.gather.probs", sent.probs, out_probs, "all_gather", "reduce_scatter", "etp", out_probs.bytes
        )
        ops, sent = [*ops, a, b], DispatchedTensors(x_in, p_in)
    if rows.several:
        op, sent = permute(rows, "moe.sort", (sent.x, sent.probs), rows.here, sort_map(rows, "moe.sort.map"))
        ops.append(op)
    return ops, sent


def sort_map(rows: Rows, name: str) -> tuple[Tensor, ...]:
    """The row map of a fused sort by expert; unfused chunks are cut and joined."""
    return (Tensor(name, rows.here, INT32),) if rows.shard.software.moe.permute_fusion else ()


def _from_all(rows: Rows, x: str) -> tuple[list[Op], str]:
    shard, size, h = rows.shard, rows.shard.itemsize, rows.hidden
    ops: list[Op] = []
    if rows.several:
        kept = sort_map(rows, "moe.unsort.map")
        out = Tensor("moe.unsort.out", rows.here * h, size)
        kernels = 1.0 if kept else 2.0
        ops.append(Move("moe.unsort", (x,), (out,), tuple(t.name for t in kept), kept, kernels=kernels, role="moe"))
        x = out.name
    if same(shard.etp != 1):
        reduction, x = reduce_rows(rows, x, rows.here, shard.etp, "etp")
        ops += reduction
    if same(shard.ep != 1):
        out = Tensor("moe.returned", rows.sent * h, size)
        sent = rows.received * h * size
        op, x = exchange("moe.combine", x, out, "all_to_all", "all_to_all", "ep", sent, step="combine")
        ops.append(op)
    op, x = unpermute(rows, "moe.unpermute", x, rows.sent, rows.tokens, kept_by_sum(rows, x))
    return [*ops, op], x


def kept_by_sum(rows: Rows, x: str) -> tuple[str, ...]:
    """Bytes kept by summing rows back: their origins, and the rows `x` themselves where torch's index_add_ sums them.

    torch tools/autograd/derivatives.yaml, index_add: expand_as(source).
    """
    moe = rows.shard.software.moe
    if moe.permute_fusion:
        return ("moe.row_map",)
    return ("moe.sorted", x) if moe.deterministic else ("moe.sorted",)


def reduce_rows(rows: Rows, x: str, count: Num, ranks: Num, axis: Axis) -> tuple[list[Op], str]:
    """Partial sums of `count` rows reduced and scattered over `ranks`, in the router's dtype, with a cast before and after."""
    size, p = rows.shard.itemsize, rows.prob
    ops: list[Op] = []
    elements = count * rows.hidden
    if p != size:
        wide = Tensor("moe.wide", elements, p)
        ops.append(Move("moe.widen", (x,), (wide,), role="moe"))
        x = wide.name
    out = Tensor("moe.summed", elements / ranks, p)
    op, x = exchange("moe.reduce", x, out, "reduce_scatter", "all_gather", axis, elements * p)
    ops.append(op)
    if p != size:
        narrow = Tensor("moe.narrow", elements / ranks, size)
        ops.append(Move("moe.narrow", (x,), (narrow,), role="moe"))
        x = narrow.name
    return ops, x


# --- all-gather ----------------------------------------------------------------------------------------------------------


def _gathered(rows: Rows, x: str, probs: str) -> tuple[list[Op], DispatchedTensors]:
    size, p, experts = rows.shard.itemsize, rows.prob, rows.moe.n_experts
    every = rows.tokens * rows.ranks
    ops: list[Op] = []
    if rows.spread:
        ops.append(Comm("moe.map", kind="all_gather", axis="ep_etp", bytes=every * experts * BOOL, role="moe"))
        out = Tensor("moe.every.probs", every * experts, p)
        op, probs = exchange("moe.gather.probs", probs, out, "all_gather", "reduce_scatter", "ep_etp", out.bytes)
        ops.append(op)
        out = Tensor("moe.every", every * rows.hidden, size, pooled=True)
        op, x = exchange("moe.gather", x, out, "all_gather", "reduce_scatter", "ep_etp", out.bytes)
        ops.append(op)
    local = rows.local_experts
    kept = maps(rows, every, local, rows.here)
    if rows.shard.software.moe.permute_fusion:  # index operations extract the masks of the local experts in either case
        kept += (Tensor("moe.mask", every * local, BOOL), Tensor("moe.mask.probs", every * local, p))
    # self.local_map; that of one expert, or on one rank the router's own, is kept for backward anyway
    kept_anyway = not rows.several or (rows.map_kept and not rows.spread)
    mask_bytes = 0.0 if kept_anyway else BOOL * every * local
    op, sent = permute(rows, "moe.permute", (x, probs), rows.here, kept, mask_bytes)
    return [*ops, op], sent


def _scattered(rows: Rows, x: str) -> tuple[list[Op], str]:
    every = rows.tokens * rows.ranks
    op, x = unpermute(rows, "moe.unpermute", x, rows.here, every, kept_by_sum(rows, x))
    if not rows.spread:
        return [op], x
    reduction, x = reduce_rows(rows, x, every, rows.ranks, "ep_etp")
    return [op, *reduction], x


# --- DeepEP, HybridEP ----------------------------------------------------------------------------------------------------


def arriving(rows: Rows) -> Num:
    """R: rows that arrive, one for each token with any local expert, from all ranks."""
    return rows.tokens * rows.routing.distinct(1.0 * rows.shard.ep) * rows.shard.etp * rows.load


def own_buffers(rows: Rows) -> Literal["", "both"]:
    """`Tensor.outside` of the rows of tokens that arrive, and of those that return summed: both with HybridEP's own buffers.

    Rows are copied between these and tensors in the order of experts (deepseek-ai/DeepEP@94a9f8f csrc/hybrid_ep/executor/
    executor.cu, dispatch_postprocess and combine_preprocess).
    """
    how = rows.shard.software.moe
    return "both" if how.dispatcher == "flex" and how.flex_backend == "hybridep" and rows.spread else ""


def _exchanged(rows: Rows, x: str, probs: str) -> tuple[list[Op], DispatchedTensors]:
    shard, k = rows.shard, rows.moe.experts_per_token
    away = own_buffers(rows)
    count = arriving(rows)
    indices = Tensor("moe.flex.indices", rows.tokens * k * shard.etp, INT64)
    valid = Tensor("moe.flex.valid", count * k * shard.etp, BOOL)
    back = Tensor("moe.flex.rows", 2.0 * rows.here, INT64)
    out = Tensor("moe.arrived", count * rows.hidden, shard.itemsize, outside=away)
    local = Tensor("moe.arrived.probs", count * rows.local_experts, rows.prob, outside=away)
    get = Comm(
        "moe.dispatch",
        (x, probs),
        (out, local),
        (indices.name, valid.name, back.name),
        (indices, valid, back),
        kind="all_to_all",
        backward="all_to_all",
        axis="ep_etp",
        bytes=out.bytes,
        routing=rows.routing,
        role="moe",
        step="dispatch",
        score_bytes=dense_scores(rows, count),
    )
    kept = maps(rows, count, rows.local_experts, rows.here)
    op, sent = permute(rows, "moe.permute", (out.name, local.name), rows.here, kept)
    return [*gathered_maps(rows), get, op], sent


def gathered_maps(rows: Rows) -> list[Op]:
    """HybridEP's all-gather of which token goes to which expert, one byte a pair, of all ranks.

    Forward makes a handle from it, which backward uses too, and frees it (deepseek-ai/DeepEP@94a9f8f csrc/hybrid_ep/hybrid_ep.cu,
    metadata_preprocessing; executor/executor.cu, allgather_routing_map); its buffer is not in the plan's memory.
    """
    if not own_buffers(rows):
        return []
    every = BOOL * rows.tokens * rows.ranks * rows.moe.n_experts
    return [Comm("moe.map", kind="all_gather", axis="ep_etp", bytes=every, routing=rows.routing, role="moe")]


def dense_scores(rows: Rows, count: Num) -> Num:
    """Bytes of the scores of `count` rows for one expert, which HybridEP sends for every expert of the receiver's node.

    Forward with the tokens, in backward their gradients with those of the tokens (deepseek-ai/DeepEP@94a9f8f
    docs/Hybrid-EP_Implementation.md, prob_buffer). DeepEP sends those of the token's own experts, which are few.
    """
    return FP32 * count if rows.shard.software.moe.flex_backend == "hybridep" else 0.0


def _returned(rows: Rows, x: str) -> tuple[list[Op], str]:
    count, size = arriving(rows), rows.shard.itemsize
    op, x = unpermute(rows, "moe.unpermute", x, rows.here, count, kept_by_sum(rows, x))
    op = replace(op, outputs=(op.outputs[0]._replace(outside=own_buffers(rows)),))
    out = Tensor("moe.returned", rows.tokens * rows.hidden, size)
    bytes_ = count * rows.hidden * size
    back, x = exchange(
        "moe.combine", x, out, "all_to_all", "all_to_all", "ep_etp", bytes_, routing=rows.routing, step="combine"
    )
    return [op, back], x
