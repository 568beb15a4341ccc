"""Context parallelism of torch: torch/distributed/tensor/experimental/_context_parallel/_attention.py (torch 2.13)."""

from __future__ import annotations

from typing import Any

from steptime.base.num import Num, minimum
from steptime.model.ops import Op
from steptime.model.shared_sequence import Local, Names, exchange
from steptime.model.sublayers import FP32


def torch_ring(local: Local, qkv: Names) -> list[Op]:
    """Attention of torch's _templated_ring_attention: keys and values gathered at once or passed on; gradients passed on in fp32.

    A call is issued before a block and waited for after it; the last of the gradients' cp exchanges overlaps nothing.
    Partial outputs are merged step by step in fp32 by eager kernels (_SDPAMerger), gradients added in fp32.
    """
    cp, size = local.shard.cp, local.shard.itemsize
    out, lse = local.out, local.lse
    hands_on = local.shard.cp_comm_type == "p2p"
    turns, blocks_held = hand_on(local) if hands_on else gather_at_once(local)
    q_fp32, kv_fp32, out_fp32 = FP32 * local.q, FP32 * local.kv, FP32 * out.elements
    cast, add = (
        size + FP32,
        3.0 * FP32,
    )  # bytes per element: one dtype read and the other written; two operands read, one written
    # every block's output up, the merged one down; a difference, a product and a sum for each block after the first
    merge_outputs = out.elements * (cast * (cp + 1.0) + 3.0 * add * (cp - 1.0))
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
        merge_kernels=8.0 * cp,
        # keys and values received; in fp32 the merged output, a block's, their difference, its share
        forward_temp_bytes=blocks_held + 4.0 * out_fp32 + 2.0 * lse.bytes,
        backward_temp_bytes=blocks_held + q_fp32 + key_gradient_bytes(local, hands_on=hands_on),
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
