"""What runs beside a collective of a part."""

from __future__ import annotations

from steptime.base.num import Num
from steptime.cost import compute
from steptime.model.ops import Attention, Comm, Gemm, Op

EXPERT_AXES = frozenset({"ep", "etp", "ep_etp"})
"""Axes of the exchanges that experts need."""


def for_experts(exchange: Comm, ops: list[Op], seconds: list[Num]) -> Num:
    """Compute that one exchange of a layer's experts can run beside: an even share of all that the layer has.

    What hides it is another micro-batch's work, as long as the layer's own (Megatron's overlap_moe_expert_parallel_comm).
    """
    layer = [(op, time_s) for op, time_s in zip(ops, seconds, strict=True) if op.depth == exchange.depth]
    calls = sum(isinstance(op, Comm) and op.axis in EXPERT_AXES for op, _ in layer)
    return compute.total(time_s for _, time_s in layer) / calls


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
