"""A mixture of experts of plain torch modules: torchtitan's router, token dispatchers and grouped experts as ops.

Source: pytorch/torchtitan@b5bcd76c torchtitan/models/common/moe.py and token_dispatcher.py. Letters: T tokens that this device
routes, E experts, k per token, N = T k rows sent, R rows in this device's experts. Compiled, what inductor fuses keeps nothing
between its kernels (tests/truth/test_torch_experts.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from steptime.base.num import same
from steptime.model import async_ep
from steptime.model.experts_in_turn import in_turn, joined
from steptime.model.grouped_casts import low_precision, relaid_weight
from steptime.model.mlp import Words, feed_forward, gated
from steptime.model.ops import Gemm, Move, Op, Param, Tensor
from steptime.model.quantize import Operand, cast
from steptime.model.routing import BOOL, FP32, INT64, Rows
from steptime.model.sublayers import Sublayer, enter_tp, leave_tp, residual
from steptime.model.torch_clamped import clamped_swiglu, row_bias
from steptime.model.torch_dispatch import combine, dispatch, weighted_activation
from steptime.software.profiles import without_release

if TYPE_CHECKING:
    from steptime.base.num import Num
    from steptime.model.model import Model, Moe
    from steptime.model.shard import Shard

SHARED = Words("shared", "shared_experts", "shared_experts")
EXPERTS = Words("experts", "moe", "moe_act")
GROUP_KERNELS = 6.0
"""Of the choice of groups: top 2, sum, top k, ones, scatter, masked fill (_get_node_limited_routing_scores)."""


def torch_moe_ops(model: Model, moe: Moe, shard: Shard, x: str, normal: str) -> list[Op]:
    """From the norm's output `normal` to "y", the residual `x` added.

    Experts on several ranks take the tokens of their own sequence shard (moe_sharding.py, enable_ep). On one, tensor parallelism
    splits each expert as it does an MLP: every rank routes all tokens, and partial sums are reduced once for routed and shared
    experts together.
    """
    elements = shard.sequence_tokens * model.hidden_sz
    spread = same(shard.ep != 1)
    entered, read = ([], normal) if spread else _entered(normal, model, shard)
    inner = shard if spread else replace(shard, sp=False)
    rows = Rows(moe, model.hidden_sz, replace(inner, etp=1))
    ops, chosen = router(rows, read)
    out, sent = dispatch(rows, read, chosen)
    more, y = grouped_experts(model, rows, shard.etp, sent)
    back, branch = combine(rows, y, chosen)
    ops = [*entered, *ops, *out, *more, *back]
    if moe.shared_expert_inter_sz:
        extra, other = shared(model, moe, shard, read, gathered=not spread)
        whole = Tensor("moe.sum", rows.tokens * model.hidden_sz, shard.itemsize)
        ops += [*extra, Move("moe.add", (branch, other), (whole,), same_grad=True, role="moe")]
        branch = whole.name
    if not spread:
        left, branch = leave_tp("moe", branch, model.hidden_sz, shard, "moe")
        ops += left
    return [*ops, residual("mlp.residual", x, branch, "y", elements, shard)]


def _entered(x: str, model: Model, shard: Shard) -> tuple[list[Op], str]:
    """Gathered for tensor parallelism."""
    ops, operand = enter_tp("moe", Operand(x, x), model.hidden_sz, shard, role="moe")
    return ops, operand.read


def shared(model: Model, moe: Moe, shard: Shard, x: str, *, gathered: bool) -> Sublayer:
    """The experts that every token passes, one MLP; `gathered`: on an input that has been, its output left partial."""
    own = model.model_copy(update={"inter_sz": moe.shared_expert_inter_sz, "bias": False})
    if gathered:
        wide = own.model_copy(update={"inter_sz": moe.shared_expert_inter_sz / shard.tp})
        ops, out = feed_forward(wide, replace(shard, tp=1), Operand(x, x), SHARED)
        return [_with_whole_weights(op, shard.tp) for op in ops], out
    quantized, operand = cast("shared", x, shard.sequence_tokens * model.hidden_sz, shard, role="shared_experts")
    ops, out = feed_forward(own, shard, operand, SHARED)
    return [*quantized, *ops], out


def _with_whole_weights(op: Op, tp: Num) -> Op:
    """The parameters of a product that was stated for one rank, as the whole ones that tp splits."""
    whole = tuple(
        p._replace(shape=tuple(n * tp if i == p.split_dim else n for i, n in enumerate(p.shape))) for p in op.params
    )
    return replace(op, params=whole)


def router(rows: Rows, x: str) -> tuple[list[Op], str]:
    """Gate in fp32, scores, top k: ops, and the tensor of the chosen scores, T x k (TokenChoiceTopKRouter.forward)."""
    moe = rows.moe
    cells, chosen = rows.tokens * moe.n_experts, rows.tokens * moe.experts_per_token
    compiled = rows.shard.software.kernels.compile != "none"
    ops, logits = gate(rows, x)
    scores, indices = Tensor("moe.scores", cells, FP32), Tensor("moe.indices", chosen, INT64)
    best = Tensor("moe.chosen", chosen, FP32)
    ops.append(Move("moe.score", (logits,), (scores,), (scores.name,), role="moe"))
    # copies with the bias and with groups masked, each read and written; groups are scored by a top 2 of theirs, which reads all
    copies, limited = float(moe.expert_bias), float(moe.n_groups is not None)
    passing = FP32 * (cells * (copies + limited) + chosen)
    ops.append(
        Move(
            "moe.top_k",
            (scores.name,),
            (best,),
            (indices.name,),
            (indices,),
            forward_bytes=FP32 * cells * (1.0 + 2.0 * copies + 3.0 * limited) + (FP32 + INT64) * chosen,
            forward_temp_bytes=0.0 if compiled else passing + BOOL * cells,
            kernels=6.0 + copies + GROUP_KERNELS * limited,
            role="moe",
            chooses=True,
        )
    )
    more, out = scaled(rows, best, compiled=compiled)
    return [*ops, *more], out


def gate(rows: Rows, x: str) -> Sublayer:
    """The router's product. Autocast to fp32 makes copies of input and weight, which the product keeps."""
    shard, n = rows.shard, rows.moe.n_experts
    wide = shard.software.moe.router_dtype == "fp32" and shard.itemsize != FP32
    ops: list[Op] = []
    operands: tuple[str, ...] = (x,)
    if wide:
        copies = (
            Tensor("moe.router.x", rows.tokens * rows.hidden, FP32),
            Tensor("moe.router.w", n * rows.hidden, FP32),
        )
        operands = (copies[0].name, copies[1].name)
        ops.append(Move("moe.router.widen", (x,), copies, kernels=2.0, role="router"))
    product = Gemm(
        "moe.router",
        operands[:1],
        (Tensor("moe.logits", rows.tokens * n, FP32),),
        operands,
        (),
        (Param("mlp.router.weight", (n, rows.hidden)),),
        m=rows.tokens,
        n=n,
        k=rows.hidden,
        itemsize=FP32 if wide else shard.itemsize,
        role="router",
    )
    return [*ops, product], "moe.logits"


