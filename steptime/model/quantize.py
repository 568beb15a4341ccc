"""Quantized operands of a block's projections, as ops: what is cast where, what is kept, what backward casts again.

Without a recipe every function returns its input. `Operand` names the tensor a projection reads and the one it keeps
for wgrad. Sources: `precision.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from steptime.model.ops import NO_CAST, VECTORIZED, ByElement, Casting, Comm, Move, Op, Role, Tensor
from steptime.model.torchao_fp4 import cast_input, gradient_casting, input_casting, shares_casts, weight_casting
from steptime.software.precision import Casts, by_rows

if TYPE_CHECKING:
    from steptime.base.num import Num
    from steptime.model.shard import Shard
    from steptime.software.precision import Recipe


EAGER_CAST, EAGER_KERNELS, TURNED = 33.0, 6.0, 2.0
"""Bytes per element and kernels of torchao's cast of a bf16 tensor to float8 in eager torch: abs 2 + 2, max 2, upcast 2 + 4,
product with the scale 4 + 4, clamp 4 + 4, downcast 4 + 1 (pytorch/ao torchao/float8/float8_utils.py, tensor_to_amax,
to_fp8_saturated; float8_tensor.py, _ToFloat8ConstrFunc). By tensor the float8 copies are kept, and transposed for the product
that gives the weight's gradient; by rows all is cast again (float8_linear.py@024fe94f). Weights are cast in forward and backward
(@c6de9b42) unless they are saved (`saved_weight`)."""
SAVED_WEIGHT = {True: EAGER_CAST, False: 5.0}
"""Bytes per element that the cast of a weight by tensor moves where backward reuses it, in eager torch and compiled: maximum 2,
read 2, written 1 (torchao/testing/training/roofline_utils.py, kernels 1 and 3)."""


class Operand(NamedTuple):
    """The input of a projection: the tensor it multiplies, the one kept for wgrad, and whether that is the copy by columns."""

    read: str
    kept: str
    columns: bool = False
    quantized: bool = False
    """Whether tensor parallelism gathered what torchao had cast."""


def copies(x: str, elements: Num, recipe: Recipe, itemsize: float, *, both: bool) -> tuple[Tensor, ...]:
    """The quantized copy by rows, and the one by columns if `both`; gradients stay in the compute dtype."""
    rows = Tensor(f"{x}.rows", elements, recipe.itemsize, itemsize)
    return (rows, Tensor(f"{x}.columns", elements, recipe.itemsize)) if both else (rows,)


def cast_bytes(elements: Num, recipe: Recipe, itemsize: float, n_copies: float) -> Num:
    """Bytes of casting a tensor into `n_copies` copies: read for its maximum where the recipe needs it, read, written."""
    reads = cast_kernels(recipe, n_copies)
    return elements * (itemsize * reads + n_copies * recipe.itemsize)


def cast_kernels(recipe: Recipe, n_copies: float) -> float:
    """Kernels of a cast into `n_copies` copies."""
    return 1.0 + recipe.amax_reads + (recipe.column_reads if n_copies > 1.0 else 0.0)


def cast(
    name: str, x: str, elements: Num, shard: Shard, *, both: bool = True, role: Role = ""
) -> tuple[list[Op], Operand]:
    """A kernel that reads `x` and writes its quantized copies; backward passes the gradient on unchanged."""
    recipe = shard.software.recipe
    if recipe is None:
        return [], Operand(x, x)
    if recipe.casts:
        return cast_per_product(name, Operand(x, x), elements, shard, role)
    quantized = copies(x, elements, recipe, shard.itemsize, both=both and recipe.copies > 1.0)
    moved = cast_bytes(elements, recipe, shard.itemsize, float(len(quantized)))
    kernels = cast_kernels(recipe, float(len(quantized)))
    op = Move(
        f"{name}.cast", (x,), quantized[:1], (), quantized[1:], (), moved, kernels=kernels, same_grad=True, role=role
    )
    return [op], Operand(quantized[0].name, quantized[-1].name, len(quantized) > 1)


def cast_per_product(name: str, x: Operand, elements: Num, shard: Shard, role: Role = "") -> tuple[list[Op], Operand]:
    """Torchao: the quantized copy of a projection's input exists only for its product; backward casts the kept tensor again.

    By tensor both casts are the same, so torch.compile makes one and keeps it: a byte in place of the input's two, which are kept
    where something else needs them too (torch functorch min_cut_rematerialization_partition).
    `x` is what tensor parallelism has gathered in the compute dtype. Nothing for other recipes, and for what was cast before.
    """
    recipe = shard.software.recipe
    if recipe is None or recipe.casts is None or x.quantized:
        return [], x
    if recipe.keeps_casts:
        if not shares_casts(shard):
            return [], x
        written = cast_input(name, x.read, elements, shard, recipe, role)
        return [written], Operand(written.outputs[0].name, written.stats[0].name, columns=True)
    [rows] = copies(x.read, elements, recipe, shard.itemsize, both=False)
    of, kernels = casts_of(recipe, recipe.casts, shard)
    moved = elements * of.input_forward
    op = Move(f"{name}.cast", (x.read,), (rows,), (), (), (), moved, kernels=kernels, same_grad=True, role=role)
    if recipe.tensor_scaled and shard.software.kernels.compile != "none":
        return [op], Operand(rows.name, rows.name)
    return [op], x._replace(read=rows.name)


def casts_of(recipe: Recipe, compiled: Casts, shard: Shard) -> tuple[Casts, float]:
    """Torchao's casts as they run, and the kernels of one: op by op where nothing is compiled, except MX casts."""
    if shard.software.kernels.compile != "none" or recipe.microscaling:
        return compiled, 1.0
    by_rows = Casts(EAGER_CAST, 0.0 if compiled.plain_wgrad else EAGER_CAST, EAGER_CAST, 2.0 * EAGER_CAST)
    if recipe.tensor_scaled:
        return Casts(EAGER_CAST, TURNED, EAGER_CAST + TURNED, 2.0 * EAGER_CAST), EAGER_KERNELS
    gradient = EAGER_CAST * (1.0 if compiled.plain_wgrad else 2.0)
    return by_rows._replace(gradient=gradient, plain_wgrad=compiled.plain_wgrad), EAGER_KERNELS


