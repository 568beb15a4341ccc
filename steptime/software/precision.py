"""Low-precision recipes: what a block's projections multiply, store, save and send. One entry each; everything else is bf16.

Attention, norms, residuals, embedding, head and the reductions of tensor parallelism keep the compute dtype (Megatron-Core
0.16.1 core/fp8_utils.py, get_fp8_context wraps the transformer layers only; fp8_dot_product_attention is off,
core/transformer/transformer_config.py:477). TE = NVIDIA/TransformerEngine 2.x, transformer_engine/; core = megatron-core 0.16.1.
"""

from collections.abc import Container
from functools import cache
from typing import Literal, NamedTuple, TypeAlias

RecipeName: TypeAlias = Literal[
    "fp8_delayed", "fp8_current", "fp8_blockwise", "mxfp8", "nvfp4",
    "fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_gw_hp", "mxfp8_torchao", "nvfp4_torchao",
]  # fmt: skip


class Casts(NamedTuple):
    """Torchao's linear layers cast input and weight where they are multiplied: bytes moved per element.

    Source: pytorch/ao@36027d82 torchao/testing/training/roofline_utils.py; the maximum that comes before a cast by tensor is
    fused with the kernel that makes the input.
    """

    input_forward: float
    input_backward: float
    gradient: float
    weight: float
    """Bytes per element that the casts move, forward and backward."""
    plain_wgrad: bool = False
    """Whether the product for the weight's gradient runs in bf16."""
    kept: bool = False
    """Whether backward reads the casts that forward made, of the input by columns and of the transposed weight, and no bf16; else
    both are kept in bf16 and cast again."""


class Recipe(NamedTuple):
    """How weights, activations and gradients of a projection are quantized. Itemsizes count the scales."""

    name: str
    rates: tuple[str, ...]
    """Rates of a machine that its products run at; the first that the machine has."""
    itemsize: float
    """Bytes per element of one quantized copy of an activation or gradient."""
    weight_itemsize: float
    """Bytes per element of one quantized copy of a weight."""
    amax_reads: float
    """Reads of the whole tensor before the one that casts it."""
    tensor_scaled: bool
    """One scale per tensor: a transpose has the same values. Otherwise rows and columns are quantized separately."""
    fused_norm: bool
    """Whether the norm's kernel writes the quantized copies; else it writes bf16, and a cast reads it."""
    proj_keeps_input: bool
    """The attention's output projection keeps its bf16 input, which attention keeps anyway, and casts it again for wgrad."""
    param_gather_itemsize: float
    """Bytes per element that the parameter all-gather sends where parameters are stored quantized (`fp8_params`)."""
    microscaling: bool
    """Needs tensor cores that apply block scales."""
    column_reads: float = 0.0
    """Reads of the whole tensor, weights excepted, by a separate kernel that makes the copy by columns."""
    gaps: float = 1.0
    """Kernels around a projection's products divided by those of a recipe with one scale per tensor."""
    split_forward: bool = False
    """Whether the forward product accumulates in fp32 over short stretches, as backward products always do."""
    casts: Casts | None = None
    """Of a recipe of torchao; TransformerEngine's have none."""
    of_experts: bool = False
    """Whether it is that of torchao's grouped products of experts (`grouped_precision`), with rates of their own."""
    wgrad_rate: float | None = None
    """Rate of the product for the weight's gradient divided by the others'; None: as that of products in bf16."""
    # the fields below depend on the machine: set by `recipe`
    copies: float = 2.0
    """Quantized copies of each tensor: by rows for the forward product, by columns for the backward ones."""
    forward_rate: float = 1.0
    backward_rate: float = 1.0
    """Factor on the machine's rates of the products."""
    scale_kernels: float = 0.0
    """Kernels that lay out the scales of a product's operands before it."""

    @property
    def keeps_casts(self) -> bool:
        """Whether it is torchao's and keeps what forward cast (`Casts.kept`)."""
        return self.casts is not None and self.casts.kept


_BLOCKWISE, _MX, _NV = 4.0 / 128.0, 1.0 / 32.0, 1.0 / 16.0
"""Bytes of scales per element: fp32 for 128 elements, one byte for 32 (OCP Microscaling Formats 1.0), one for 16 (NVFP4)."""


_FP4_CASTS = (4.0 + 2.0 * (0.5 + _NV), 0.0, 4.0 + 2.0 * (0.5 + _NV), 4.0 + 2.0 * (0.5 + _NV))
"""pytorch/ao@36027d82 torchao/prototype/moe_training/nvfp4_training/nvfp4_linear.py: input, nothing again, gradient, weight."""


