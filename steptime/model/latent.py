"""Latent attention (MLA) before its core: down projections, norms of the latents, up projections, rotary embedding.

Source: megatron/core/transformer/multi_latent_attention.py, MLASelfAttention (0.16.1); DeepSeek-V2, arXiv 2405.04434, 2.1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from steptime.model.latent_heads import torch_heads
from steptime.model.ops import Comm, Gemm, Move, Op, Param, Tensor
from steptime.model.quantize import Operand, backward_casts, cast, cast_norm
from steptime.model.sublayers import Sublayer, casts, enter_tp, linear, linear_params, norm
from steptime.software.performance import EAGER_TORCH

if TYPE_CHECKING:
    from steptime.model.model import Model
    from steptime.model.shard import Shard


def latent_ops(model: Model, shard: Shard, x: str) -> tuple[list[Op], tuple[str, str, str]]:
    """From the norm's output to query, key and value of all heads of this rank."""
    if shard.software.family in EAGER_TORCH:
        return torch_latent_ops(model, shard, x)
    of, hidden, rows = model.attention, model.hidden_sz, shard.sequence_tokens
    kv_rank, nope, rope_width, value = of.latent_widths
    ops, operand = cast("attn.latent", x, rows * hidden, shard)
    more: list[Op] = []
    q_from = operand
    if of.q_lora_rank is not None:
        more, q_from = latent(model, shard, operand, "q", of.q_lora_rank, of.q_lora_rank)
    ops = [*ops, *more]
    more, kv_from = latent(model, shard, operand, "kv", kv_rank, kv_rank + rope_width)
    ops += more
    rope = "attn.kv_down"
    if shard.sp and shard.split:  # all tokens need the rope part of the key, one head for all
        whole = Tensor("attn.k_rope", shard.tokens * rope_width, shard.itemsize)
        gather = Comm("attn.k_rope", (rope,), (whole,), kind="all_gather", backward="reduce_scatter", bytes=whole.bytes)
        ops, rope = [*ops, gather], whole.name
    d_qk, _ = model.head_widths
    more, q = up(model, shard, q_from, "q", of.q_lora_rank or hidden, d_qk)
    ops += more
    more, kv = up(model, shard, kv_from, "kv", kv_rank, nope + value)
    ops += more
    return [*ops, heads_of(model, shard, (q, kv, rope))], ("attn.q", "attn.k", "attn.v")


def torch_latent_ops(model: Model, shard: Shard, x: str) -> tuple[list[Op], tuple[str, str, str]]:
    """The same for plain torch modules: the query first; the value is a view of the projection of keys and values.

    pytorch/torchtitan@b5bcd76c torchtitan/models/deepseek_v3/model.py, Attention.forward. Under tensor parallelism the input is
    gathered once; down projections and norms are alike on all ranks, so gradients of the latents are partial sums.
    """
    of, hidden = model.attention, model.hidden_sz
    kv_rank, nope, rope, value = of.latent_widths
    d_qk, _ = model.head_widths
    ops, operand = enter_tp("attn", Operand(x, x), hidden, shard, shard.software.recipe)
    whole = replace(shard, sp=False)
    rank = of.q_lora_rank
    if rank is None:
        more, q = straight(model, whole, operand, d_qk)
    else:
        down, q_from = latent(model, whole, operand, "q", rank, rank)
        more, q = up(model, whole, q_from, "q", rank, d_qk)
        more = [*down, *more]
    ops += more
    more, kv_from = latent(model, whole, operand, "kv", kv_rank, kv_rank + rope)
    ops += more
    more, kv = up(model, whole, kv_from, "kv", kv_rank, nope + value)
    ops += more
    more, v = torch_heads(model, shard, (q, kv))
    return [*ops, *more], ("attn.q", "attn.k", v)


def straight(model: Model, shard: Shard, x: Operand, width: int) -> Sublayer:
    """The query's projection without a latent, on an input that tensor parallelism has gathered."""
    n = model.n_q_heads * width / shard.tp
    weights = linear_params("attn.q_up", (model.n_q_heads * width, model.hidden_sz), bias=False)
    return [
        linear(
            "attn.q_up",
            x,
            "attn.q_up",
            model.hidden_sz,
            n,
            shard,
            weights,
            casts(shard, n, model.hidden_sz),
            "mla_up_proj",
        )
    ], "attn.q_up"


def latent(model: Model, shard: Shard, x: Operand, name: str, rank: int, width: int) -> tuple[list[Op], Operand]:
    """A down projection of `width`, and the norm of its first `rank` columns."""
    hidden, rows, out = model.hidden_sz, shard.sequence_tokens, f"attn.{name}_down"
    weight = Param(f"attn.{name}_down.weight", (width, hidden))
    back = backward_casts(shard, rows, width, hidden, from_norm=True)
    one = linear(out, x, out, hidden, width, shard, (weight,), back)
    compressed = Tensor(out, rows * width, shard.itemsize)
    down: Gemm = replace(one, outputs=(compressed,), m=rows)
    normed, normal = norm(f"attn.{name}_norm", out, rows, rank, model, shard, "")
    normed, operand = cast_norm(normed, normal, rows * rank, shard)
    return [down, *normed], operand


def up(model: Model, shard: Shard, x: Operand, name: str, rank: int, width: int) -> Sublayer:
    """The up projection from a latent to `width` columns of every head, split over tp by heads."""
    entered, operand = enter_tp(f"attn.{name}_up", x, rank, shard, shard.software.recipe, "mla_up_proj")
    n, out = model.n_q_heads * width / shard.tp, f"attn.{name}_up"
    weights = linear_params(out, (model.n_q_heads * width, rank), bias=False)
    one = linear(out, operand, out, rank, n, shard, weights, casts(shard, n, rank), "mla_up_proj")
    return [*entered, one], out


def heads_of(model: Model, shard: Shard, inputs: tuple[str, str, str]) -> Op:
    """Rotate the rope parts and assemble query, key and value as new tensors; every head gets the key's rope part."""
    size, software, n = shard.itemsize, shard.software, model.n_q_heads / shard.tp
    _, nope, rope, value = model.attention.latent_widths
    q, k = (Tensor(f"attn.{part}", shard.tokens * n * (nope + rope), size) for part in ("q", "k"))
    v = Tensor("attn.v", shard.tokens * n * value, size)
    own = software.kernels.rope_impl == "own_tables"  # cos and sin, once for q and once for k
    tables = (Tensor("attn.rope.tables", 4.0 * shard.seq * rope, size),) if own else ()
    fused = software.kernels.rope_impl == "fused"
    moved = (2.0 if fused else 4.0) * (q.bytes + k.bytes + v.bytes)
    saves, kernels = tuple(t.name for t in tables), 2.0 if fused else 14.0
    return Move("attn.rope", inputs, (q, k, v), saves, tables, (), moved, moved, kernels, role="mla_up_proj")
