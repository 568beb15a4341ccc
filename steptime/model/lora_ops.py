"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) over frozen weights, as a change of a part's ops.

A projection W x becomes W x + (alpha / r) B A x, with A of r rows and B of r columns. Frozen weights have no gradient: no weight
gradient product, and no input kept for one. Source: huggingface/peft src/peft/tuners/lora/layer.py, Linear.forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from steptime.model.lora import NF4, PROJECTIONS, Lora
from steptime.model.lora_split import split_of
from steptime.model.ops import Comm, Gemm, Move, Op, Param, Tensor

if TYPE_CHECKING:
    from steptime.base.num import Num
    from steptime.model.model import Model
    from steptime.model.shard import Shard

FP32 = 4.0
"""Bytes of one fp32 number."""


def adapted(ops: list[Op], lora: Lora, model: Model, shard: Shard) -> list[Op]:
    """The ops of a part with its parameters frozen and adapters added to its projections."""
    found: list[Op] = []
    rest = iter(ops)
    for op in rest:
        still = frozen(op)
        if isinstance(op, Gemm) and isinstance(still, Gemm) and op.name in PROJECTIONS and lora.base_dtype == "nf4":
            found.append(unpack(op))
            still = replace(still, temp_bytes=op.k * op.n * op.itemsize)
        if isinstance(op, Gemm) and isinstance(still, Gemm) and lora.adapts(op):
            found += with_adapter(op, still, lora, sizes_of(op, lora, model, shard), shard, rest)
        else:
            found.append(still)
    return found


def unpack(op: Gemm) -> Move:
    """A packed weight written in the compute dtype before each product (bitsandbytes autograd/_functions.py, MatMul4Bit)."""
    moved = op.k * op.n * (NF4 + op.itemsize)
    return Move(f"{op.name}.dequantize", forward_bytes=moved, backward_bytes=moved, role=op.role)


def frozen(op: Op) -> Op:
    """An op whose parameters have no gradient, and what it then keeps.

    A projection keeps nothing, so its input is not gathered again for a weight gradient. RMSNorm in several kernels keeps its
    normalized input only for the gradient of its weight. An embedding has no backward.
    """
    if isinstance(op, Comm) and op.regather:
        return replace(op, regather=False, outputs=tuple(t._replace(pooled=False) for t in op.outputs))
    if not op.params:
        return op
    params = tuple(p._replace(group="frozen") for p in op.params)
    if isinstance(op, Gemm):
        return replace(op, params=params, saves=())
    if isinstance(op, Move) and not op.inputs:
        return replace(op, params=params, saves=(), stats=(), backward_bytes=0.0)
    unread = {t.name for t in op.stats if t.for_weight}
    stats = tuple(t for t in op.stats if t.name not in unread)
    return replace(op, params=params, stats=stats, saves=tuple(name for name in op.saves if name not in unread))


def without_backward(ops: list[Op]) -> list[Op]:
    """The ops of a frozen embedding: nothing before the first adapter has a gradient, so that nothing is sent for one."""
    return [replace(op, backward=None) if isinstance(op, Comm) else op for op in ops]


def sizes_of(op: Gemm, lora: Lora, model: Model, shard: Shard) -> tuple[int, Num]:
    """Rows of A and of B beside a projection."""
    if op.name != "attn.qkv" or not shard.software.kernels.separate_adapters:
        return lora.rank, op.params[0].shape[0]
    heads = {"q_proj": model.n_q_heads, "k_proj": model.n_kv_heads, "v_proj": model.n_kv_heads}
    own = [count for target, count in heads.items() if target in lora.targets]
    return lora.rank * len(own), sum(own) * model.head_dim


