"""The mixers of Gated DeltaNet and Kimi Delta Attention: projections, short convolutions, gates, the delta rule in chunks.

Sources and letters: `linear_attention.py`. What the kernels keep and hold: flash-linear-attention v0.5.2,
fla/ops/gated_delta_rule/chunk.py (ChunkGatedDeltaRuleFunction) and fla/ops/kda/chunk.py (ChunkKDAFunction).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.base.num import same
from steptime.model.ops import Gemm, Move, Op, Param, Tensor
from steptime.model.quantize import cast
from steptime.model.scans import Chunked
from steptime.model.sublayers import FP32, Sublayer, casts, linear, linear_params, norm

if TYPE_CHECKING:
    from steptime.base.num import Num
    from steptime.model.model import LinearAttention, Model
    from steptime.model.quantize import Operand
    from steptime.model.shard import Shard

CHUNK = 64
"""Tokens per chunk of the library's kernels."""
KDA_SLOWNESS = 1.67
"""Forward time of KDA divided by that of Gated DeltaNet at the same shape: 1.82 and 1.78 on GB200, 1.51 and 1.58 on H20, 96 and
64 heads of 128, 8,192 tokens (MoonshotAI/FlashKDA README)."""
DELTA_BACKWARD = 2.7
"""Backward time of the gated delta rule divided by forward: 2.7, 2.5 and 2.8 on GB200, heads of 128, 32,768 tokens and fewer
(benchmarks of fla-org/flash-linear-attention)."""


def gated_delta_net(model: Model, of: LinearAttention, shard: Shard, x: Operand) -> Sublayer:
    """q, k, v, gate, beta and alpha by one projection, convolution, unit-length q and k, gates, delta rule, gated norm."""
    t, size, (keys, values) = shard.tokens, shard.itemsize, of.widths
    heads, qk, v = of.n_value_heads / shard.tp, keys / shard.tp, values / shard.tp
    outputs = 2 * (keys + values + of.n_value_heads)
    width = outputs / shard.tp
    weight = (Param("attn.in_proj.weight", (outputs, model.hidden_sz), 0),)
    project = linear(
        "attn.in_proj", x, "attn.qkvz", model.hidden_sz, width, shard, weight, casts(shard, width, model.hidden_sz)
    )
    channels = Tensor("attn.channels", t * (2.0 * qk + v), size)
    mixed = Tensor("attn.conv.out", channels.elements, size)
    kernel = Param("attn.conv.weight", (2 * keys + values, 1, of.conv_width), 0)
    ops: list[Op] = [
        project,
        copy("attn.conv.turn", "attn.qkvz", channels),
        Move("attn.conv", (channels.name,), (mixed,), (channels.name,), (), (kernel,)),
    ]
    read = []
    for name in ("q", "k"):
        projected, unit = unit_length(f"attn.{name}", mixed.name, t * qk, t * of.n_key_heads / shard.tp, size)
        ops += projected
        if of.n_value_heads > of.n_key_heads:
            spread = Tensor(f"attn.{name}.spread", t * heads * of.key_head_dim, size)
            ops.append(Move(f"attn.{name}.repeat", (unit,), (spread,)))
            unit = spread.name
        read.append(unit)
    value, gate = Tensor("attn.v", t * v, size), Tensor("attn.gate", t * v, size)
    ops += [
        copy("attn.v.copy", mixed.name, value),
        copy("attn.gate.copy", "attn.qkvz", gate),
        decay(of, t * heads, shard),
    ]
    rule = delta_rule(of, shard, (*read, value.name, "attn.decay", "attn.beta"), heads)
    normed, y = gated_norm(model, of, shard, gate.name, heads)
    ops += [rule, *normed]
    if same(shard.batch == 1):  # a single sequence is already in the right order
        return ops, y
    turned = Tensor("attn.mixed.turned", t * v, size)
    return [*ops, Move("attn.mixed.turn", (y,), (turned,))], turned.name


def copy(name: str, of: str, out: Tensor) -> Op:
    """A contiguous copy of part of a tensor."""
    return Move(name, (of,), (out,), forward_bytes=2.0 * out.bytes, backward_bytes=2.0 * out.bytes)


