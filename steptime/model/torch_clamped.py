"""Kernels of gpt-oss' experts in plain torch: a bias for each expert's rows, and the clamped activation.

Source: pytorch/torchtitan@58b03444 torchtitan/models/gpt_oss/moe.py.
"""

from __future__ import annotations

from steptime.model.ops import ByElement, Move, Op, Tensor
from steptime.model.routing import INT64, Rows

BIAS_KERNELS = 8.0
"""Of a bias by row: counts joined and cast, a row of zeros joined, cumulative sum, search, repeat, sum (assumed: launches)."""
SWIGLU_KERNELS = 11.0
"""Of a clamped SwiGLU: eight forward, fourteen backward, in the mean."""


def row_bias(rows: Rows, x: Tensor, *, eager: bool) -> tuple[Op, str]:
    """Each row's bias repeated by tokens per expert, then added; backward adds the rows' gradients by expert.

    Forward: the repeat writes rows, the sum reads two and writes one; compiled it is part of what reads the rows. Backward: one
    read. Kept: the expert of each row.
    """
    index, out = Tensor(f"{x.name}.expert", rows.room, INT64), x._replace(name=f"{x.name}.biased")
    op = Move(
        f"{x.name}.bias",
        (x.name,),
        (out,),
        (index.name,),
        (index,),
        forward_bytes=4.0 * x.bytes if eager else 0.0,
        backward_bytes=x.bytes,
        kernels=BIAS_KERNELS if eager else 1.0,
        forward_temp_bytes=x.bytes if eager else 0.0,
        role="moe",
    )
    return op, out.name


def clamped_swiglu(x: str, out: Tensor) -> Op:
    """clamp(gate) * sigmoid(1.702 clamp(gate)) * (clamp(up) + 1), gate and up every other element of `x` (swiglu).

    In units of `out`'s bytes w, where a read of every other element takes 2. Forward: clamps 3 each, times alpha 2, sigmoid 2,
    product 3, plus one 2, product 3. Backward: products 6 each, sigmoid 3, times alpha 2, sum of the gate's two gradients 3,
    clamps 4 each, each half put into zeros 2 + 3, their sum 6. Element by element: two clamps; three comparisons, two choices and
    two copies into zeros. Kept: `x`, the clamped gate, its sigmoid, both factors of the last product.
    """
    names = ("experts.act.clamped", "experts.act.sigmoid", "experts.act.gate", "experts.act.up")
    outputs = tuple(out._replace(name=name) for name in names)
    clamp, sigmoid, product, last = (3.0 + 3.0, 2.0 + 2.0, 3.0 + 2.0, 3.0)
    back = 2.0 * 6.0 + 3.0 + 2.0 + 3.0 + 2.0 * 4.0 + 2.0 * 5.0 + 6.0
    return Move(
        "experts.act",
        (x,),
        (out,),
        (x, *names),
        outputs,
        forward_bytes=(clamp + sigmoid + product + last) * out.bytes,
        backward_bytes=back * out.bytes,
        forward_by_element=ByElement(2.0 * out.elements, clamp * out.bytes),
        backward_by_element=ByElement(7.0 * out.elements, (2.0 * 4.0 + 2.0 * 3.0) * out.bytes),
        kernels=SWIGLU_KERNELS,
        forward_temp_bytes=out.bytes,
        backward_temp_bytes=4.0 * out.bytes,
        role="moe_act",
    )