def with_adapter(
    op: Gemm, still: Gemm, lora: Lora, sizes: tuple[int, Num], shard: Shard, rest: Iterator[Op]
) -> list[Op]:
    """A frozen projection and its adapter: dropout, A, B, the scale and the sum.

    `sizes`: rows of A and of B. `rest`: the ops after it; a row-parallel projection's own collective comes before its adapter.

    Adapters in fp32 under autocast (FSDP gathers them in the compute dtype) read an fp32 copy of the input, which is cast back
    for each of them and kept, as are the casts of both weights (peft tuners_utils.py, _cast_input_dtype;
    aten/src/ATen/autocast_mode.cpp, cached_cast).
    """
    name, rank, rows, size = op.name, 1.0 * lora.rank, op.m, shard.itemsize
    (rows_a, rows_b), columns = sizes, op.params[0].shape[1]
    wide = shard.software.family != "fsdp2" and shard.software.bytes_of(shard.software.states.param_dtype) > size
    base = Tensor(f"{name}.base", sum([t.elements for t in op.outputs]), size)
    split = split_of(op, lora.split, shard)
    ops: list[Op] = [replace(still, outputs=(base,))]
    sums, outputs = base.name, op.outputs
    if split.row:
        left, sums, outputs = split.leave(next(rest), base, op.outputs)
        ops.append(left)
    entered, x = split.enter(op.inputs[0], op.saves[0])
    ops += entered
    kept = x if split.tp else op.saves[0]
    if wide:
        ops.append(copy(f"{name}.lora.upcast", x, rows * op.k, FP32, size))
        x = f"{name}.lora.upcast.out"
    if lora.dropout:
        ops.append(dropped(f"{name}.lora.dropout", x, rows * op.k, FP32 if wide else size, shard))
        x = kept = f"{name}.lora.dropout.out"
    if wide:
        ops.append(copy(f"{name}.lora.cast", x, rows * op.k, size, FP32))
        x = kept = f"{name}.lora.cast.out"
    dims_a, dims_b = split.dims
    inner, outer = split.share(1.0 * rows_a, dims_a == 0), split.share(1.0 * rows_b, dims_b == 0)
    down, up = Tensor(f"{name}.lora_a.out", rows * inner, size), Tensor(f"{name}.lora_b.out", rows * outer, size)
    ops += split.before_a(x, rows * op.k * size)
    ops.append(projection(f"{name}.lora_a", (x, kept), down, (rows_a, columns), op, inner, op.k, dims_a, wide=wide))
    between, low = split.between(down, rows * rows_a)
    ops += between
    ops.append(projection(f"{name}.lora_b", (low, low), up, (rows_b, lora.rank), op, outer, rank, dims_b, wide=wide))
    after, last = split.after_b(up, rows * rows_b)
    scaled = Tensor(f"{name}.lora.scaled", sum([t.elements for t in outputs]), size)
    ops += [*after, Move(f"{name}.lora.scale", (last,), (scaled,))]
    return [*ops, Move(f"{name}.lora.add", (sums, scaled.name), outputs, same_grad=True)]


def projection(
    name: str,
    x: tuple[str, str],
    out: Tensor,
    shape: tuple[Num, Num],
    of: Gemm,
    n: Num,
    k: Num,
    split_dim: int | None,
    *,
    wide: bool,
) -> Gemm:
    """A or B of an adapter, which reads x[0] and keeps x[1]; with `wide` it also keeps its weight in the compute dtype.

    `shape`: the whole weight; `n` and `k`: columns of the output and of the input on this device.
    """
    copied = (Tensor(f"{name}.weight.cast", 1.0 * n * k, of.itemsize),) if wide else ()
    saves = (x[1], *(t.name for t in copied))
    weight = (Param(f"{name}.weight", shape, split_dim),)
    return Gemm(
        name, (x[0],), (out,), saves, copied, weight, m=of.m, n=1.0 * n, k=1.0 * k, itemsize=of.itemsize, role=of.role
    )


def copy(name: str, x: str, elements: Num, itemsize: float, from_itemsize: float) -> Move:
    """A copy of `x` in another dtype."""
    moved = elements * (itemsize + from_itemsize)
    return Move(name, (x,), (Tensor(f"{name}.out", elements, itemsize),), forward_bytes=moved, backward_bytes=moved)


def dropped(name: str, x: str, elements: Num, itemsize: float, shard: Shard) -> Move:
    """Dropout of an adapter's input, with its mask kept."""
    mask = Tensor(f"{name}.mask", elements, shard.software.activations.dropout_mask_bytes)
    return Move(name, (x,), (Tensor(f"{name}.out", elements, itemsize),), (mask.name,), (mask,), draws_mask=True)
