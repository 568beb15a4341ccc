"""Compute that runs beside the collectives of a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from steptime.base.num import Num, maximum
from steptime.cost.compute import Pass, total
from steptime.model.ops import Attention, Comm, Gemm, Op

EXPERT_AXES = frozenset({"ep", "etp", "ep_etp"})
"""Axes whose collectives carry rows to and from experts."""


class Neighbors(NamedTuple):
    """Seconds of another micro-batch's compute beside each exchange of a part, by the index of its op."""

    forward: Mapping[int, Num] = {}
    backward: Mapping[int, Num] = {}


ALONE = Neighbors()
"""No exchange runs beside another micro-batch."""


class Compute(NamedTuple):
    """Compute seconds of some ops: forward, gradients of inputs, gradients of weights."""

    forward: Num
    dgrad: Num
    wgrad: Num


def beside_exchanges(
    ops: list[Op], passes: Sequence[Pass], both: Sequence[tuple[Pass, Pass]], costs: Mapping[int, Num], *, delayed: bool
) -> Neighbors:
    """What each exchange of experts runs beside where one micro-batch's forward is woven into another's backward, layer by layer.

    The experts' backward and then forward run beside the dispatch of forward and then backward; the rest of the layer beside
    the combine of forward and then backward (megatron/core/models/common/model_chunk_schedule_plan.py,
    TransformerLayerSchedulePlan.run). `costs`: seconds of each exchange forward, by its index. `delayed`: gradients of weights
    come after those of inputs, so that they run beside the exchange in backward too (delay_wgrad_compute).
    """
    forward: dict[int, Num] = {}
    backward: dict[int, Num] = {}
    for depth in {ops[i].depth for i in costs}:
        layer = [i for i, op in enumerate(ops) if op.depth == depth]
        products = [i for i in layer if isinstance(op := ops[i], Gemm) and op.role == "moe"]
        sent = [i for i in layer if i in costs and i < products[0]]
        returned = [i for i in layer if i in costs and i > products[-1]]
        inner = [i for i in layer if sent[-1] < i < returned[0]]
        outer = [i for i in layer if i not in inner]
        for exchanges, beside in ((sent, inner), (returned, outer)):
            first, second = windows(computed(beside, passes, both), total(costs[i] for i in exchanges), delayed=delayed)
            shares = {i: costs[i] / total(costs[j] for j in exchanges) for i in exchanges}
            forward |= {i: share * first for i, share in shares.items()}
            backward |= {i: share * second for i, share in shares.items()}
    return Neighbors(forward, backward)


def computed(which: Sequence[int], passes: Sequence[Pass], both: Sequence[tuple[Pass, Pass]]) -> Compute:
    """Compute seconds of some ops."""
    dgrad, wgrad = ([both[i][side].time_s for i in which] for side in (0, 1))
    return Compute(total(passes[i].time_s for i in which), total(dgrad), total(wgrad))


def windows(compute: Compute, first_s: Num, *, delayed: bool) -> tuple[Num, Num]:
    """Seconds of compute beside an exchange in forward, which takes `first_s`, and beside its counterpart in backward.

    The first runs beside a backward, the second beside a forward; delayed gradients of weights stand between the two.

    >>> windows(Compute(2.0, 3.0, 1.0), 3.5, delayed=False), windows(Compute(2.0, 3.0, 1.0), 3.5, delayed=True)
    ((4.0, 2.0), (4.0, 2.5))
    """
    left = compute.wgrad - maximum(0.0, first_s - compute.dgrad) if delayed else 0.0
    return compute.dgrad + compute.wgrad, compute.forward + maximum(0.0, left)


def neighbor(ops: list[Op], i: int) -> int | None:
    """What runs beside a collective.

    The attention kernel for the exchanges of context parallelism; else the projection after a collective that enters the
    tensor-parallel region, before one that leaves it. Other collectives wait for what they reduce or gather (the loss's sums, a
    projection cut finer than its heads).
    """
    op = ops[i]
    if isinstance(op, Comm) and op.axis == "cp":
        return next((j for j, other in enumerate(ops) if isinstance(other, Attention)), None)
    region = op.region if isinstance(op, Comm) else ""
    if not region:
        return None
    order = range(i + 1, len(ops)) if region == "enter" else range(i - 1, -1, -1)
    return next((j for j in order if isinstance(ops[j], Gemm)), None)