def torchao_recipe(
    name: str, itemsize: float, casts: Casts, *, gather: float = 2.0, rates: tuple[str, ...] = ("fp8",)
) -> Recipe:
    """A recipe of torchao: `gather` bytes per element in FSDP's all-gather, where weights go out quantized."""
    return Recipe(
        name,
        rates,
        itemsize,
        itemsize,
        0.0,
        tensor_scaled=name == "fp8_tensorwise",
        fused_norm=False,
        proj_keeps_input=not casts.kept,
        param_gather_itemsize=gather,
        microscaling=rates != ("fp8",),
        casts=casts,
    )


def by_rows(of: Recipe | None) -> bool:
    """Whether a recipe is torchao's with a scale for each row, whose backward casts a product's input again by columns."""
    return of is not None and of.name == "fp8_rowwise"


RECIPES: dict[str, Recipe] = {
    entry.name: entry
    for entry in (
        Recipe(
            "fp8_delayed", ("fp8",), 1.0, 1.0, 0.0,
            tensor_scaled=True, fused_norm=True, proj_keeps_input=False, param_gather_itemsize=1.0, microscaling=False,
        ),
        Recipe(
            "fp8_current", ("fp8",), 1.0, 1.0, 1.0,
            tensor_scaled=True, fused_norm=False, proj_keeps_input=True, param_gather_itemsize=1.0, microscaling=False,
        ),
        Recipe(
            "fp8_blockwise", ("fp8",), 1.0 + _BLOCKWISE, 1.0 + _BLOCKWISE / 128.0, 0.0,
            tensor_scaled=False, fused_norm=False, proj_keeps_input=True, param_gather_itemsize=1.0, microscaling=False,
            split_forward=True,
        ),
        Recipe(
            "mxfp8", ("mxfp8", "fp8"), 1.0 + _MX, 1.0 + _MX, 0.0,
            tensor_scaled=False, fused_norm=True, proj_keeps_input=True, param_gather_itemsize=2.0, microscaling=True,
        ),
        Recipe(
            "nvfp4", ("nvfp4", "fp4"), 0.5 + _NV, 0.5 + _NV, 1.0,
            tensor_scaled=False, fused_norm=False, proj_keeps_input=True, param_gather_itemsize=2.0, microscaling=True,
            column_reads=1.0, gaps=3.0,
        ),
        # by tensor: read 2 and written 1 forward, the same backward; a gradient's maximum first, then both layouts
        torchao_recipe("fp8_tensorwise", 1.0, Casts(3.0, 3.0, 6.0, 8.0), gather=1.0),
        torchao_recipe("fp8_rowwise", 1.0, Casts(3.0, 5.0, 8.0, 10.0)),
        torchao_recipe("fp8_rowwise_gw_hp", 1.0, Casts(3.0, 0.0, 3.0, 6.0, plain_wgrad=True)),
        torchao_recipe("mxfp8_torchao", 1.0 + _MX, Casts(3.0, 3.0, 6.0, 6.0), rates=("mxfp8", "fp8")),
        # of each tensor its maximum 2, then read 2 and written in both directions
        torchao_recipe("nvfp4_torchao", 0.5 + _NV, Casts(*_FP4_CASTS, kept=True), rates=("nvfp4", "fp4")),
    )
}  # fmt: skip
"""Sources, by column:

- rates, microscaling: TE common/recipe/__init__.py; MXFP8 and NVFP4 need compute capability 10 (TE pytorch/quantization.py,
  check_mxfp8_support, check_nvfp4_support). All three products run in the recipe, NVFP4's dgrad and wgrad too (TE
  NVFP4BlockScaling: Hadamard transform and stochastic rounding in the backward casts, no bf16 product).
- itemsizes: one fp32 scale per tensor; blockwise 1 x 128 fp32 scales for activations, 128 x 128 for weights (Float8BlockScaling);
  mxfp8 one byte per 32; nvfp4 one byte per 16 (NVFP4BlockScaling docstring).
- amax_reads: delayed scaling takes the maximum while it casts, for the next step; current scaling reads first
  (Float8CurrentScaling); blocks fit into the cast kernel; nvfp4's second-level scale is one per tensor (TE
  pytorch/csrc/quantizer.cpp, NVFP4Quantizer::quantize_impl: nvte_hadamard_transform_amax).
- column_reads: same function: nvte_hadamard_transform_cast_fusion_columnwise beside the kernel that casts by rows.
- tensor_scaled: a transposed copy for fp8 products that take one layout only (TE pytorch/utils.py,
  is_non_tn_fp8_gemm_supported: compute capability below 10); MXFP8, blockwise and NVFP4 quantize both directions from the
  original (TE NVFP4BlockScaling docstring).
- fused_norm: TE pytorch/csrc/extensions/normalization.cpp, force_unfused_kernel: fused for delayed scaling, for MXFP8 with
  NVTE_NORM_FWD_USE_CUDNN=1, which NVIDIA's performance scripts set (Megatron-Bridge).
- proj_keeps_input: core transformer/attention.py:363-379, set_save_original_input except for delayed scaling.
- param_gather_itemsize: core distributed/param_and_grad_buffer.py:776-790: bf16 parameters in the gradient buffer for MXFP8,
  raw fp8 data for the others; nvfp4 assumed as mxfp8.
- gaps: launches of casts beside one projection's three products. Current scaling takes the maximum and casts, of input and of
  gradient: 4. NVFP4: Hadamard maximum, cast by rows, cast by columns, of both, and two layouts of scales a product: 12 (TE
  NVFP4Quantizer::quantize_impl; swizzled scales come from the cast since TE pull request 3011, June 2026). MXFP8's were 2 + 6 and
  are 2 (pull request 2486, January 2026): counted as 4.
- scale_kernels: TE pytorch/csrc/extensions/gemm.cpp, swizzle_scaling_factors of both operands; fp8_blockwise's scales become
  MXFP8's there (convert_block_scaling_to_mxfp8_tensor).
- split_forward: TE Float8BlockScaling ("requires split accumulation"); the others' forward products add up fast, all backward
  ones do not (Float8CurrentScaling: fp8_gemm_fprop, _dgrad, _wgrad; for delayed scaling TE pytorch/module/base.py, _2X_ACC_FPROP,
  _DGRAD, _WGRAD).
- copies: TE pytorch/module/base.py, get_weight_workspace, keeps them over the micro-batches of a step
  (core extensions/transformer_engine.py:671, is_first_microbatch).
"""

