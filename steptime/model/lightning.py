"""The mixer of Lightning Attention: one projection, its activation, a kernel with a fixed decay a head, a gated norm.

transformers 4.57.1 modeling_minimax.py, MiniMaxLightningAttention, over flash-linear-attention v0.5.2 fla/ops/simple_gla/chunk.py
(chunk_lightning_attn, ChunkSimpleGLAFunction) instead of its loop in Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.model.delta_rule import CHUNK, projection
from steptime.model.ops import Move, Op, Tensor
from steptime.model.scans import Chunked
from steptime.model.sublayers import FP32, Sublayer, norm

if TYPE_CHECKING:
    from steptime.model.model import LinearAttention, Model
    from steptime.model.quantize import Operand
    from steptime.model.shard import Shard

BACKWARD = 2.1
"""Backward time divided by forward time with a fixed decay: 2.3, 1.7 and 2.5 on GB200, heads of 128, 32,768 tokens and fewer
(benchmarks of fla-org/flash-linear-attention)."""


def lightning(model: Model, of: LinearAttention, shard: Shard, x: Operand) -> Sublayer:
    """q, k and v through SiLU, the kernel, RMSNorm over all heads, times the sigmoid of a gate."""
    t, size, hidden, (keys, values) = shard.tokens, shard.itemsize, model.hidden_sz, of.widths
    project = projection("attn.qkv", x, hidden, 2 * keys + values, shard)
    before = project.outputs[0]
    active = before._replace(name="attn.qkv.silu")
    own = tuple(Tensor(f"attn.{name}", t * width, size) for name, width in (("q", keys), ("k", keys), ("v", values)))
    ops: list[Op] = [
        project,
        Move("attn.silu", (before.name,), (active,), (before.name,)),
        Move("attn.split", (active.name,), own, kernels=3.0),
        kernel(of, shard, tuple(tensor.name for tensor in own)),
    ]
    normed, y = norm("attn.out_norm", "attn.rule.out", t, values, model, shard, "")
    gate = projection("attn.gate", x, hidden, values, shard)
    sigmoid, out = Tensor("attn.gate.sigmoid", t * values, size), Tensor("attn.gated", t * values, size)
    ops += [*normed, gate, Move("attn.gate.act", (gate.outputs[0].name,), (sigmoid,), (sigmoid.name,))]
    return [*ops, Move("attn.gated", (y, sigmoid.name), (out,), (y, sigmoid.name))], out.name


def kernel(of: LinearAttention, shard: Shard, qkv: tuple[str, ...]) -> Op:
    """The chunked kernel: keeps q, k, v and a decay per head; holds the states, in backward with their gradient, both in fp32.

    Counted are the products into and out of the states, 4 K V a head.
    """
    t, size, (k, v), heads = shard.tokens, shard.itemsize, (of.key_head_dim, of.value_head_dim), of.n_value_heads
    decays = Tensor("attn.rule.decays", 1.0 * heads, FP32)
    states = t / CHUNK * heads * k * v
    return Chunked(
        "attn.rule",
        qkv,
        (Tensor("attn.rule.out", t * heads * v, size),),
        (*qkv, decays.name),
        (decays,),
        tokens=t,
        seq=shard.seq,
        n_heads=1.0 * heads,
        d_k=k,
        d_v=v,
        chunk_sz=CHUNK,
        backward_times=BACKWARD,
        counted=4.0 * heads * k * v,
        forward_temp_bytes=states * size,
        backward_temp_bytes=2.0 * states * FP32,
    )
