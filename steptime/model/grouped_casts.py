"""What torchao's low precision adds to a grouped product of experts (`software.grouped_precision`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptime.base.num import maximum
from steptime.model.ops import Casting
from steptime.software.grouped_precision import GROUPED, LAYOUT_S_PER_ROW, grouped_kernels

if TYPE_CHECKING:
    from steptime.base.num import Num
    from steptime.model.shard import Shard


def padded_to(shard: Shard) -> float:
    """Rows of one expert are padded to a multiple of this before its products; 1 in the compute dtype."""
    kernels = GROUPED.get(shard.software.moe.grouped_precision)
    return kernels.multiple if kernels else 1.0


def low_precision(shard: Shard, experts: Num, room: Num, k: Num, n: Num) -> dict[str, Any]:
    """Fields of a product of `room` rows in all by `experts` weights of k x n; none in the compute dtype.

    Every row for which there is room is cast. The casts exist while their product runs: of input and weight, of gradient and
    weight, or of both by columns.
    """
    kernels = grouped_kernels(shard.software.moe.grouped_precision, blackwell=shard.software.any_layout)
    if kernels is None:
        return {}
    of, casts = kernels.recipe, kernels.casts
    weight, left, out = experts * k * n, room * k, room * n
    by_columns = 0.0 if casts.plain_wgrad else left + out
    forward = casts.input_forward * left + kernels.weight_forward * weight
    return {
        "recipe": of,
        "forward_cast": Casting(forward, kernels.forward_kernels),
        "cast_bytes": casts.gradient * out + casts.input_backward * left + kernels.weight_backward * weight,
        "cast_kernels": kernels.backward_kernels,
        "in_turn_s": kernels.layouts * LAYOUT_S_PER_ROW * room / experts,
        "temp_bytes": of.itemsize * maximum(maximum(left, out) + weight, by_columns),
    }
