"""Linear attention in place of attention: norm, one of three mixers, output projection, residual.

Gated DeltaNet as in Megatron-Core (megatron/core/ssm/gated_delta_net.py, 0.16.1, with causal_conv1d), Kimi Delta Attention as
flash-linear-attention v0.5.2 does (fla/layers/kda.py), Lightning Attention as in MiniMax-Text-01 (transformers 4.57.1
modeling_minimax.py) over that library's kernel. Letters: T tokens, H heads, K and V widths of a head, C tokens of a chunk; on
this device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.model.delta_rule import CHUNK, gated_delta_net, kimi_delta, projection
from steptime.model.ops import Move, Op, Param, Tensor
from steptime.model.quantize import backward_casts, cast, cast_norm
from steptime.model.scans import Chunked
from steptime.model.sublayers import FP32, Sublayer, add_branch, enter_tp, leave_tp, linear, norm, norm_before

if TYPE_CHECKING:
    from steptime.model.model import LinearAttention, Model
    from steptime.model.quantize import Operand
    from steptime.model.shard import Shard

LIGHTNING_BACKWARD = 2.1
"""Backward time divided by forward time with a fixed decay: 2.3, 1.7 and 2.5 on GB200, heads of 128, 32,768 tokens and fewer
(benchmarks of fla-org/flash-linear-attention)."""


def lightning(model: Model, of: LinearAttention, shard: Shard, x: Operand) -> Sublayer:
    """Lightning Attention: q, k and v through SiLU, the kernel, RMSNorm over all heads, times the sigmoid of a gate.

    MiniMaxLightningAttention over flash-linear-attention v0.5.2 fla/ops/simple_gla/chunk.py (chunk_lightning_attn,
    ChunkSimpleGLAFunction) instead of its loop in Python.
    """
    t, size, hidden, (keys, values) = shard.tokens, shard.itemsize, model.hidden_sz, of.widths
    project = projection("attn.qkv", x, hidden, 2 * keys + values, shard)
    before = project.outputs[0]
    active = before._replace(name="attn.qkv.silu")
    own = tuple(Tensor(f"attn.{name}", t * width, size) for name, width in (("q", keys), ("k", keys), ("v", values)))
    ops: list[Op] = [
        project,
        Move("attn.silu", (before.name,), (active,), (before.name,)),
        Move("attn.split", (active.name,), own, kernels=3.0),
        lightning_kernel(of, shard, tuple(tensor.name for tensor in own)),
    ]
    normed, y = norm("attn.out_norm", "attn.rule.out", t, values, model, shard, "")
    gate = projection("attn.gate", x, hidden, values, shard)
    sigmoid, out = Tensor("attn.gate.sigmoid", t * values, size), Tensor("attn.gated", t * values, size)
    ops += [*normed, gate, Move("attn.gate.act", (gate.outputs[0].name,), (sigmoid,), (sigmoid.name,))]
    return [*ops, Move("attn.gated", (y, sigmoid.name), (out,), (y, sigmoid.name))], out.name


def lightning_kernel(of: LinearAttention, shard: Shard, qkv: tuple[str, ...]) -> Op:
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
        backward_times=LIGHTNING_BACKWARD,
        counted=4.0 * heads * k * v,
        forward_temp_bytes=states * size,
        backward_temp_bytes=2.0 * states * FP32,
    )


MIXERS = {"gated_delta_net": gated_delta_net, "kda": kimi_delta, "lightning": lightning}
"""Every kind: ops from the normalized tokens to the input of the output projection."""


def linear_attention_ops(model: Model, shard: Shard, out: str = "x2") -> list[Op]:
    """The half of a block that mixes tokens, from "x" to `out`.

    Raises:
        ValueError: the model has no linear attention.
    """
    of = model.linear_attention
    if of is None:
        raise ValueError("model.linear_attention: not set, so there is none")
    rows, hidden = shard.sequence_tokens, model.hidden_sz
    normed, n1 = norm_before("attn", "x", model, shard)
    normed, operand = cast_norm(normed, n1, rows * hidden, shard)
    entered, operand = enter_tp("attn", operand, hidden, shard, shard.software.recipe)
    mixed, y = MIXERS[of.kind](model, of, shard, operand)
    whole = of.widths[1]
    width = whole / shard.tp
    quantized, read = cast("attn.mixed", y, shard.tokens * width, shard)
    back = backward_casts(shard, shard.tokens, hidden, width, reduced=True)
    weight = (Param("attn.proj.weight", (hidden, whole), 1),)
    project = linear("attn.proj", read, "attn.proj.out", width, hidden, shard, weight, back)
    left, branch = leave_tp("attn", "attn.proj.out", hidden, shard)
    return [*normed, *entered, *mixed, *quantized, project, *left, *add_branch("attn", "x", branch, out, model, shard)]
