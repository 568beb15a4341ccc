"""A layer with experts explained: placement of the experts, rows that each computes, kernels and all-to-alls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.model.ops import Comm, Gemm
from steptime.model.routing import Rows
from steptime.report.format import percent, seconds, whole
from steptime.report.kernel_table import op_times
from steptime.report.table import Fact, FactList

if TYPE_CHECKING:
    from steptime.answer.result import Estimate

ROLES = frozenset({"router", "moe", "moe_act", "shared_experts"})
"""Roles of the ops of a layer with experts, except attention and norms."""


def experts(estimate: Estimate) -> FactList:
    """The experts of one device, the rows of each, and every op of theirs on the busiest stage, in the layer's order.

    Args:
        estimate: of a plan whose model has experts.
    """
    job = estimate.job
    moe, p = job.model.moe, job.parallelism
    if moe is None:
        raise ValueError("model.moe: not set, so there are no experts")
    kernels = [row for row in op_times(estimate) if row.op is not None and row.op.role in ROLES]
    layers = [op for part in estimate.assembly.kinds for op in part.ops]
    products = [op for op in layers if isinstance(op, Gemm) and op.routed]
    own = f"{moe.n_experts / p.ep:g} on a device (ep {p.ep:g}, etp {p.etp:g})"
    facts = [Fact("experts", [f"{moe.n_experts}, {moe.experts_per_token} of them for each token; {own}"])]
    if products:
        routed = Rows(moe, job.model.hidden_sz, estimate.assembly.shard)
        kept = float(routed.sent) / float(routed.tokens)  # experts per token without those dropped, or with padding
        rows = f"{whole(float(routed.tokens))} tokens of a device x {kept:.5g} x ep {p.ep:g}"
        rows += (f" x etp {p.etp:g}" if p.etp != 1 else "") + f" / {moe.n_experts}"
        rows += f" x load {products[0].load:g}" if products[0].load != 1.0 else ""
        facts.append(Fact("rows", [f"{whole(float(products[0].m))} per expert and micro-batch: {rows}"]))
    for row in kernels:
        each = f"{seconds(row.forward_s)} forward + {seconds(row.backward_s)} backward"
        name = row.name if row.forward_s else f"{row.name}, casts"
        facts.append(Fact(name, [f"{whole(row.times)} x ({each}) = {seconds(row.step_s)}"]))
    names = {op.name for op in layers if isinstance(op, Comm) and op.role in ROLES}
    sent = [row for row in estimate.collectives if row.name.removesuffix(".grad").removesuffix(".again") in names]
    for call in sent:
        text = f"{whole(call.count_per_step)} x {seconds(call.time_s)}, {seconds(call.exposed_s)} exposed, over {call.tier}"
        facts.append(Fact(call.name, [text]))
    total = sum(row.step_s for row in kernels) + sum(call.exposed_s for call in sent)
    facts.append(Fact("each", ["3dtrn explain PLAN NAME has FLOPs over rate, or latency and bytes over rate"]))
    share = percent(total / estimate.step_s)
    return FactList(f"experts: {seconds(total)}, {share} of the step, without recomputation and launch gaps", facts)