def scaled(rows: Rows, best: Tensor, *, compiled: bool) -> Sublayer:
    """The chosen scores over their sum where the router normalizes them, times the route scale."""
    moe = rows.moe
    normalizes = moe.experts_per_token > 1 and (moe.score_function == "sigmoid" or not moe.pre_softmax)
    ops: list[Op] = []
    name = best.name
    if normalizes:
        total, normed = Tensor("moe.chosen.sum", rows.tokens, FP32), best._replace(name="moe.normed")
        ops.append(Move("moe.norm", (name,), (normed,), (name, total.name), (total,), kernels=3.0, role="moe"))
        name = normed.name
    out = best._replace(name="moe.probs")
    return [*ops, Move("moe.scale", (name,), (out,), kernels=0.0 if compiled else 1.0, role="moe")], out.name


def grouped_experts(model: Model, rows: Rows, etp: Num, x: str) -> Sublayer:
    """Gate, up, activation, down of each local expert's rows, `torch._grouped_mm` each (GroupedExperts.forward).

    Without waiting for counts, tensors have room for more rows, which products skip; eager kernels of its own also skip them
    (torchtitan/overrides/fused_grouped_experts.py@aa1d3741). The sum of both gradients of the rows does not.
    """
    moe, size, n = rows.moe, rows.shard.itemsize, rows.room
    width = moe.expert_inter_sz / etp
    act, out = Tensor("experts.act.out", n * width, size), Tensor("experts.out", n * rows.hidden, size)
    out = out._replace(outside="gradient" if async_ep.uses(rows) else "")
    if model.swiglu_limit is not None:
        return clamped_experts(model, rows, etp, x)
    ops, names = gradients_summed(model, rows), list[str]()
    for which, times in projections(model, rows):
        more = Tensor(f"experts.{which}", times * n * width, size)
        shape = (moe.n_experts, times * moe.expert_inter_sz, rows.hidden)
        ops.append(_product(model, rows, which, x, more, (shape, 1), (rows.hidden, times * width)))
        names.append(more.name)
    acted = activated(model, rows, names, act)
    shape = (moe.n_experts, rows.hidden, moe.expert_inter_sz)
    down = _product(model, rows, "down", act.name, out, (shape, 2), (width, rows.hidden))
    join, y = joined(rows, out)
    return [*ops, *in_turn(rows, acted), down, *join], y.name