def unit_length(name: str, of: str, elements: Num, rows: Num, size: float) -> Sublayer:
    """Heads copied and normalized to length one; keeps them and one fp32 number each (fla/modules/l2norm.py, L2NormFunction)."""
    own, out = Tensor(f"{name}.own", elements, size), Tensor(name, elements, size)
    length = Tensor(f"{name}.length", rows, FP32)
    normed = Move(f"{name}.norm", (own.name,), (out,), (out.name, length.name), (length,))
    return [copy(f"{name}.copy", of, own), normed], out.name


def decay(of: LinearAttention, elements: Num, shard: Shard) -> Op:
    """The log decay -exp(A_log) softplus(alpha + dt_bias) in fp32 and beta's sigmoid, kernel by kernel.

    Kept are softplus's input and output, exp(A_log) and its negative, and the sigmoid's output.
    """
    size, heads = shard.itemsize, of.n_value_heads / shard.tp
    log, beta = Tensor("attn.decay", elements, FP32), Tensor("attn.beta", elements, size)
    before, after = Tensor("attn.decay.in", elements, FP32), Tensor("attn.decay.softplus", elements, FP32)
    rates = Tensor("attn.decay.rates", 2.0 * heads, size)
    params = tuple(Param(f"attn.{name}", (of.n_value_heads,), 0) for name in ("dt_bias", "A_log"))
    moved = elements * (2.0 * 3.0 * size + 4.0 * 2.0 * FP32)  # copies and sigmoid; upcast, sum, softplus and product
    kept = (before, after, rates)
    names = (beta.name, *(tensor.name for tensor in kept))
    return Move("attn.gates", ("attn.qkvz",), (log, beta), names, kept, params, moved, moved, kernels=9.0)


def delta_rule(of: LinearAttention, shard: Shard, inputs: tuple[str, ...], heads: Num) -> Op:
    """The chunked kernel: keeps its inputs, decays summed over chunks instead of the decays, and a C x C matrix a chunk and head.

    In addition to its output forward holds w, u, the new values and the states of all chunks; backward recomputes these and has
    the states' gradient, and besides the returned gradients those of w, of values before and of keys after
    (chunk_gated_delta_rule_bwd).
    """
    t, size, (k, v) = shard.tokens, shard.itemsize, (of.key_head_dim, of.value_head_dim)
    q_name, k_name, v_name, _, beta = inputs
    sums, matrix = Tensor("attn.decay.sums", t * heads, FP32), Tensor("attn.rule.matrix", t * heads * CHUNK, size)
    states = t / CHUNK * heads * k * v * size
    return Chunked(
        "attn.rule",
        inputs,
        (Tensor("attn.rule.out", t * heads * v, size),),
        (q_name, k_name, v_name, beta, sums.name, matrix.name),
        (sums, matrix),
        tokens=t,
        seq=shard.seq,
        n_heads=heads,
        d_k=k,
        d_v=v,
        chunk_sz=CHUNK,
        delta=True,
        backward_times=DELTA_BACKWARD,
        counted=counted(of, shard.tp),
        forward_temp_bytes=t * heads * (k + 2.0 * v) * size + states,
        backward_temp_bytes=t * heads * 3.0 * (k + v) * size + 2.0 * states,
    )


def gated_norm(model: Model, of: LinearAttention, shard: Shard, gate: str, heads: Num) -> Sublayer:
    """RMSNorm of each head's output, times the SiLU of a gate.

    The norm keeps its input and one fp32 number a head; torch.compile makes one kernel of the rest, which keeps what it reads
    (`jit_fuser` on _apply_gated_norm).
    """
    rows = shard.tokens * heads
    normed, y = norm("attn.out_norm", "attn.rule.out", rows, of.value_head_dim, model, shard, "")
    gated = Tensor("attn.gated", rows * of.value_head_dim, shard.itemsize)
    return [*normed, Move("attn.gated", (y, gate), (gated,), (y, gate))], gated.name


