"""torchao's low precision of the grouped products of experts: what is multiplied, cast and laid out around each.

Source: pytorch/ao@36027d82 torchao/prototype/moe_training/mxfp8_grouped_mm.py (_MXFP8GroupedMM) and fp8_grouped_mm.py
(_Float8GroupedMM), which torchtitan's converters of grouped experts put in place of torch._grouped_mm. Both save the input and
the weight in bf16 (ctx.save_for_backward) and cast again in backward. FSDP and the exchange of rows stay in bf16.
"""

from typing import Literal, NamedTuple, TypeAlias

from steptime.software.precision import ROWWISE_RATE, ROWWISE_RATE_BLACKWELL, Casts, Recipe, torchao_recipe

GroupedPrecision: TypeAlias = Literal["none", "mxfp8_torchao", "mxfp8_torchao_wgrad_hp", "fp8_rowwise"]

SCALED_ON_BLACKWELL = 0.594
"""Share of the dense fp8 peak at which torch._scaled_grouped_mm multiplies MXFP8 operands, forward and for the input's
gradient, before the losses from depth and rows (`cost.compute.gemm_pass`): 1,671 and 1,683 us on B200 for 131,072 rows of 8
experts, 7,168 x 2,048 (pytorch/ao@36027d82 torchao/prototype/moe_training/README.md, breakdown by pass), 2,302 and 2,286 TFLOP/s
of 4,500. The README's own shares, 65.6 and 65.1 %, are of an achievable 78 % of that peak."""
SCALED_WGRAD = 0.72
"""Rate of the product for the weights' gradients, with groups along the contraction, divided by the others': 2,103 us there."""
LAYOUT_S_PER_ROW = 204e-6 / 16384.0
"""Time of the kernel that lays out scales along the contraction, per row of a group: it passes a group's columns of scales one
block after another (triton_mx_block_rearrange_2d_K_groups), 199.8 and 207.9 us for 2,048 and 7,168 lines of 16,384 rows [s]."""
_SCALED = 3.0 + 1.0 / 32.0
"""Bytes per element of an MXFP8 cast: 2 read, 1 written, and a scale for 32 elements (benchmarks/prototype/moe_training/mxfp8/
roofline_unified.py)."""


class GroupedKernels(NamedTuple):
    """What surrounds the three grouped products of one expert layer's projection."""

    recipe: Recipe
    casts: Casts
    """The recipe's, of activations and gradients."""
    weight_forward: float
    weight_backward: float
    """Bytes per element that casts of the weight move."""
    forward_kernels: float
    backward_kernels: float
    layouts: float
    """Kernels that take `LAYOUT_S_PER_ROW` for each row of a group, in backward."""
    multiple: float
    """Rows of an expert are padded to a multiple of this: 16 of float8, and 128 that MXFP8's cast needs on compute capability 10
    (torchtitan@b5bcd76c torchtitan/components/quantization/mx.py, pad_multiple; float8.py, PAD_MULTIPLE)."""


def _kernels(
    name: str, casts: Casts, rates: tuple[str, ...], weights: tuple[float, float], kernels: tuple[float, float, float]
) -> GroupedKernels:
    recipe = torchao_recipe(name, 1.0 + (1.0 / 32.0 if "mxfp8" in name else 0.0), casts, rates=rates)
    recipe = recipe._replace(of_experts=True, wgrad_rate=SCALED_WGRAD if "mxfp8" in name else None)
    return GroupedKernels(recipe, casts, *weights, *kernels, multiple=128.0 if "mxfp8" in name else 16.0)


_MX_RATES = ("mxfp8", "fp8")
GROUPED: dict[str, GroupedKernels] = {
    "mxfp8_torchao": _kernels(
        "mxfp8_torchao",
        Casts(_SCALED, _SCALED, 2.0 * _SCALED, 2.0 * _SCALED),
        _MX_RATES,
        (_SCALED, _SCALED),
        # forward: input, weight, the layout of its scales; backward: gradient, weight, both by columns, offsets, and two layouts,
        # each into zeros
        (3.0, 9.0, 2.0),
    ),
    "mxfp8_torchao_wgrad_hp": _kernels(
        "mxfp8_torchao_wgrad_hp",
        Casts(_SCALED, 0.0, _SCALED, 2.0 * _SCALED, plain_wgrad=True),
        _MX_RATES,
        (_SCALED, _SCALED),
        (3.0, 2.0, 0.0),
    ),
    "fp8_rowwise": _kernels(
        "fp8_rowwise",
        # by rows 2 read, 1 written; by columns of a group read twice (triton_fp8_per_group_colwise_scales_dual), as is the
        # transposed weight (triton_fp8_rowwise_3d_transpose_rhs)
        Casts(3.0, 5.0, 3.0 + 5.0, 3.0 + 5.0),
        ("fp8",),
        (3.0, 5.0),
        # and two reciprocals of scales for each product
        (4.0, 8.0, 0.0),
    ),
}


def grouped_kernels(name: GroupedPrecision, *, blackwell: bool) -> GroupedKernels | None:
    """What the products of experts run in, on a device with or without block scales; None in the compute dtype."""
    found = GROUPED.get(name)
    if found is None or found.recipe.microscaling:
        return found
    rate = ROWWISE_RATE_BLACKWELL if blackwell else ROWWISE_RATE
    return found._replace(recipe=found.recipe._replace(forward_rate=rate, backward_rate=rate))