def projections(model: Model, rows: Rows) -> tuple[tuple[str, int], ...]:
    """The products before the activation, each with its width in units of the experts'.

    NeMo AutoModel has gate and up in one (NVIDIA-NeMo/Automodel@36044ad3 nemo_automodel/components/moe/experts.py,
    gate_and_up_projs and gate_up_linear).
    """
    if model.glu and without_release(rows.shard.software.name) == "automodel":
        return (("gate_up", 2),)
    return (("gate", 1), ("up", 1)) if model.glu else (("up", 1),)


def activated(model: Model, rows: Rows, names: list[str], out: Tensor) -> list[Op]:
    """The activation: one kernel, always with MinimalAsyncEP, or one per operation."""
    kernels, own = rows.shard.software.kernels, async_ep.uses(rows)
    if kernels.activation_impl != "fused" and model.glu and not own:
        return gated(model, rows.shard, names[0], names[-1], out, EXPERTS)
    read = (*names, "moe.ranked") if weighted_activation(rows) else tuple(names)
    op = Move("experts.act", read, (out,), read, role="moe_act")
    if rows.capacity_share is None or (kernels.compile != "none" and not own):
        return [op]
    one = out.bytes * rows.here / rows.room
    return [replace(op, forward_bytes=3.0 * one, backward_bytes=5.0 * one)]


def gradients_summed(model: Model, rows: Rows) -> list[Op]:
    """The sum of two products' gradients of the rows, over all for which there is room: two reads and a write."""
    if rows.capacity_share is None or len(projections(model, rows)) == 1:
        return []
    summed = 3.0 * rows.room * rows.hidden * rows.shard.itemsize
    return [Move("experts.sum", forward_bytes=0.0, backward_bytes=summed, kernels=0.5, role="moe")]


def clamped_experts(model: Model, rows: Rows, etp: Num, x: str) -> Sublayer:
    """gpt-oss: gate and up interleaved in one product, biases of each row's expert, a clamped activation.

    Source: pytorch/torchtitan@58b03444 torchtitan/models/gpt_oss/moe.py, GptOssGroupedExperts._experts_forward. Compiled, biases
    and activation are one kernel that keeps the product's output, and the last bias is added where the rows are read next.
    """
    moe, size, n = rows.moe, rows.shard.itemsize, rows.room
    width = moe.expert_inter_sz / etp
    act, out = Tensor("experts.act.out", n * width, size), Tensor("experts.out", n * rows.hidden, size)
    both = Tensor("experts.gate_up", 2.0 * act.elements, size)
    eager = rows.shard.software.kernels.activation_impl != "fused"
    shape = (moe.n_experts, 2 * moe.expert_inter_sz, rows.hidden)
    ops: list[Op] = [_product(model, rows, "gate_up", x, both, (shape, 1), (rows.hidden, 2.0 * width))]
    added, biased = row_bias(rows, both, eager=eager)
    ops.append(added)
    read = (biased, "moe.ranked") if weighted_activation(rows) else (biased,)
    ops.append(clamped_swiglu(biased, act) if eager else Move("experts.act", read, (act,), read, role="moe_act"))
    shape = (moe.n_experts, rows.hidden, moe.expert_inter_sz)
    ops.append(_product(model, rows, "down", act.name, out, (shape, 2), (width, rows.hidden)))
    added, y = row_bias(rows, out, eager=eager)
    return [*ops, added], y


def _product(
    model: Model,
    rows: Rows,
    which: str,
    x: str,
    out: Tensor,
    weight: tuple[tuple[int, int, int], int],
    depth_width: tuple[Num, Num],
) -> Gemm:
    """One product of every local expert; `weight` is the shape of all, and the dimension that tp splits."""
    moe, shard = rows.moe, rows.shard
    shape, split = weight
    one = Param(
        f"mlp.experts.{which}.weight",
        shape,
        split,
        group="expert" if rows.spread else "dense",
        n_experts=moe.n_experts,
        top_k=moe.experts_per_token,
    )
    params: tuple[Param, ...] = (one,)
    if model.bias:
        params += (one._replace(name=f"mlp.experts.{which}.bias", shape=shape[:2]),)
    k, n = depth_width
    relaid = relaid_weight(shard, f"experts.{which}", rows.local_experts * k * n)
    return Gemm(
        f"experts.{which}",
        (x,),
        (out,),
        (x, *(copy.name for copy in relaid)),
        relaid,
        params,
        m=rows.here / rows.local_experts,
        n=n,
        k=k,
        count=rows.local_experts,
        itemsize=shard.itemsize,
        grouped=shard.software.moe.grouped_gemm,
        load=rows.load,
        role="moe",
        **low_precision(shard, rows.local_experts, rows.room, k, n),
    )
