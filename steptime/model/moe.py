"""A layer with a mixture of experts as ops: attention, norm, shared experts, router, dispatch, experts, combine, sum."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from steptime.base.num import same
from steptime.model.dispatch import combine, dispatch
from steptime.model.expert_rows import aligned_rows, cast_rows, one_cast
from steptime.model.experts_in_turn import bias_in_place, in_turn, joined
from steptime.model.mlp import Words, activate, clamped, feed_forward, gated
from steptime.model.ops import ByElement, Gemm, Move, Op, Param, Tensor
from steptime.model.quantize import Operand, backward_casts, cast, copies
from steptime.model.routing import Rows, router_ops
from steptime.model.sublayers import Sublayer, add_branch, linear, norm_before
from steptime.model.torch_experts import torch_moe_ops
from steptime.software.performance import EAGER_TORCH

if TYPE_CHECKING:
    from steptime.base.num import Num
    from steptime.model.dispatch import DispatchedTensors
    from steptime.model.model import Model, Moe
    from steptime.model.shard import Shard

SHARED = Words("shared", "shared_experts", "shared_experts")
EXPERTS = Words("experts", "moe", "moe_act")
STASH_KERNELS, STASH_SHARE = 6.0, 0.5
"""Copies of four tensors, and of the scales of two, into a stash; and the share of their time that other kernels lose to them,
some being limited by memory and some by arithmetic (assumed: half; rows marked fit do not decide it: on GB200 DeepSeek-V3 is
best with none, Qwen3-30B with a quarter, gpt-oss with all)."""


def moe_ops(model: Model, shard: Shard, x: str = "x2") -> list[Op]:
    """The experts' half of a block, from `x` to "y" (megatron/core/transformer/moe/moe_layer.py, MoELayer.forward).

    Raises:
        ValueError: the model has no experts.
    """
    moe, hidden = model.moe, model.hidden_sz
    if moe is None:
        raise ValueError("model.moe: not set, so there are no experts")
    rows = Rows(moe, moe.latent_sz or hidden, shard)
    elements = rows.tokens * hidden
    normed, normal = norm_before("mlp", x, model, shard)
    if shard.software.family in EAGER_TORCH:
        return [*normed, *torch_moe_ops(model, moe, shard, x, normal)]
    shared, extra = shared_experts(model, moe, shard, normal) if moe.shared_expert_inter_sz else ([], "")
    routed, probs = router_ops(model, rows, normal)
    narrowed, latent = resize(rows, "moe.latent_down", normal, hidden, rows.hidden) if moe.latent_sz else ([], normal)
    out, sent = dispatch(rows, latent, probs)
    inner, y = experts(model, rows, sent)
    back, branch = combine(rows, y)
    widened, branch = resize(rows, "moe.latent_up", branch, rows.hidden, hidden) if moe.latent_sz else ([], branch)
    ops = [*normed, *shared, *routed, *narrowed, *out, *inner, *back, *widened]
    if extra:
        ops.append(
            Move("moe.add", (branch, extra), (Tensor("moe.sum", elements, shard.itemsize),), same_grad=True, role="moe")
        )
        branch = "moe.sum"
    return [*ops, *add_branch("mlp", x, branch, "y", model, shard)]


def resize(rows: Rows, name: str, x: str, k: int, n: int) -> Sublayer:
    """The projection of tokens to the experts' latent, or of their sum back from it; whole on every rank of tp.

    moe_layer.py, fc1_latent_proj and fc2_latent_proj: TELinear, "duplicated".
    """
    shard, size = rows.shard, rows.shard.itemsize
    ops, operand = cast(name, x, rows.tokens * k, shard, role="moe")
    weight, outputs = Param(f"mlp.{name[4:]}.weight", (n, k)), Tensor(name, rows.tokens * n, size)
    one = linear(name, operand, name, k, n, shard, (weight,), backward_casts(shard, rows.tokens, n, k), "moe")
    return [*ops, replace(one, outputs=(outputs,), m=rows.tokens)], name


def shared_experts(model: Model, moe: Moe, shard: Shard, x: str) -> Sublayer:
    """The shared experts, which process every token, as one MLP; with the model's gate (shared_experts.py, SharedExpertMLP)."""
    tokens, hidden = shard.sequence_tokens, model.hidden_sz
    own = model.model_copy(update={"inter_sz": moe.shared_expert_inter_sz, "bias": False})
    quantized, operand = cast("shared", x, tokens * hidden, shard, role="shared_experts")
    if shard.software.moe.shared_expert_overlap and shard.sp and shard.split:
        # pre_forward_comm keeps the gathered input; the projection then gathers nothing again
        shard = replace(shard, software=shard.software.replace(sp_regather=False))
    ops, branch = feed_forward(own, shard, operand, SHARED)
    ops = [*quantized, *ops]
    if not moe.shared_expert_gate:
        return ops, branch
    weight = Param("mlp.shared_experts.gate_weight", (1, hidden))
    score = Tensor("shared.score", tokens, shard.itemsize)
    out = Tensor("shared.gated", tokens * hidden, shard.itemsize)
    gate = Move("shared.gate", (x,), (score,), (x, score.name), (), (weight,), kernels=2.0, role="shared_experts")
    scale = Move("shared.scale", (branch, score.name), (out,), (branch, score.name), role="shared_experts")
    return [*ops, gate, scale], out.name


