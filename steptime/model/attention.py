"""Self-attention as a list of ops: norm, projections, rotary embedding, core attention, output projection, residual."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptime.base.num import same
from steptime.model.grouped_heads import REPEATED, Read, as_read, gather, gathers, heads, repeat
from steptime.model.ops import Comm, Gemm, Move, Op, Param, Tensor
from steptime.model.quantize import Operand, backward_casts, cast_context, cast_norm, cast_per_product
from steptime.model.rotary import ROTATED, rotary
from steptime.model.shared_sequence import Local
from steptime.model.sublayers import (
    FP32,
    Sublayer,
    add_branch,
    casts,
    dropout,
    enter_tp,
    leave_tp,
    linear,
    linear_params,
    norm,
    norm_before,
)
from steptime.software.performance import EAGER_TORCH

if TYPE_CHECKING:
    from steptime.model.model import Model
    from steptime.model.shard import Shard


def attention_ops(model: Model, shard: Shard, out: str = "x2") -> list[Op]:
    """The attention half of a block, from "x" to `out`."""
    if model.linear_attention is not None:
        from steptime.model.linear_attention import linear_attention_ops

        return linear_attention_ops(model, shard, out)
    hidden, gate = model.hidden_sz, ""
    normed, n1 = norm_before("attn", "x", model, shard)
    if model.attention.kind == "mla":
        from steptime.model.latent import latent_ops

        more, (q, k, v) = latent_ops(model, shard, n1)
        ops = [*normed, *more]
    else:
        ops, (q, k, v, gate) = query_key_value(model, shard, normed, n1)
    core, o = core_attention(model, shard, q, k, v)
    if gate:
        more, o = gated_output(model, shard, o, gate)
        core += more
    n_q, _ = heads(model, shard)
    _, d_v = model.head_widths
    weight = Param("attn.proj.weight", (hidden, model.n_q_heads * d_v), 1)
    bias = (Param("attn.proj.bias", (hidden,)),) if model.bias else ()
    width = n_q * d_v
    quantized, operand = cast_context(o, shard.tokens * width, shard)
    back = backward_casts(shard, shard.tokens, hidden, width, reduced=True, recast=True)
    project = linear("attn.proj", operand, "attn.proj.out", width, hidden, shard, (weight, *bias), back, "attn_proj")
    left, branch = leave_tp("attn", "attn.proj.out", hidden, shard)
    return [*ops, *core, *quantized, project, *left, *add_branch("attn", "x", branch, out, model, shard)]


def query_key_value(
    model: Model, shard: Shard, normed: list[Op], n1: str
) -> tuple[list[Op], tuple[str, str, str, str]]:
    """Query, key and value of all heads, normalized and rotated as the model states; and the gate of the output, or ""."""
    elements = shard.sequence_tokens * model.hidden_sz
    normed, operand = cast_norm(normed, n1, elements, shard)
    entered, operand = enter_tp("attn", operand, model.hidden_sz, shard, shard.software.recipe)
    late, operand = cast_per_product("attn.qkv", operand, shard.tokens * model.hidden_sz, shard)
    ops, gate = [*normed, *entered, *late], ""
    if model.attention.gated:
        width = model.n_q_heads * model.head_dim / shard.tp
        weight = linear_params("attn.gate", (model.n_q_heads * model.head_dim, model.hidden_sz), model.qkv_bias)
        gate, back = "attn.gate", casts(shard, width, model.hidden_sz)
        ops.append(linear("attn.gate", operand, gate, model.hidden_sz, width, shard, weight, back))
    projected, (q, k, v) = projections(model, shard, operand)
    ops += projected
    n_q, n_kv = heads(model, shard)
    if model.qk_norm:
        more, q, k = qk_norm(model, shard, q, k)
        gathered, q, k = gather(model, shard, q, k)
        ops += [*more, *gathered]
    if model.rotary_embeds:
        ops += rotary(
            model, shard, (q, k), (n_q, n_q if k == REPEATED[1] else n_kv), shard.tp if gathers(model, shard) else 1.0
        )
        q, k = ROTATED
    return ops, (q, k, v, gate)


def gated_output(model: Model, shard: Shard, o: str, gate: str) -> Sublayer:
    """The output times the sigmoid of a gate (Qwen3-Next; megatron/core/transformer/attention.py, _apply_output_gate)."""
    n_q, _ = heads(model, shard)
    out = Tensor("attn.gated", shard.tokens * n_q * model.head_dim, shard.itemsize)
    return [Move("attn.gate.scale", (o, gate), (out,), (o, gate))], out.name


def projections(model: Model, shard: Shard, x: Operand) -> tuple[list[Op], tuple[str, str, str]]:
    """q, k and v: one GEMM (Megatron's linear_qkv) or three; the ops, and the storages that hold q, k and v.

    Of one GEMM they are views of one storage. A fused attention kernel needs them contiguous, so each is a separate storage then;
    unfused attention reads the views, and only the query of grouped heads is copied (megatron/core/transformer/attention.py,
    SelfAttention.get_query_key_value_tensors). litgpt's kernel reads them too: the value that it keeps holds the whole output;
    keys and values of grouped heads are repeated (Lightning-AI/litgpt@b042058e litgpt/model.py, CausalSelfAttention.forward).
    torchtitan copies all three (`copies_of`).
    """
    n_q, n_kv = heads(model, shard)
    d, hidden, size = model.head_dim, model.hidden_sz, shard.itemsize
    parts = (("q", n_q, model.n_q_heads), ("k", n_kv, model.n_kv_heads), ("v", n_kv, model.n_kv_heads))
    own = ("attn.q", "attn.k", "attn.v")
    if not shard.software.kernels.fused_projections:
        params = {p: linear_params(f"attn.{p}", (count * d, hidden), model.qkv_bias) for p, _, count in parts}
        return [
            linear(f"attn.{p}_proj", x, f"attn.{p}", hidden, n * d, shard, params[p], casts(shard, n * d, hidden))
            for p, n, _ in parts
        ], own
    rows = (model.n_q_heads + 2 * model.n_kv_heads) * d
    every = linear_params("attn.qkv", (rows, hidden), model.qkv_bias)
    width = rows / shard.tp
    whole = (Tensor("attn.qkv", shard.tokens * width, size),)
    split = tuple(Tensor(f"attn.{p}", shard.tokens * n * d, size) for p, n, _ in parts)
    fused = shard.software.kernels.fused_projections
    copied = fused == "qkv_copied"
    views = fused == "qkv" or shard.software.kernels.attention_impl == "unfused"
    outputs = whole if views or copied else split
    gemm = linear("attn.qkv", x, "attn.qkv", hidden, width, shard, every, casts(shard, width, hidden))
    gemm.outputs = outputs
    gathered, qkv = spread(model, shard, outputs[0].name)
    more: list[Op] = [gemm, *gathered]
    if copied:
        return [*more, copies_of(shard, qkv, split)], own
    if not views:
        return more, own
    if model.n_q_heads != model.n_kv_heads and shard.software.kernels.attention_impl == "flash":
        repeated, kept = repeat(model, shard, *own[:1], qkv, qkv)
        return [*more, *repeated], (qkv, *kept[1:])
    # the queries of a single key-value head are contiguous: no copy separates them
    if model.n_q_heads == model.n_kv_heads or same(n_kv == 1):
        return more, (qkv, qkv, qkv)
    return [*more, Move("attn.q_copy", (qkv,), (split[0],))], ("attn.q", qkv, qkv)


def copies_of(shard: Shard, qkv: str, split: tuple[Tensor, ...]) -> Op:
    """The query, key and value of one product, each copied to a storage of its own.

    pytorch/torchtitan@bcc09297 torchtitan/models/common/attention.py, FusedQKVLinear.forward: a split, then `contiguous()` of
    each: forward has a kernel for each, backward one that joins the three gradients. torch.compile computes the copies of query
    and key in the kernel that normalizes or rotates them; that of the value stays.
    """
    compiled = shard.software.kernels.compile != "none"
    moved = 2.0 * (split[-1].bytes if compiled else sum(part.bytes for part in split))
    return Move("attn.qkv.split", (qkv,), split, (), (), (), moved, moved, 1.0 if compiled else 2.0)


def spread(model: Model, shard: Shard, qkv: str) -> Sublayer:
    """With more ranks than key-value heads the fused projection is split evenly, and its output gathered on every rank.

    megatron/core/transformer/attention.py, SelfAttention.get_query_key_value_tensors (num_query_groups < world_size).
    """
    if same(shard.tp <= model.n_kv_heads):
        return [], qkv
    elements = shard.tokens * (model.n_q_heads + 2 * model.n_kv_heads) * model.head_dim
    whole = Tensor("attn.qkv.whole", elements, shard.itemsize)
    gather = Comm("attn.spread", (qkv,), (whole,), kind="all_gather", backward="reduce_scatter", bytes=whole.bytes)
    return [gather], whole.name


def qk_norm(model: Model, shard: Shard, q: str, k: str) -> tuple[list[Op], str, str]:
    """Norms of q and k: over each head (Qwen3), or over all of a layer (transformers modeling_olmo2.py, Olmo2Attention)."""
    n_q, n_kv = heads(model, shard)
    tokens, d = shard.tokens, model.head_dim
    if model.qk_norm_type == "per_layer":
        q_ops, q = norm("attn.q_norm", q, tokens, model.n_q_heads * d, model, shard, "")
        k_ops, k = norm("attn.k_norm", k, tokens, model.n_kv_heads * d, model, shard, "")
        return [*q_ops, *k_ops], q, k
    q_ops, q = norm("attn.q_norm", q, tokens * n_q, d, model, shard, "")
    k_ops, k = norm("attn.k_norm", k, tokens * n_kv, d, model, shard, "")
    return [*q_ops, *k_ops], q, k


def core_attention(model: Model, shard: Shard, q: str, k: str, v: str) -> Sublayer:
    """Scores, softmax, context: flash or unfused; with context parallelism over the ranks that share a sequence."""
    if shard.context_split or shard.software.kernels.attention_impl == "flash":
        read = as_read(model, shard, (q, k, v))
        core, o = flash(model, shard, read)
        return [*read.ops, *core], o
    return unfused(model, shard, q, k, v)


def flash(model: Model, shard: Shard, read: Read) -> Sublayer:
    """One kernel that keeps q, k, v, its output and the fp32 log-sum-exp (Dao 2023, algorithm 1); dropout by its RNG state."""
    n_q, _ = heads(model, shard)
    local = Local(shard, n_q, read.n_kv, *model.head_widths, drops=model.attention_dropout > 0.0)
    share, reach = model.attention.shares(shard.kv_seq)
    mask: dict[str, Any] = {"causal_share": share, "reach": reach}
    if model.attention.sinks:
        mask["params"] = (Param("attn.sinks", (model.n_q_heads,), 0),)
    out = local.out
    if shard.context_split:
        from steptime.model.context_parallel import context_parallel

        return with_sequence_first(shard, context_parallel(local, read.qkv, **mask), out)
    if shard.software.kernels.attention_kernel == "flex_eager":
        from steptime.model.eager_flex import eager_flex

        mask |= eager_flex(shard.batch * n_q * shard.seq * shard.kv_seq)
    kernel = local.kernel(read.qkv, out, (*read.kept, out.name, local.lse.name), **mask)
    inside = shard.software.kernels.attention_kernel.startswith("cudnn")  # TransformerEngine's softmax_type learnable
    if model.attention.sinks and shard.software.family in EAGER_TORCH and not inside:
        return scaled_by_sinks(kernel, out, local.lse)
    return with_sequence_first(shard, [kernel], out)


def with_sequence_first(shard: Shard, ops: list[Op], out: Tensor) -> Sublayer:
    """Attention with a kernel that has the batch first, whose output is copied so that the sequence is first.

    The kernel keeps its own output for backward, the output projection the copy (TE pytorch/attention/dot_product_attention/
    backends.py, FlashAttention.forward: transpose(0, 1).contiguous()). A single sequence has the same layout both ways: no copy.
    The time of the copies is in the fitted constants of the step time.
    torch 2.5's cuDNN kernel leaves the heads before the sequence (pytorch/pytorch pull request 138354 gave its output the
    query's layout): the projection copies it.
    """
    turned = out._replace(name=f"{out.name}.turned")
    if shard.software.family in EAGER_TORCH and shard.software.kernels.attention_backend == "cudnn":
        return [*ops, Move("attn.core.turn", (out.name,), (turned,), role="core_attn")], turned.name
    if not shard.software.batch_first_attention or same(shard.batch == 1.0):
        return ops, out.name
    copy = Move(
        "attn.core.turn", (out.name,), (turned,), forward_bytes=0.0, backward_bytes=0.0, kernels=0.0, role="core_attn"
    )
    return [*ops, copy], turned.name


def unfused(model: Model, shard: Shard, q: str, k: str, v: str) -> Sublayer:
    """Unfused attention: two batched GEMMs around a scale-mask-softmax and dropout, with the scores in memory.

    Keeps q, k, v, the probabilities and, with dropout, the mask and the dropped probabilities: the 5 a s^2 b of Korthikanti
    et al. 2022, equation 1. Grouped key-value heads are repeated first (megatron/core/transformer/dot_product_attention.py).
    """
    n_q, _ = heads(model, shard)
    (d, d_v), size = model.head_widths, shard.itemsize
    elements = shard.batch * n_q * shard.seq * shard.kv_seq
    ops: list[Op] = []
    if model.n_q_heads != model.n_kv_heads and model.attention.kind != "mla":
        ops, (q, k, v) = repeat(model, shard, q, k, v)
    scores = Tensor("attn.core.scores.out", elements, size, pooled=shard.software.activations.scores_in_buffer)
    batched: dict[str, Any] = {"m": shard.seq, "count": shard.batch * n_q, "itemsize": size, "role": "core_attn"}
    ops.append(
        Gemm("attn.core.scores", (q, k), (scores,), tuple(dict.fromkeys((q, k))), n=shard.kv_seq, k=d, **batched)
    )
    probs = Tensor("attn.core.probs", elements, size)
    ops.append(softmax(scores, probs, shard))
    dropped, weights = dropout("attn.core.dropout", probs.name, elements, model, shard, "core_attn")
    out = Tensor("attn.core.out", shard.tokens * n_q * d_v, size)
    context = Gemm("attn.core.context", (weights, v), (out,), (weights, v), n=d_v, k=shard.kv_seq, **batched)
    return [*ops, *dropped, context], out.name


def softmax(scores: Tensor, probs: Tensor, shard: Shard) -> Op:
    """Scale, causal mask and softmax.

    fused keeps the probabilities (megatron/core/fusions/fused_softmax.py, ScaledUpperTriangMaskedSoftmax). composite works in
    fp32, keeps that, and casts it down.
    """
    if shard.software.kernels.softmax_impl == "fused" or shard.itemsize == FP32:
        return Move("attn.core.softmax", (scores.name,), (probs,), (probs.name,), role="core_attn")
    wide = Tensor("attn.core.softmax.fp32", scores.elements, FP32)
    # upcast, mask, softmax, downcast; in reverse order in backward
    moved = 2.0 * scores.bytes + 5.0 * wide.bytes
    saves = (wide.name,)
    return Move("attn.core.softmax", (scores.name,), (probs,), saves, (wide,), (), moved, moved, 4.0, role="core_attn")


def scaled_by_sinks(kernel: Op, out: Tensor, lse: Tensor) -> Sublayer:
    """Sinks of plain torch modules: the kernel, then its output times sigmoid(log-sum-exp - sink), the share that they leave.

    pytorch/torchtitan@58b03444 torchtitan/models/gpt_oss/model.py. The sigmoid is fp32 and cast to the output's dtype. Kept: the
    output, the sigmoid, its cast. Backward: the product for the output (2 accesses of it), that for the scale (3) and its sum
    over the head's width (1).
    """
    sigmoid, scaled = lse._replace(name="attn.core.sink.sigmoid"), out._replace(name="attn.core.scaled")
    scale = sigmoid._replace(name="attn.core.sink.scale", itemsize=out.itemsize)
    stats = (sigmoid,) if out.itemsize == lse.itemsize else (sigmoid, scale)
    product = Move(
        "attn.core.sink",
        (out.name, lse.name),
        (scaled,),
        (out.name, *(t.name for t in stats)),
        stats,
        forward_bytes=2.0 * (out.bytes + sigmoid.bytes),
        backward_bytes=6.0 * out.bytes,
        kernels=4.0,
        backward_temp_bytes=out.bytes,
        role="core_attn",
    )
    return [kernel, product], scaled.name