def casts_its_share(shard: Shard) -> bool:
    """Whether sequence-parallel ranks cast their shares before a gather: all recipes of TE, of torchao's the one by tensor.

    pytorch/ao@36027d82 torchao/float8/float8_tensor_parallel.py, PrepareFloat8ModuleInput and Float8RowwiseParallel, which
    torchtitan takes for no other recipe (torchtitan@31a17bfd torchtitan/models/llama3/infra/parallelize.py, apply_tp).
    """
    recipe = shard.software.recipe
    return bool(recipe and (not recipe.casts or recipe.tensor_scaled) and shard.sp and shard.split)


def agree(name: str, shard: Shard, *, forward: bool, role: Role = "") -> list[Op]:
    """Sequence-parallel ranks agree on a tensor's maximum before each casts its share: one fp32 value, all-reduced.

    TE pytorch/module/linear.py, _customize_quantizers_float8_current_scaling and _nvfp4 (with_amax_reduction): the input of a
    column-parallel projection, the output's gradient of a row-parallel one.
    """
    recipe = shard.software.recipe
    if recipe is None or not (recipe.amax_reads or recipe.casts) or not casts_its_share(shard):
        return []
    if forward:
        return [Comm(f"{name}.amax", kind="all_reduce", bytes=4.0, role=role)]
    return [Comm(f"{name}.amax", backward="all_reduce", bytes=4.0, role=role)]


def cast_norm(normed: list[Op], x: str, elements: Num, shard: Shard) -> tuple[list[Op], Operand]:
    """A norm before a projection: its kernel writes the copies, or a cast follows.

    A tensor-scaled recipe makes only the copy by rows, which sequence parallelism gathers; backward transposes it
    (TE pytorch/module/layernorm_linear.py: the rows are saved where the input is gathered).
    """
    recipe = shard.software.recipe
    if recipe is None or recipe.casts:
        return normed, Operand(x, x)
    both = not recipe.tensor_scaled
    last = normed[-1]
    if not recipe.fused_norm or shard.software.kernels.norm_impl != "fused" or not isinstance(last, Move):
        ops, operand = cast(last.name, x, elements, shard, both=both, role="norm")
        return [*normed, *agree(last.name, shard, forward=True, role="norm"), *ops], operand
    written = copies(x, elements, recipe, shard.itemsize, both=both)
    fused = replace(last, outputs=written[:1], stats=(*last.stats, *written[1:]))
    return [*normed[:-1], fused], Operand(written[0].name, written[-1].name, both)


def cast_context(x: str, elements: Num, shard: Shard) -> tuple[list[Op], Operand]:
    """The input of the attention's output projection: most recipes keep it in bf16, which attention keeps anyway.

    torch.compile keeps its copy by columns too, in float8 by rows: what is used far from where it was made is not made again
    (torch/_functorch/partitioners.py, ban_if_used_far_apart).
    """
    recipe = shard.software.recipe
    if recipe is None or recipe.casts or not recipe.proj_keeps_input:
        ops, operand = cast("attn.proj", x, elements, shard, role="attn_proj")
        if not by_rows(recipe) or shard.software.kernels.compile == "none" or not isinstance(ops[0], Move):
            return ops, operand
        columns = Tensor(f"{x}.columns", elements, 1.0)
        return [replace(ops[0], saves=(columns.name,), stats=(columns,))], operand
    ops, operand = cast("attn.proj", x, elements, shard, both=False, role="attn_proj")
    return ops, Operand(operand.read, x)


