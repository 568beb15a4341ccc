"""What torchao's low precision adds to a grouped product of experts (`software.grouped_precision`).

NeMo AutoModel calls the same function with rows that nothing pads and with a copy of the weight, laid out as the function
takes it, which is saved for backward in place of the weight (NVIDIA-NeMo/Automodel@36044ad3 nemo_automodel/components/moe/
mxfp8.py, _mxfp8_weight_relayout; token_dispatcher.py, where no multiple is set). The weight's gradient has the copy's layout and
is copied once more into the parameter's (torch/csrc/autograd/functions/accumulate_grad.h, clone_obey_contract).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptime.base.num import maximum
from steptime.model.ops import Casting, Tensor
from steptime.software.grouped_precision import GROUPED, LAYOUT_S_PER_ROW, grouped_kernels
from steptime.software.profiles import without_release

if TYPE_CHECKING:
    from steptime.base.num import Num
    from steptime.model.shard import Shard

BF16 = 2.0
"""Bytes of an element of operands before their casts, the only dtype that torchao's function takes in these trainers."""


def padded_to(shard: Shard) -> float:
    """Rows of one expert are padded to a multiple of this before its products; 1 in the compute dtype."""
    if _relaid(shard):
        return 1.0
    kernels = GROUPED.get(shard.software.moe.grouped_precision)
    return kernels.multiple if kernels else 1.0


def relaid_weight(shard: Shard, name: str, elements: Num) -> tuple[Tensor, ...]:
    """The copy of a product's weights that is kept for backward; none where the weight itself is."""
    return (Tensor(f"{name}.relaid", elements, BF16),) if _relaid(shard) else ()


def _relaid(shard: Shard) -> bool:
    software = shard.software
    return software.moe.grouped_precision != "none" and without_release(software.name) == "automodel"


def low_precision(shard: Shard, experts: Num, room: Num, k: Num, n: Num) -> dict[str, Any]:
    """Fields of a product of `room` rows in all by `experts` weights of k x n; none in the compute dtype.

    Every row for which there is room is cast. The casts exist while their product runs: of input and weight, of gradient and
    weight, or of both by columns; the copy of a gradient exists beside it.
    """
    kernels = grouped_kernels(shard.software.moe.grouped_precision, blackwell=shard.software.any_layout)
    if kernels is None:
        return {}
    of, casts = kernels.recipe, kernels.casts
    weight, left, out = experts * k * n, room * k, room * n
    by_columns = 0.0 if casts.plain_wgrad else left + out
    copied = 1.0 if _relaid(shard) else 0.0
    copy = copied * 2.0 * BF16 * weight
    forward = casts.input_forward * left + kernels.weight_forward * weight
    backward = casts.gradient * out + casts.input_backward * left + kernels.weight_backward * weight
    return {
        "recipe": of,
        "forward_cast": Casting(forward + copy, kernels.forward_kernels + copied),
        "cast_bytes": backward + copy,
        "cast_kernels": kernels.backward_kernels + copied,
        "in_turn_s": kernels.layouts * LAYOUT_S_PER_ROW * room / experts,
        "temp_bytes": maximum(of.itemsize * maximum(maximum(left, out) + weight, by_columns), copy / 2.0),
    }
