"""Pieces shared by attention and MLP: norms, dropout and residual, entering and leaving the tensor-parallel region.

Each function returns ops and the name of the tensor they leave behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.model.ops import Comm, Gemm, Move, Op, Param, Role, Tensor
from steptime.model.quantize import (
    Backward,
    Operand,
    agree,
    backward_casts,
    cast_per_product,
    casts_its_share,
    forward_cast,
    saved_casts,
)

if TYPE_CHECKING:
    from steptime.base.num import Num
    from steptime.model.model import Model
    from steptime.model.shard import Shard
    from steptime.software.precision import Recipe

Sublayer = tuple[list[Op], str]
FP32 = 4.0
"""Bytes of one fp32 number."""


def norm_params(name: str, width: int, model: Model) -> tuple[Param, ...]:
    """Weight; for LayerNorm also a bias unless the model has none."""
    weight = Param(f"{name}.weight", (width,))
    if model.norm == "layernorm" and model.norm_bias:
        return (weight, Param(f"{name}.bias", (width,)))
    return (weight,)


def norm(name: str, x: str, rows: Num, width: int, model: Model, shard: Shard, role: Role = "norm") -> Sublayer:
    """RMSNorm or LayerNorm over `rows` vectors of `width`.

    fused: one kernel that keeps its input and fp32 statistics (apex and TransformerEngine kernels; torch's CUDA
    `_fused_rms_norm`; torch's native_layer_norm everywhere). composite: RMSNorm as torch's `rms_norm` decomposes it, which
    keeps the input and the normalized input in fp32 and frees the original. eager: Hugging Face's modules, which cast the
    normalized input down before the product with the weight, and keep it so.
    """
    out = Tensor(f"{name}.out", rows * width, shard.itemsize)
    params = norm_params(name, width, model)
    rstd = Tensor(f"{name}.rstd", rows, FP32)
    if model.norm == "rmsnorm" and shard.software.kernels.norm_impl != "fused":
        return composite_rmsnorm(name, x, out, rstd, params, shard, role), out.name
    stats = (rstd,) if model.norm == "rmsnorm" else (Tensor(f"{name}.mean", rows, FP32), rstd)
    saves = (x, *(s.name for s in stats))
    return [Move(name, (x,), (out,), saves, stats, params, role=role)], out.name


def composite_rmsnorm(
    name: str, x: str, out: Tensor, rstd: Tensor, params: tuple[Param, ...], shard: Shard, role: Role
) -> list[Op]:
    """RMSNorm of several kernels (torch/_refs/nn/functional rms_norm): upcast, square-mean-rsqrt, scale, downcast.

    Kernel by kernel, in bytes of fp32 data read or written per element: square 8, mean 4, two products 16, casts 12; back:
    products 8 + 12 + 8 + 12 with sums over them of 4 + 4, square 8, the sum of both gradients 12, casts 12. In fp32 the upcast is
    the input itself, and there are no casts. Written by Hugging Face (huggingface/transformers models/llama/modeling_llama.py,
    LlamaRMSNorm) in bf16: square 8, mean 4, products 8 + 4, casts 12; back: products 4 + 6 + 8 + 12 with sums of 2 + 4, mean 4,
    square 8 + 8 + 12, the sum 12, casts 12 (tests/truth/test_torch_hugging_face.py). `kernels` are forward's; backward has twice
    as many, whose launches from C++ take the host half as long (assumed).
    """
    wide = out.elements * FP32
    early = shard.software.kernels.norm_impl == "eager"
    normalized = Tensor(f"{name}.normalized", out.elements, shard.itemsize if early else FP32, for_weight=True)
    if shard.itemsize == FP32:
        kept, saves = (normalized, rstd), (x, normalized.name, rstd.name)
        return [Move(name, (x,), (out,), saves, kept, params, 7 * wide, 17 * wide, 6, role=role)]
    upcast = Tensor(f"{name}.upcast", out.elements, FP32)
    stats = (upcast, normalized, rstd)
    saves = (upcast.name, normalized.name, rstd.name)
    forward, backward = (9.0, 23.0) if early else (10.0, 20.0)
    return [Move(name, (x,), (out,), saves, stats, params, forward * wide, backward * wide, 8, role=role)]


def linear(
    name: str,
    x: Operand,
    out: str,
    k: Num,
    n: Num,
    shard: Shard,
    params: tuple[Param, ...],
    casts: Backward,
    role: Role = "",
) -> Gemm:
    """One projection of a block: T x k by k x n on this device, in the recipe's precision where there is one.

    `casts`: what its backward quantizes.
    """
    recipe = shard.software.recipe
    own = recipe is not None and recipe.keeps_casts and not x.columns
    stats = (*cast_weight(out, k * n, shard), *saved_casts(x, out, shard.tokens * k, k * n, shard))
    return Gemm(
        name,
        (x.read,),
        (Tensor(out, shard.tokens * n, shard.itemsize),),
        (*(() if own else (x.kept,)), *(copy.name for copy in stats)),
        stats,
        params,
        m=shard.tokens,
        n=n,
        k=k,
        itemsize=shard.itemsize,
        recipe=recipe,
        cast_bytes=casts.bytes,
        cast_kernels=casts.kernels,
        cast_slow=casts.slow,
        forward_cast=forward_cast(x, shard.tokens * k, k * n, shard),
        keeps_columns=x.columns or own,
        role=role,
    )


def cast_weight(out: str, elements: Num, shard: Shard) -> tuple[Tensor, ...]:
    """The copy of an fp32 weight that autocast makes without FSDP, and keeps for backward (torch/amp/autocast_mode.py)."""
    software = shard.software
    autocast = software.family == "torch" and software.states.param_dtype == "fp32" and shard.itemsize < FP32
    return (Tensor(f"{out}.weight", elements, shard.itemsize),) if autocast else ()


def enter_tp(
    name: str, x: Operand, hidden: int, shard: Shard, recipe: Recipe | None = None, role: Role = ""
) -> tuple[list[Op], Operand]:
    """Before a column-parallel projection: ops, and what it reads and keeps for wgrad.

    With sp an all-gather whose backward is a reduce-scatter (g-bar of Korthikanti et al. 2022, figure 5); Megatron keeps the
    shard and gathers again for wgrad (megatron/core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication).
    Under a recipe the quantized copy is gathered, by rows now and by columns again (TE pytorch/distributed.py,
    gather_along_first_dim with a quantizer; torchao's by tensor `casts_its_share`); gradients are reduced in the compute dtype.
    Without sp the identity whose backward is an all-reduce (f of Shoeybi et al. 2019, figure 3).
    """
    if not shard.split:
        return [], x
    full = shard.tokens * hidden * shard.itemsize
    if not shard.sp:
        return [Comm(f"{name}.copy", (x.read,), backward="all_reduce", bytes=full, region="enter", role=role)], x
    regather = shard.software.activations.sp_regather
    whole = Tensor(f"{x.read}.gathered", shard.tokens * hidden, shard.itemsize, pooled=regather)
    stats: list[Op] = []
    quantized = recipe is not None and casts_its_share(shard)
    if recipe and quantized:
        whole = whole._replace(itemsize=recipe.itemsize, grad_itemsize=shard.itemsize)
        if recipe.casts:
            stats, x = cast_per_product(name, x, shard.sequence_tokens * hidden, shard, role)
            stats = [*agree(name, shard, forward=True, role=role), *stats]
    gather = Comm(
        f"{name}.gather",
        (x.read,),
        (whole,),
        kind="all_gather",
        backward="reduce_scatter",
        bytes=whole.bytes,
        regather=regather,
        backward_bytes=full,
        region="enter",
        role=role,
    )
    after = Operand(whole.name, x.kept if regather else whole.name, x.columns and regather, quantized)
    return [*stats, gather], after


def leave_tp(name: str, partial: str, hidden: int, shard: Shard, role: Role = "") -> Sublayer:
    """After a row-parallel projection: reduce-scatter over tokens with sp, else all-reduce in place.

    Under a recipe backward gathers quantized gradients, in both directions where a transpose does not make the other (TE
    pytorch/module/base.py, grad_output_preprocess).
    """
    if not shard.split:
        return [], partial
    bytes_ = shard.tokens * hidden * shard.itemsize
    if not shard.sp:
        return [Comm(f"{name}.reduce", (partial,), kind="all_reduce", bytes=bytes_, region="leave", role=role)], partial
    out = Tensor(f"{partial}.scattered", shard.sequence_tokens * hidden, shard.itemsize)
    recipe = shard.software.recipe if casts_its_share(shard) else None
    back = shard.tokens * hidden * recipe.itemsize * (1.0 if recipe.tensor_scaled else 2.0) if recipe else bytes_
    scatter = Comm(
        f"{name}.scatter",
        (partial,),
        (out,),
        kind="reduce_scatter",
        backward="all_gather",
        bytes=bytes_,
        backward_bytes=back,
        region="leave",
        role=role,
    )
    return [scatter, *agree(name, shard, forward=False, role=role)], out.name


def dropout(name: str, x: str, elements: Num, model: Model, shard: Shard, role: Role = "") -> Sublayer:
    """Dropout with its mask kept; nothing when the probability is 0, of attention's scores their own."""
    if not (model.attention_dropout if role == "core_attn" else model.dropout):
        return [], x
    mask = Tensor(f"{name}.mask", elements, shard.software.activations.dropout_mask_bytes)
    out = Tensor(f"{name}.out", elements, shard.itemsize)
    return [Move(name, (x,), (out,), (mask.name,), (mask,), draws_mask=True, role=role)], out.name


def norm_before(name: str, x: str, model: Model, shard: Shard) -> tuple[list[Op], str]:
    """The norm in front of a half of a block, where the model has one."""
    if not model.pre_norms:
        return [], x
    return norm(f"{name}.norm", x, shard.sequence_tokens, model.hidden_sz, model, shard)


def add_branch(name: str, x: str, branch: str, out: str, model: Model, shard: Shard) -> list[Op]:
    """The end of a half of a block: a norm where the model has one, dropout, and the sum with `x`."""
    rows, hidden = shard.sequence_tokens, model.hidden_sz
    ops: list[Op] = []
    if model.post_norms:
        ops, branch = norm(f"{name}.post_norm", branch, rows, hidden, model, shard, "")
    dropped, branch = dropout(f"{name}.dropout", branch, rows * hidden, model, shard)
    return [*ops, *dropped, residual(f"{name}.residual", x, branch, out, rows * hidden, shard)]


def residual(name: str, x: str, branch: str, out: str, elements: Num, shard: Shard) -> Op:
    """Add the branch: out = x + branch; backward passes the gradient to both."""
    return Move(name, (x, branch), (Tensor(out, elements, shard.itemsize),), same_grad=True)


def linear_params(name: str, shape: tuple[int, int], bias: bool) -> tuple[Param, ...]:
    """Weight and bias of a column-parallel projection: both split by tp."""
    weight = Param(f"{name}.weight", shape, 0)
    return (weight, Param(f"{name}.bias", shape[:1], 0)) if bias else (weight,)


def casts(shard: Shard, width: Num, hidden: int) -> Backward:
    """What the backward of a projection after the norm quantizes."""
    return backward_casts(shard, shard.tokens, width, hidden, from_norm=True)
