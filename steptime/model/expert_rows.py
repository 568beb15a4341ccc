"""Rows of experts on the way into their quantized products: padded to what these take, and cast."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from steptime.model.ops import Move, Op, Role, Tensor
from steptime.model.quantize import Operand, cast

if TYPE_CHECKING:
    from steptime.base.num import Num
    from steptime.model.routing import Rows
    from steptime.model.shard import Shard
    from steptime.model.sublayers import Sublayer


def aligned_rows(rows: Rows, name: str, x: str) -> Sublayer:
    """Rows of every expert padded to a multiple that quantized products take, or the padding removed: a copy of all rows.

    To 16, 32 or 128 rows, which `GROUP_ROWS` includes (megatron/core/transformer/moe/experts.py, quantization_padding). HybridEP
    pads in its own permutation; DeepEP is taken to. Experts in turn concatenate their padding, which is not counted.
    """
    shard = rows.shard
    if shard.software.recipe is None or not shard.software.moe.grouped_gemm or shard.software.moe.dispatcher == "flex":
        return [], x
    out = Tensor(f"{name}.out", rows.here * rows.hidden, shard.itemsize)
    return [Move(name, (x,), (out,), role="moe")], out.name


def cast_rows(name: str, x: str, elements: Num, rows: Rows, role: Role) -> tuple[list[Op], Operand]:
    """Rows quantized for the products, each expert's by kernels of their own unless `one_cast` does all.

    Those of grouped products are launched by one C++ loop.
    """
    ops, operand = cast(name, x, elements, rows.shard, role=role)
    each = 1.0 if one_cast(rows.shard) else rows.local_experts
    looped = rows.shard.software.moe.grouped_gemm
    return [replace(op, kernels=op.kernels * each, looped=looped) for op in ops if isinstance(op, Move)], operand


def one_cast(shard: Shard) -> bool:
    """Whether one kernel casts the rows of all experts.

    TransformerEngine v2.5 to v2.12 pytorch/csrc/extensions/cast.cpp, multi_tensor_quantize_impl: with delayed scaling alone; in a
    fused MLP tex.group_quantize does. Experts that are not grouped cast in their own projections.
    """
    how = shard.software.moe
    return (shard.software.precision == "fp8_delayed" and how.grouped_gemm) or how.fused_mlp