def kimi_delta(model: Model, of: LinearAttention, shard: Shard, x: Operand) -> Sublayer:
    """q, k and v each projected and convolved, decays and output gate through a width of one head, delta rule, gated norm."""
    t, size, hidden, (keys, values) = shard.tokens, shard.itemsize, model.hidden_sz, of.widths
    ops: list[Op] = []
    for name, width in (("q", keys), ("k", keys), ("v", values)):
        project = projection(f"attn.{name}_proj", x, hidden, width, shard)
        [before], kernel = project.outputs, Param(f"attn.{name}_conv.weight", (width, 1, of.conv_width))
        out = Tensor(f"attn.{name}", t * width, size)
        ops += [project, Move(f"attn.{name}_conv", (before.name,), (out,), (before.name,), (), (kernel,))]
    projected, decays = through_a_head(of, x, "f", keys, hidden, shard)
    beta = projection("attn.b_proj", x, hidden, of.n_value_heads, shard)
    rule = kimi_rule(of, shard, ("attn.q", "attn.k", "attn.v", decays, beta.outputs[0].name))
    ops += [*projected, beta, rule]
    projected, gate = through_a_head(of, x, "g", values, hidden, shard)
    out = Tensor("attn.gated", t * values, size)
    length = Tensor("attn.out_norm.rstd", t * of.n_value_heads, FP32)
    weight = (Param("attn.out_norm.weight", (of.value_head_dim,)),)
    read = ("attn.rule.out", gate)
    return [*ops, *projected, Move("attn.out_norm", read, (out,), (*read, length.name), (length,), weight)], out.name


def projection(name: str, x: Operand, k: int, n: int, shard: Shard) -> Gemm:
    """A projection without a bias, replicated on every device."""
    return linear(name, x, f"{name}.out", k, n, shard, linear_params(name, (n, k), bias=False), casts(shard, n, k))


def through_a_head(of: LinearAttention, x: Operand, which: str, width: int, hidden: int, shard: Shard) -> Sublayer:
    """Two projections with one head's width between them."""
    down = projection(f"attn.{which}_a_proj", x, hidden, of.value_head_dim, shard)
    quantized, read = cast(f"attn.{which}_a", down.outputs[0].name, shard.tokens * of.value_head_dim, shard)
    up = projection(f"attn.{which}_b_proj", read, of.value_head_dim, width, shard)
    return [down, *quantized, up], up.outputs[0].name


def kimi_rule(of: LinearAttention, shard: Shard, inputs: tuple[str, ...]) -> Op:
    """The chunked kernel with its gates: q and k are brought to length one, beta and the decays made, inside.

    It keeps both of these q and k with a number each, v, the decays' input, beta before and after its sigmoid, and two C x C
    matrices a chunk and head. Forward holds the summed decays in fp32, w, u, scaled keys, new values, states; backward these
    with scaled queries, the states' gradient, those of values before and after, and twice those of q, k and decays in fp32 with
    the matrices'.
    """
    t, size, (k, v) = shard.tokens, shard.itemsize, (of.key_head_dim, of.value_head_dim)
    rows = t * of.n_value_heads
    _, _, value, decays, beta = inputs
    kept = (
        *(Tensor(f"attn.{name}.unit", t * of.widths[0], size) for name in ("q", "k")),
        *(Tensor(f"attn.{name}.length", t * of.n_key_heads, FP32) for name in ("q", "k")),
        Tensor("attn.beta", rows, FP32),
        *(Tensor(f"attn.rule.{name}", rows * CHUNK, size) for name in ("qk", "kk")),
    )
    log, dt = (Param("attn.A_log", (of.n_value_heads,)), Param("attn.dt_bias", (of.n_value_heads * k,)))
    states = t / CHUNK * of.n_value_heads * k * v * size
    return Chunked(
        "attn.rule",
        inputs,
        (Tensor("attn.rule.out", rows * v, size),),
        (value, decays, beta, *(tensor.name for tensor in kept)),
        kept,
        (log, dt),
        tokens=t,
        seq=shard.seq,
        n_heads=1.0 * of.n_value_heads,
        d_k=k,
        d_v=v,
        chunk_sz=CHUNK,
        delta=True,
        slowness=KDA_SLOWNESS,
        backward_times=DELTA_BACKWARD,
        counted=counted(of, shard.tp),
        forward_temp_bytes=rows * (FP32 * k + (2.0 * k + 2.0 * v) * size) + states,
        backward_temp_bytes=rows * (FP32 * (7.0 * k + 2.0 * CHUNK) + (3.0 * k + 4.0 * v) * size) + 2.0 * states,
    )


def counted(of: LinearAttention, tp: Num) -> Num:
    """FLOPs per token that frameworks count of the delta rule, 2 * 4 V^2 a head, and of the convolutions before it.

    NVIDIA/Megatron-LM megatron/training/training.py, num_floating_point_operations.
    """
    keys, values = of.widths
    return 2.0 * (4.0 * of.n_value_heads * of.value_head_dim**2 + of.conv_width * (2.0 * keys + values)) / tp