class Backward(NamedTuple):
    """What backward of a projection quantizes and transposes."""

    bytes: Num
    kernels: float
    slow: ByElement = VECTORIZED


def forward_cast(x: Operand, inputs: Num, weights: Num, shard: Shard) -> Casting:
    """What a projection of torchao's NVFP4 quantizes itself in forward: `weights` elements, in eager torch `inputs` too.

    All other casts are ops of their own, or part of the update.
    """
    recipe = shard.software.recipe
    if recipe is None or not recipe.keeps_casts:
        return NO_CAST
    weight = weight_casting(weights, recipe, shard.itemsize)
    if x.columns:
        return weight
    own = input_casting(inputs, recipe, shard.itemsize)
    slow = ByElement(weight.slow.elements + own.slow.elements, weight.slow.bytes + own.slow.bytes)
    return Casting(weight.bytes + own.bytes, weight.kernels + own.kernels, slow)


def saved_casts(x: Operand, out: str, inputs: Num, weights: Num, shard: Shard) -> tuple[Tensor, ...]:
    """What a projection of torchao's NVFP4 keeps of its own for backward: the transposed weight, in eager torch its input too."""
    recipe = shard.software.recipe
    if recipe is None or not recipe.keeps_casts:
        return saved_weight(out, weights, shard)
    weight = Tensor(f"{out}.fp4_weight", weights, recipe.weight_itemsize)
    return (weight,) if x.columns else (weight, Tensor(f"{out}.fp4_input", inputs, recipe.itemsize))


def saved_weight(out: str, elements: Num, shard: Shard) -> tuple[Tensor, ...]:
    """The float8 copy of a weight that a projection of torchao keeps for backward, unsharded, beside what FSDP frees.

    pytorch/ao@ca17609a torchao/float8/float8_linear.py, Float8Linear.forward and matmul_with_hp_or_float8_args: by tensor the
    weight is cast before the autograd function, which saves what it gets. force_recompute_fp8_weight_in_bwd tells torch.compile
    to cast again; it has had no effect since torchao 0.12 (@03c850af), and since 0.13 (@c6de9b42) the function saves the
    unquantized weight. torch.compile itself saved float8 weights before torch issue 141881 was fixed.
    """
    recipe = shard.software.recipe
    if recipe is None or not shard.software.saved_fp8_weights:
        return ()
    return (Tensor(f"{out}.fp8_weight", elements, recipe.weight_itemsize),)


def backward_casts(
    shard: Shard, m: Num, n: Num, k: Num, *, from_norm: bool = False, reduced: bool = False, recast: bool = False
) -> Backward:
    """Casts of an m x k by k x n projection's backward: the output's gradient, and the input where only bf16 or rows are kept.

    `from_norm`: the input was kept by rows. `reduced`: the output was summed over tp, so with sequence parallelism each rank
    casts its share of the gradient and gathers the result (TE pytorch/module/base.py, grad_output_preprocess). `recast`: the
    input was kept in bf16. Torchao's casts are four: gradient, input, and weight twice, or once where it is saved.
    """
    recipe = shard.software.recipe
    if recipe is None:
        return Backward(0.0, 0.0)
    if recipe.keeps_casts:
        return Backward(*gradient_casting(m * n, recipe, shard.itemsize))
    if recipe.casts:
        of, kernels = casts_of(recipe, recipe.casts, shard)
        if casts_its_share(shard) and from_norm:
            of = of._replace(input_backward=TURNED)
        if casts_its_share(shard) and reduced:
            layouts = 1.0 if of == recipe.casts else TURNED
            of = of._replace(gradient=(of.gradient - layouts) / shard.tp + TURNED)
        saved = shard.software.saved_fp8_weights
        weight = SAVED_WEIGHT[kernels > 1.0] if saved else of.weight
        weight = 0.0 if shard.software.states.fp8_params else weight
        return Backward(
            of.gradient * m * n + of.input_backward * m * k + weight * n * k, (3.0 if saved else 4.0) * kernels
        )
    transposed = recipe.tensor_scaled and recipe.copies > 1.0
    gathered = reduced and casts_its_share(shard)
    share = 1.0 / shard.tp if gathered else 1.0
    written = 1.0 if transposed and gathered else recipe.copies
    moved = cast_bytes(m * n * share, recipe, shard.itemsize, written)
    kernels = cast_kernels(recipe, written)
    if transposed and gathered:
        moved, kernels = moved + 2.0 * recipe.itemsize * m * n, kernels + 1.0
    if transposed and from_norm:
        moved, kernels = moved + 2.0 * recipe.itemsize * m * k, kernels + 1.0
    if recast and recipe.proj_keeps_input:
        moved, kernels = moved + cast_bytes(m * k, recipe, shard.itemsize, 1.0), kernels + 1.0 + recipe.amax_reads
    return Backward(moved, kernels)