def experts(model: Model, rows: Rows, sent: DispatchedTensors) -> Sublayer:
    """For the rows of each local expert: up, activation times probability, down (experts.py, TEGroupedMLP, SequentialMLP).

    TransformerEngine fuses the three only under a recipe, and marks for a paged stash only what the fused ones keep: neither in
    layers left in bf16 (transformer_engine/pytorch/ops/fused/grouped_mlp.py@d0067d0d, fuse_grouped_mlp_ops).
    """
    moe, shard, size = rows.moe, rows.shard, rows.shard.itemsize
    width, gates = moe.expert_inter_sz, 2 if model.glu else 1
    local = width / shard.etp
    up = Tensor("experts.up", rows.here * local * gates, size)
    act = Tensor("experts.act.out", rows.here * local, size)
    padded, x = aligned_rows(rows, "experts.pad", sent.x)
    quantized, operand = cast_rows("experts", x, rows.here * rows.hidden, rows, "moe")
    first = grouped(rows, operand, up, rows.hidden, local * gates, "up", bias=model.bias)
    ops: list[Op] = [*padded, *quantized, first]
    how = shard.software.moe
    fused = how.fused_mlp and shard.software.recipe is not None
    if fused:
        first.cast_bytes, first.cast_kernels = 0.0, 0.0
        outputs, operand = in_epilogue(shard, up, act, sent.probs)
        ops.append(outputs)
    else:
        ops += in_turn(rows, weighted(model, shard, up, act, sent.probs))
        quantized, operand = cast_rows("experts.act", act.name, act.elements, rows, "moe_act")
        ops += quantized
    out = Tensor("experts.out", rows.here * rows.hidden, size)
    ops.append(grouped(rows, operand, out, local, rows.hidden, "down", bias=model.bias))
    if how.paged_stash and fused:
        ops.append(stash(ops, sent.probs, rows.here * rows.prob))
    if not how.grouped_gemm:
        join, whole = joined(rows, out)
        return [*ops, *bias_in_place(model, rows, out, sent.probs), *join], whole.name
    y = out.name
    if model.bias:
        added = scaled_bias(out, sent.probs) if how.fused_mlp else add_bias(rows, out, sent.probs)
        ops, y = [*ops, added], added.outputs[0].name
    unpadded, y = aligned_rows(rows, "experts.unpad", y)
    return [*ops, *unpadded], y


def in_epilogue(shard: Shard, up: Tensor, act: Tensor, probs: str) -> tuple[Move, Operand]:
    """The activation where the products' epilogues compute it, without separate kernels.

    Forward the first one's, which writes its results and their activation cast for the second; backward that of the second one's
    dgrad, which casts for the first.
    """
    recipe = shard.software.recipe
    outputs = copies(act.name, act.elements, recipe, shard.itemsize, both=True) if recipe else (act,)
    kept = (up.name, probs, outputs[-1].name)
    moved: dict[str, Any] = {"forward_bytes": 0.0, "backward_bytes": 0.0, "kernels": 0.0, "role": "moe_act"}
    op = Move("experts.act", (up.name, probs), outputs[:1], kept, outputs[1:], **moved)
    return op, Operand(outputs[0].name, outputs[-1].name, columns=len(outputs) > 1)


def stash(ops: list[Op], probs: str, probs_bytes: Num) -> Move:
    """What the experts keep, copied into pages after forward and out of them before backward: read and written each way.

    Both inputs by columns with their scales, the first product's result, and the probabilities (TransformerEngine
    transformer_engine/pytorch/ops/fused/grouped_mlp.py@d0067d0d, mark_grouped_tensor). The copies have a stream of their own; the
    next layer's experts wait for it (megatron/core/transformer/moe/paged_stash.py@d98e8a64).
    """
    sizes = {probs: probs_bytes} | {t.name: t.bytes for op in ops for t in op.allocates}
    copied = 2.0 * sum([sizes[name] for name in dict.fromkeys(name for op in ops for name in op.saves)])
    moved: dict[str, Any] = {"forward_bytes": STASH_SHARE * copied, "backward_bytes": STASH_SHARE * copied}
    return Move("experts.stash", kernels=STASH_KERNELS, role="moe", **moved)


def scaled_bias(x: Tensor, probs: str) -> Move:
    """The second product's bias times the probability in its epilogue; backward reads the rows' gradient for both of theirs.

    Source: TransformerEngine transformer_engine/pytorch/triton/grouped_dbias_dscales.py@d0067d0d.
    """
    out = x._replace(name="experts.biased")
    moved: dict[str, Any] = {"forward_bytes": 0.0, "backward_bytes": x.bytes, "kernels": 0.5, "role": "moe"}
    return Move("experts.bias", (x.name, probs), (out,), (probs,), **moved)


