"""Compute that overlaps the collectives of a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from steptime.base.num import Num, maximum, new_row
from steptime.cost.compute import Pass, total
from steptime.model.ops import Attention, Comm, Gemm, Op
from steptime.software.settings import MoeSettings

CONTEXT_AXES = frozenset({"cp", "cp_a2a", "cp_p2p"})
EXPERT_AXES = frozenset({"ep", "etp", "ep_etp"})
"""Axes whose collectives carry rows to and from experts."""


class Neighbors(NamedTuple):
    """Seconds of compute that overlaps each all-to-all of a part, by the index of its op."""

    forward: dict[int, Num]
    backward: dict[int, Num]


ALONE = Neighbors({}, {})
"""No all-to-all overlaps another micro-batch."""


class Compute(NamedTuple):
    """Compute seconds of some ops: forward, gradients of inputs, gradients of weights."""

    forward: Num
    dgrad: Num
    wgrad: Num


def overlapping_compute(
    ops: list[Op], passes: Sequence[Pass], both: Sequence[tuple[Pass, Pass]], costs: Mapping[int, Num], how: MoeSettings
) -> Neighbors:
    """Compute that overlaps each all-to-all of experts: shared experts on a separate stream, or another micro-batch's layer.

    `costs`: seconds of each all-to-all in forward, by its index.
    """
    found = Neighbors({}, {})
    for depth in {ops[i].depth for i in costs}:
        layer = [i for i, op in enumerate(ops) if op.depth == depth]
        products = [i for i in layer if any(p.n_experts for p in ops[i].params)]
        sent = [i for i in layer if i in costs and i < products[0]]
        returned = [i for i in layer if i in costs and i > products[-1]]
        if how.shared_expert_overlap:
            early, late = shared_expert_halves(ops, layer)
        else:
            early = [i for i in layer if sent[-1] < i < returned[0]]
            late = [i for i in layer if i not in early]
        for exchanges, overlapping in ((sent, early), (returned, late)):
            whole, done = total(costs[i] for i in exchanges), computed(overlapping, passes, both)
            if how.shared_expert_overlap:
                first, second = done.forward, done.dgrad + done.wgrad
            else:
                first, second = windows(done, whole, delayed=how.delay_wgrad_compute)
            found.forward.update({i: costs[i] / whole * first for i in exchanges})
            found.backward.update({i: costs[i] / whole * second for i in exchanges})
    return found


def shared_expert_halves(ops: list[Op], layer: Sequence[int]) -> tuple[list[int], list[int]]:
    """The part of shared experts that overlaps the dispatch (first GEMM and activation) and the combine (second GEMM).

    megatron/core/transformer/moe/token_dispatcher.py, MoEAlltoAllTokenDispatcher: linear_fc1_forward_and_act follows the launch
    of the dispatch, linear_fc2_forward that of the combine; backward likewise.
    """
    shared = [i for i in layer if ops[i].role == "shared_experts" and not isinstance(ops[i], Comm)]
    down = max((i for i in shared if isinstance(ops[i], Gemm)), default=0)
    return [i for i in shared if i < down], [i for i in shared if i >= down]


def computed(which: Sequence[int], passes: Sequence[Pass], both: Sequence[tuple[Pass, Pass]]) -> Compute:
    """Compute seconds of some ops."""
    dgrad, wgrad = ([both[i][side].time_s for i in which] for side in (0, 1))
    return Compute(total(passes[i].time_s for i in which), total(dgrad), total(wgrad))


def with_gaps(
    passes: Sequence[Pass], both: Sequence[tuple[Pass, Pass]], gap_s: Num
) -> tuple[list[Pass], list[tuple[Pass, Pass]]]:
    """Passes lengthened by the launch gaps of their part: an all-to-all goes on while the compute stream pauses.

    Of `gap_s` forward has a third, as of the kernels, and each kernel of a direction the same.

    >>> one = Pass(0.0, 0.0, 0.0, 0.0, 2.0)
    >>> forward, backward = with_gaps([one, one], [(one, one), (one, one)], 6.0)
    >>> forward[0].time_s, backward[0][0].time_s
    (3.0, 3.0)
    """
    ahead = gap_s / 3.0 / maximum(1.0, total(done.kernels for done in passes))
    back = gap_s * 2.0 / 3.0 / maximum(1.0, total(done.kernels for pair in both for done in pair))
    backward = [(longer(dgrad, back), longer(wgrad, back)) for dgrad, wgrad in both]
    return [longer(done, ahead) for done in passes], backward


def longer(done: Pass, gap_s: Num) -> Pass:
    """A pass with a gap after each of its kernels."""
    return new_row(Pass, (*done[:4], done.time_s + gap_s * done.kernels, done.kernels))


def windows(compute: Compute, first_s: Num, *, delayed: bool) -> tuple[Num, Num]:
    """Seconds of another micro-batch's compute that overlaps an all-to-all in forward, of `first_s`, and in backward.

    One micro-batch's forward alternates with another's backward, layer by layer: the experts' backward and then forward overlap
    the dispatch of forward and then backward, the rest of the layer overlaps the combine (megatron/core/models/common/
    model_chunk_schedule_plan.py, TransformerLayerSchedulePlan.run). Delayed weight gradients are computed after input gradients,
    so that they overlap the all-to-all in backward too (delay_wgrad_compute).

    >>> windows(Compute(2.0, 3.0, 1.0), 3.5, delayed=False), windows(Compute(2.0, 3.0, 1.0), 3.5, delayed=True)
    ((4.0, 2.0), (4.0, 2.5))
    """
    left = compute.wgrad - maximum(0.0, first_s - compute.dgrad) if delayed else 0.0
    return compute.dgrad + compute.wgrad, compute.forward + maximum(0.0, left)


def neighbor(ops: list[Op], i: int) -> int | None:
    """Compute that overlaps a collective.

    The attention kernel for the exchanges of context parallelism; else the projection after a collective that enters the
    tensor-parallel region, or before one that leaves it. Other collectives overlap nothing (the sums of the loss, a projection
    split finer than its heads).
    """
    op = ops[i]
    if isinstance(op, Comm) and op.axis in CONTEXT_AXES:
        return next((j for j, other in enumerate(ops) if isinstance(other, Attention)), None)
    region = op.region if isinstance(op, Comm) else ""
    if not region:
        return None
    order = range(i + 1, len(ops)) if region == "enter" else range(i - 1, -1, -1)
    return next((j for j in order if isinstance(ops[j], Gemm)), None)