ROWWISE_RATE, ROWWISE_RATE_BLACKWELL = 0.75, 0.5
"""Rate of products with one scale per row divided by that with one per tensor, from the loss of Llama-3 8B: 6,768 tokens/s
against 7,690 on H100 at 500 W, 8,641 against 10,417 on B200 (pytorch/ao docs/source/workflows/training.md), less what the casts
take. 0.9 to 1.0 is measured for large products alone, 0.5 for others (pytorch/pytorch pull request 147971)."""
SPLIT_ACCUMULATION = 1.0 / 1.15
"""Rate of fp8 products that accumulate in fp32 divided by that with fast accumulation, on tensor cores before microscaling: fast
accumulation is 1.1 to 1.2 times as fast (pytorch/ao issue 2377, H100). Assumed for other makers' devices."""


@cache
def recipe(name: str, *, any_layout: bool) -> Recipe | None:
    """The recipe `name` on a machine whose fp8 products take operands in any layout, or do not; None for plain dtypes.

    Where it does, a tensor-scaled copy serves both directions, products add up in fp32 at full rate, and scales of blocks are
    laid out for the tensor cores.
    """
    found = RECIPES.get(name)
    if found is None:
        return None
    if any_layout and found.casts:
        rate = 1.0 if found.tensor_scaled or found.microscaling else ROWWISE_RATE_BLACKWELL
        kernels = 2.0 if found.microscaling and not found.keeps_casts else 0.0
        return found._replace(forward_rate=rate, backward_rate=rate, scale_kernels=kernels)
    if any_layout:
        return found._replace(copies=1.0) if found.tensor_scaled else found._replace(scale_kernels=2.0)
    if found.casts and not found.tensor_scaled:
        return found._replace(forward_rate=ROWWISE_RATE, backward_rate=ROWWISE_RATE)
    forward = SPLIT_ACCUMULATION if found.split_forward else 1.0
    return found._replace(forward_rate=forward, backward_rate=SPLIT_ACCUMULATION)


def weight_bytes(of: Recipe | None, compute: float, *, stored: bool) -> float:
    """Bytes per element of a projection's weight on a device, the fp32 master apart.

    Quantized copies, and one in the compute dtype's `compute` bytes unless the weight is `stored` quantized.

    >>> weight_bytes(RECIPES["fp8_delayed"], 2.0, stored=False), weight_bytes(RECIPES["fp8_delayed"], 2.0, stored=True)
    (4.0, 2.0)
    """
    if of is None or of.casts:
        return compute
    return of.copies * of.weight_itemsize + (0.0 if stored else compute)


def rate_of(name: str, rates: Container[str]) -> str | None:
    """The first of a recipe's rates that a machine has; None where it has none."""
    return next((rate for rate in RECIPES[name].rates if rate in rates), None)


@cache
def precisions(rates: tuple[str, ...], *, microscaling: bool) -> tuple[str, ...]:
    """The rates of a machine, and the recipes that run on it."""
    able = (entry.name for entry in RECIPES.values() if microscaling or not entry.microscaling)
    return (*rates, *(name for name in able if rate_of(name, rates)))
