"""torchao's NVFP4 training prototype: a projection casts input, weight and gradient, and keeps casts for backward, no bf16.

pytorch/ao@36027d82 torchao/prototype/moe_training/nvfp4_training/nvfp4_linear.py, nvfp4_mm_triton: forward multiplies the casts
by rows of input and weight; of both, the cast in the other direction is saved (save_for_backward: x_col_codes, x_col_sf,
Wt_fp4_x2, Wt_sf); backward casts the output's gradient in both directions, rounded at random. All three products are in FP4, the
products' results in bf16. Half a byte for each element and one for the scale of sixteen. Tensor parallelism and FSDP communicate
in bf16 (torchtitan@b5bcd76c torchtitan/components/quantization/nvfp4.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.model.ops import ByElement, Casting, Move, Role, Tensor

if TYPE_CHECKING:
    from steptime.base.num import Num
    from steptime.model.shard import Shard
    from steptime.software.precision import Recipe

MAXIMUM, ROUNDED, AT_RANDOM, OF_WEIGHT = 0.205, 0.704, 0.990, 1.569
"""Element-wise work per element of its Triton kernels, in units of `cost.rates.ELEMENTS_PER_SM`: the maximum of the transformed
tensor, the cast of it rounded to nearest and at random, and the cast of a weight by blocks of 16 x 16.

From how their time grows with size on GB200, 152 SMs of 2.6e9 elements a second (benchmarks/prototype/nvfp4_training/README.md,
kernel times; at random: median times): 2,048 x 4,096 to 2,048 x 28,672 elements in 16.78 to 42.92 us, 24.15 to 113.71 us and
40.67 to 166.62 us; 14,336 x 4,096 to 28,672 x 8,192 in 249.05 to 948.65 us. So 0.519, 1.78, 2.50 and 3.97 ps an element."""
KERNELS = 3.0
"""Of one cast: the maximum, the cast, and the scale of the tensor."""


def shares_casts(shard: Shard) -> bool:
    """Whether projections of the same input share its cast: torch.compile merges equal calls, torchtitan's transforms are equal.

    torch/_functorch/compile_utils.py, fx_graph_cse (torch 2.13 traces one cast of the input for gate and up, and keeps one);
    torchtitan@b5bcd76c nvfp4.py, _HARDCODED_SIGN_VECTOR. In eager torch every projection casts, and keeps, its own.
    """
    return shard.software.kernels.compile != "none"


def input_casting(elements: Num, recipe: Recipe, itemsize: float) -> Casting:
    """What the cast of an input of `elements` moves in forward."""
    return _casting(elements, recipe, itemsize, MAXIMUM + ROUNDED)


def gradient_casting(elements: Num, recipe: Recipe, itemsize: float) -> Casting:
    """What backward's cast of the output's gradient moves."""
    return _casting(elements, recipe, itemsize, MAXIMUM + AT_RANDOM)


def weight_casting(elements: Num, recipe: Recipe, itemsize: float) -> Casting:
    """What the cast of a weight moves in each forward; its maximum runs at the rate of memory."""
    return _casting(elements, recipe, itemsize, OF_WEIGHT)


def _casting(elements: Num, recipe: Recipe, itemsize: float, work: float) -> Casting:
    moved = elements * (2.0 * itemsize + 2.0 * recipe.itemsize)
    read = elements * itemsize if work == OF_WEIGHT else 0.0
    return Casting(moved, KERNELS, ByElement(elements * work, moved - read))


def cast_input(name: str, x: str, elements: Num, shard: Shard, recipe: Recipe, role: Role) -> Move:
    """The kernels that cast an input for all projections of it: by rows for their products, by columns for backward."""
    rows = Tensor(f"{x}.rows", elements, recipe.itemsize, shard.itemsize)
    columns = Tensor(f"{x}.columns", elements, recipe.itemsize)
    casting = input_casting(elements, recipe, shard.itemsize)
    return Move(
        f"{name}.cast", (x,), (rows,), (), (columns,), (), casting.bytes,
        kernels=casting.kernels, same_grad=True, role=role, forward_by_element=casting.slow,
    )  # fmt: skip