def add_bias(rows: Rows, x: Tensor, probs: str) -> Move:
    """The second product's bias times the probability, expert by expert, then concatenated (TEGroupedMLP._apply_bias).

    With fp32 probabilities the sums are fp32 until they are cast back. Forward: product, sum, concatenation, cast; backward:
    cast, the rows' gradients cast and put together, and product and sum for the bias and for the probabilities. The products
    broadcast, and with fp32 probabilities the sum and the gradient's cast to fp32 read another dtype than they write.
    """
    wide, size = max(rows.prob, x.itemsize), x.itemsize
    casts = 0.0 if wide == size else 1.0
    forward = (5.0 + casts) * wide + (1.0 + casts) * size
    backward = (6.0 + 2.0 * casts) * wide + (2.0 + 2.0 * casts) * size
    mixed = casts * (2.0 * wide + size), casts * (wide + size)
    slow = ByElement((1.0 + casts) * x.elements, (wide + mixed[0]) * x.elements)
    slow_back = ByElement((2.0 + casts) * x.elements, (4.0 * wide + mixed[1]) * x.elements)
    return Move(
        "experts.bias",
        (x.name, probs),
        (x._replace(name="experts.biased"),),
        (probs,),
        forward_bytes=forward * x.elements,
        backward_bytes=backward * x.elements,
        forward_by_element=slow,
        backward_by_element=slow_back,
        kernels=2.0 * rows.local_experts + 1.0 + casts,
        gaps=3.0 + casts,
        forward_temp_bytes=(2.0 * wide - size) * x.elements,
        backward_temp_bytes=2.0 * wide * x.elements,
        role="moe",
    )


def weighted(model: Model, shard: Shard, up: Tensor, out: Tensor, probs: str) -> list[Op]:
    """The activation times the probability.

    Fused: one kernel that keeps its input and the probabilities (fused_bias_swiglu.py, WeightedSwiGLUFunction;
    fused_weighted_squared_relu.py). Else the product follows the activation, and keeps what it multiplies.
    """
    if shard.software.kernels.activation_impl == "fused" and (model.glu or model.activation == "relu2"):
        ops, read = clamp(model, up, out)
        kept = (*read, probs)
        return [*ops, Move("experts.act", (read[0], probs), (out,), kept, role="moe_act")]
    plain = out._replace(name="experts.act.plain")
    if model.glu:
        ops, activated = gated(model, shard, up.name, up.name, plain, EXPERTS), plain.name
    else:
        ops, activated = activate(model, shard, up.name, plain, EXPERTS)
    return [*ops, Move("experts.act.weigh", (activated, probs), (out,), (activated, probs), role="moe_act")]


def clamp(model: Model, up: Tensor, out: Tensor) -> tuple[list[Op], tuple[str, ...]]:
    """Before the fused kernel of gpt-oss: gate and up clamped, a kernel each, and put together again; what the kernel then keeps.

    It keeps what was put together, and the one number that is added to up; the clamps keep the product's output. Backward cuts
    the gradient into views, and puts those of the clamps together (megatron/core/fusions/fused_bias_geglu.py,
    weighted_bias_quick_geglu_impl).
    """
    if model.swiglu_limit is None or not model.glu:
        return [], (up.name,)
    ops, gate, value = clamped(up.name, up.name, out, EXPERTS)
    both, offset = up._replace(name="experts.act.clamped"), Tensor("experts.act.offset", 1.0, up.itemsize)
    ops.append(Move("experts.act.join", (gate, value), (both,), (), (offset,), role="moe_act"))
    return ops, (both.name, offset.name)


def grouped(rows: Rows, x: Operand, out: Tensor, k: Num, n: Num, which: str, *, bias: bool) -> Gemm:
    """The product of each local expert's rows with its weight, which is split over ep, and over etp as a dense one over tp."""
    moe, shard = rows.moe, rows.shard
    own = (n * shard.etp, k) if which == "up" else (n, k * shard.etp)
    group: Any = "expert" if same(shard.ep != 1) else "dense"
    shape = (moe.n_experts, *own)
    weight = Param(
        f"mlp.experts.{which}.weight",
        shape,
        0,
        group=group,
        n_experts=moe.n_experts,
        top_k=moe.experts_per_token,
    )
    params: tuple[Param, ...] = (weight,)
    if bias:  # not split over etp: every rank of the second product has the whole
        wide = (moe.n_experts, own[0])
        params += (weight._replace(name=f"mlp.experts.{which}.bias", shape=wide),)
    back = backward_casts(shard, rows.here, n, k)
    return Gemm(
        f"experts.{which}",
        (x.read,),
        (out,),
        (x.kept,),
        (),
        params,
        m=rows.here / rows.local_experts,
        n=n,
        k=k,
        count=rows.local_experts,
        itemsize=shard.itemsize,
        recipe=shard.software.recipe,
        cast_bytes=back.bytes,
        cast_kernels=back.kernels * (1.0 if one_cast(shard) else rows.local_experts),
        keeps_columns=x.columns,
        grouped=shard.software.moe.grouped_gemm,
        load=rows.load,
        role="moe",
    )
