"""Attention over the ranks that share a sequence (context parallelism): what they exchange, keep and move.

Each rank holds chunks i and 2cp-1-i of a sequence cut into 2cp, so that under a causal mask all have the same work. Names of
functions are those of transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py
(NVIDIA/TransformerEngine@9c61cd7), but for torch's ring. Bytes moved by merging are those of the last rank, which merges most
and so sets the ring's pace.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from steptime.base.num import Num, maximum, minimum
from steptime.model.context_launches import gather_launches, heads_launches, ring_launches, together
from steptime.model.ops import Attention, Axis, Comm, Move, Op, Tensor
from steptime.model.shared_sequence import Local, Names, exchange
from steptime.model.sublayers import FP32


def context_parallel(local: Local, qkv: Names, **mask: Any) -> list[Op]:
    """Ops of attention over cp ranks by cp_comm_type: p2p, all_gather, a2a or a2a+p2p.

    `qkv`: names of query, key and value. Those of latent attention are exchanged per head, the key's rope part once for each.
    `mask`: share of the scores inside a window, mean over the ranks, and the sinks; a ring has neither.
    """
    how = local.shard.cp_comm_type
    if how == "a2a":
        return ulysses(local, qkv, mask)
    if local.shard.software.kernels.cp_impl == "torch":
        return torch_ring(local, qkv)
    if how == "a2a+p2p":
        return ring_of_heads(local, qkv)
    if how == "all_gather":
        return gathered(local, qkv, mask)
    calls, kernel = ring(local, qkv, local.shard.cp)
    return [*calls, kernel]


def ring(local: Local, qkv: Names, cp: Num, axis: Axis = "cp") -> tuple[list[Op], Attention]:
    """Keys and values are passed around a ring of `cp` ranks (AttnFuncWithCPAndKVP2P; Liu et al. 2023, Ring Attention).

    Forward: cp kernel calls and cp - 1 exchanges; that of the next block overlaps the call on this one. Backward goes round once
    more from where forward ended: cp calls and cp exchanges, of keys and values but for the last, of their gradients but for the
    first. Forward holds every block and every partial output until the log-sum-exp is known, which corrects them one by one;
    it keeps the block that came last, not its own. Backward holds two buffers of keys, values and their gradients, and one
    partial gradient of the query.
    """
    q, kv, size = local.q_bytes, local.kv_bytes, local.shard.itemsize
    merge = 3.0 * cp - 1.0  # the first partial result is written, the others read, added and written
    out, lse, last = local.out, local.lse, Tensor("attn.core.kv", local.kv, size)
    kernel = local.kernel(
        qkv,
        out,
        (qkv[0], last.name, out.name, lse.name),
        stats=(lse, last),
        calls=cp,
        merge_forward_bytes=merge * out.bytes + 2.0 * kv,
        merge_backward_bytes=merge * (q + kv) + 2.0 * kv,
        merge_kernels=2.0 * cp,
        launches=ring_launches(cp),
        forward_temp_bytes=cp * (kv + out.bytes + lse.bytes) - kv,
        backward_temp_bytes=4.0 * kv + q,
    )
    mean = 2.0 * kv * (cp - 1.0) / cp
    share: dict[str, Any] = {"axis": axis, "attention_share": 1.0 / cp}
    return [
        exchange("ring", kind="send_recv", bytes=kv, count=cp - 1.0, **share),
        exchange("ring_grad", backward="send_recv", bytes=mean, count=1.0 * cp, **share),
    ], kernel


def ring_of_heads(local: Local, qkv: Names) -> list[Op]:
    """A ring between groups of adjacent ranks, inside which an all-to-all distributes the heads (a2a+p2p; arXiv 2405.07719, USP).

    The ring's autograd function exchanges query, keys and values before it and the output after it; backward exchanges the
    output, which is kept as the projection reads it, and its gradient, then the three gradients. None of these is overlapped.
    Chunks are put in order before and after each, a copy each. TransformerEngine up to 2.14; from 2.15 on the output of a rank's
    own heads is kept in addition to the other, and backward does not exchange it.
    """
    shard, (q, k, v) = local.shard, (local.q_bytes, local.k * local.shard.itemsize, local.v * local.shard.itemsize)
    inner, moved = shard.cp_a2a, local.q_bytes + local.kv_bytes
    calls, kernel = ring(local, qkv, shard.cp / inner, "cp_p2p")
    out, mine = local.out, Tensor("attn.core.q.heads", local.q, shard.itemsize)

    def swap(part: str, bytes_: Num, *, backward_only: bool = False) -> Op:
        kind = None if backward_only else "all_to_all"
        return exchange(f"{part}_a2a", kind=kind, backward="all_to_all", bytes=bytes_, axis="cp_a2a")

    kernel = replace(
        kernel,
        q_len=shard.seq * inner,
        n_q_heads=local.n_q / inner,
        n_kv_heads=local.n_kv / inner,
        saves=(mine.name, *kernel.saves[1:]),
        stats=(*kernel.stats, mine),
        merge_forward_bytes=kernel.merge_forward_bytes + 4.0 * (moved + out.bytes),
        merge_backward_bytes=kernel.merge_backward_bytes + 4.0 * (moved + 2.0 * out.bytes),
        merge_kernels=kernel.merge_kernels + 9.0,  # two a tensor: of four in forward, of five in backward
        launches=together(kernel.launches, heads_launches(output_in_backward=True)),
        # keys and values of its heads; the merged output, the copy that was sent, what came
        forward_temp_bytes=kernel.forward_temp_bytes + k + v + 3.0 * out.bytes,
        # output and its gradient of its heads; the gradients' copies that were sent, what came, the last of them in order
        backward_temp_bytes=kernel.backward_temp_bytes + 2.0 * out.bytes + 2.0 * moved + v,
    )
    before = [swap("q", q), swap("k", k), swap("v", v)]
    return [*before, *calls, kernel, swap("out", out.bytes), swap("out_again", out.bytes, backward_only=True)]


def gathered(local: Local, qkv: Names, mask: dict[str, Any]) -> list[Op]:
    """Keys and values of the whole sequence on every rank (AttnFuncWithCPAndKVAllGather; Llama 3, section 3.3.2).

    One kernel call per chunk of the query. Backward gathers again and reduce-scatters the gradients, without overlap. The
    partial outputs are saved, and so is the output into which they are copied.
    """
    shard, (q, k, v) = local.shard, qkv
    size, whole = shard.itemsize, local.kv_bytes * shard.cp
    gathers = [
        Comm(
            f"attn.core.{part}_gather",
            (name,),
            (Tensor(f"attn.core.{part}.whole", elements * shard.cp, size),),
            kind="all_gather",
            backward="reduce_scatter",
            axis="cp",
            bytes=elements * shard.cp * size,
            regather=True,
            role="core_attn",
        )
        for part, name, elements in (("k", k, local.k), ("v", v, local.v))
    ]
    out = local.out
    steps = out._replace(name="attn.core.steps")
    inputs = (q, "attn.core.k.whole", "attn.core.v.whole")
    kernel = local.kernel(
        inputs,
        steps,
        (q, k, v, steps.name, local.lse.name),
        calls=2.0,
        # chunks reordered; the query's two chunks made contiguous
        merge_forward_bytes=2.0 * whole + 2.0 * local.q_bytes,
        # that again, and of the output's gradient; gradients of the whole zeroed, added to per chunk, put in order
        merge_backward_bytes=2.0 * whole + 6.0 * whole + 4.0 * local.q_bytes + 2.0 * out.bytes,
        merge_kernels=6.0,
        launches=gather_launches(shard.batch, flash=shard.software.batch_first_attention),
        forward_temp_bytes=maximum(local.k, local.v) * shard.cp * size,
        backward_temp_bytes=2.0 * whole,
        **mask,
    )
    copy = Move(
        "attn.core.copy", (steps.name,), (out,), forward_bytes=2.0 * out.bytes, same_grad=True, role="core_attn"
    )
    return [*gathers, kernel, copy]


def ulysses(local: Local, qkv: Names, mask: dict[str, Any]) -> list[Op]:
    """All-to-all from tokens to heads: a rank attends over the whole sequence with 1/cp of the heads, and back.

    Jacobs et al. 2023, DeepSpeed Ulysses. The kernel keeps its own output, and the projection keeps the exchanged one
    (TransformerEngine 2.8 and later, AttnFuncWithCPAndQKVOA2A, out_part; deepspeed/sequence/layer.py, _SeqAllToAll). Chunks are
    put in order before and after each exchange, a copy each.
    """
    shard, (q, k, v) = local.shard, qkv
    size, cp, moved = shard.itemsize, shard.cp, local.q_bytes + local.kv_bytes

    def swap(part: str, name: str, sent: Tensor) -> Comm:
        return Comm(
            f"attn.core.{part}_a2a", (name,), (sent,), kind="all_to_all", backward="all_to_all", axis="cp",
            bytes=sent.bytes, role="core_attn",
        )  # fmt: skip

    counts = (("q", q, local.q), ("k", k, local.k), ("v", v, local.v))
    of_heads = [Tensor(f"attn.core.{part}.heads", elements, size) for part, _, elements in counts]
    swaps = [swap(part, name, tensor) for (part, name, _), tensor in zip(counts, of_heads, strict=True)]
    out = local.out
    inner = out._replace(name="attn.core.out.heads")
    names = (of_heads[0].name, of_heads[1].name, of_heads[2].name)
    kernel = local.kernel(
        names,
        inner,
        (*names, inner.name, local.lse.name),
        q_len=shard.kv_seq,
        n_q_heads=local.n_q / cp,
        n_kv_heads=local.n_kv / cp,
        merge_forward_bytes=4.0 * (moved + out.bytes),
        merge_backward_bytes=4.0 * (moved + out.bytes),
        merge_kernels=8.0,
        launches=together((1.0, 1.0), heads_launches(indices=shard.software.kernels.cp_impl == "transformer_engine")),
        # the tensors before the exchange, and the copies that were sent
        forward_temp_bytes=2.0 * moved,
        backward_temp_bytes=2.0 * moved,
        **mask,
    )
    return [*swaps, kernel, swap("out", inner.name, out)]


def torch_ring(local: Local, qkv: Names) -> list[Op]:
    """Torch's ring: keys and values gathered at once or passed on, gradients passed on in fp32.

    torch 2.13 torch/distributed/tensor/experimental/_context_parallel/_attention.py, _templated_ring_attention. A call is issued
    before a block and waited for after it; the last of the gradients' cp exchanges overlaps nothing. Partial outputs are merged
    step by step in fp32 by eager kernels (_SDPAMerger), gradients added in fp32. Inductor fuses the merges of up to four blocks
    into one kernel (of eight into three), and packs gradients where it adds them.
    """
    cp, size = local.shard.cp, local.shard.itemsize
    out, lse = local.out, local.lse
    hands_on = local.shard.cp_comm_type == "p2p"
    turns, live_blocks = hand_on(local) if hands_on else gather_at_once(local)
    q_fp32, kv_fp32, out_fp32 = FP32 * local.q, FP32 * local.kv, FP32 * out.elements
    # bytes per element: one dtype read and the other written; two operands read, one written
    cast, add = size + FP32, 3.0 * FP32
    # every block's output up, the merged one down; a difference, a product and a sum for each block after the first
    merge_outputs = out.elements * (cast * (cp + 1.0) + 3.0 * add * (cp - 1.0))
    if compiled := local.shard.software.kernels.compile != "none":
        merge_outputs = out.elements * size * (cp + 1.0)  # every block's output read, the merged one written
    put_in_order = 2.0 * local.kv_bytes
    # all gradients zeroed in fp32, each block's cast up and added, the sum cast down
    add_gradients = (local.q + local.kv) * (FP32 + (cast + FP32) * cp + cast)
    pack_for_exchange = kv_fp32 * 2.0 * cp
    kernel = local.kernel(
        qkv,
        out,
        (*qkv, out.name, lse.name),
        calls=cp,
        merge_forward_bytes=merge_outputs + put_in_order,
        merge_backward_bytes=add_gradients + pack_for_exchange,
        merge_kernels=(2.0 if compiled else 8.0) * cp,
        # keys and values received; in fp32 the merged output, a block's, their difference, its share
        forward_temp_bytes=live_blocks + 4.0 * out_fp32 + 2.0 * lse.bytes,
        backward_temp_bytes=live_blocks + q_fp32 + key_gradient_bytes(local, hands_on=hands_on),
    )
    grads = {"backward": "send_recv", "bytes": kv_fp32}
    return [
        exchange("ring" if hands_on else "gather", attention_share=1.0 / cp, **turns),
        exchange("ring_grad", count=cp - 1.0, attention_share=1.0 / cp, **grads),
        exchange("last_grad", **grads),
        kernel,
    ]


def hand_on(local: Local) -> tuple[dict[str, Any], Num]:
    """The exchanges of torch's ring that passes keys and values on, and the bytes of blocks that a rank holds at most: two."""
    cp = local.shard.cp
    turns = {"kind": "send_recv", "backward": "send_recv", "bytes": local.kv_bytes, "count": cp - 1.0}
    return turns, minimum(cp - 1.0, 2.0) * local.kv_bytes


def gather_at_once(local: Local) -> tuple[dict[str, Any], Num]:
    """The same for keys and values gathered at once, all of which a rank holds."""
    whole = local.kv_bytes * local.shard.cp
    return {"kind": "all_gather", "backward": "all_gather", "bytes": whole}, 1.0 * local.shard.cp * local.kv_bytes


def key_gradient_bytes(local: Local, *, hands_on: bool) -> Num:
    """Bytes that torch's ring holds besides dk and dv at the worst step of backward.

    Handing on, the last one: in fp32 what came, the sum, what is sent and what comes; the keys and values sent last, less half a
    block. Gathered, the second one: in fp32 three of these, and keys and values copied three times.
    """
    kv_fp32 = FP32 * local.kv
    return 4.0 * kv_fp32 + 0.5 * local.kv_bytes if hands_on else 3.0 * kv_fp32 + 3.0 * local.kv_bytes
