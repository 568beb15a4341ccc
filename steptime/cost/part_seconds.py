"""Seconds of a part (block, embedding, head) for one micro-batch: op by op, with its tensor-parallel collectives."""

from collections.abc import Mapping
from dataclasses import field
from math import inf
from typing import NamedTuple

from steptime.base.num import Num, minimum, same, where
from steptime.base.records import ByFields, record
from steptime.cost import async_tp, compute, dtensor
from steptime.cost.comm import Collective, CommCost
from steptime.cost.compute import NOTHING, Pass
from steptime.cost.host import graphed_kernels, wait_for_host
from steptime.cost.neighbors import (
    ALONE,
    CONTEXT_AXES,
    EXPERT_AXES,
    Neighbors,
    neighbor,
    overlapping_compute,
    with_gaps,
)
from steptime.cost.nodes import backward_nodes, forward_nodes
from steptime.cost.overlap import contention, hidden_s, in_pieces_s
from steptime.cost.rates import Rates
from steptime.cost.work import CommCall, Work
from steptime.hardware.machine import Tier
from steptime.job.mesh import Group
from steptime.model.ops import Comm, Kind, Op
from steptime.model.segments import Segment, rerun
from steptime.software.performance import Software


@record
class Context(ByFields):
    """What the cost of a part depends on besides its ops."""

    rates: Rates
    software: Software
    groups: Mapping[str, Group]
    """The ranks of each collective, by the axis of its op."""
    tiers: tuple[Tier, ...]
    tp: Num
    batch: Num = 1.0
    """Sequences in a micro-batch."""
    host_bytes_per_s: float = inf
    """Rate of a copy to or from host memory [B/s]."""
    woven: Num = 1.0
    """Fraction of micro-batches whose forward overlaps another one's backward where the all-to-all of experts is overlapped."""
    sharded: bool = False
    """Whether FSDP shards the weights."""
    known: dict[tuple[str, str], Collective] = field(default_factory=dict, compare=False)
    """Collectives so far by axis and kind: the ops of a block repeat a few of them."""

    def price(self, op: Comm, kind: str, bytes_: Num | None = None) -> CommCost:
        """Seconds of one collective over the group of its axis; of the op's bytes unless `bytes_` is given."""
        sent = op.bytes if bytes_ is None else bytes_
        if op.routing is not None and kind == "all_to_all":
            from steptime.cost.exchange import kernel_rate, priced

            return priced(op, sent, self.groups, self.tiers, kernel_rate(self.software, self.rates.sm_count))
        return self.collective(kind, sent, op.axis)

    def collective(self, kind: str, bytes_: Num, axis: str) -> CommCost:
        """A collective as it runs among the layers: a tensor-parallel one takes `tp_comm_factor` as long, in all its parts."""
        if (axis, kind) not in self.known:
            self.known[axis, kind] = Collective(kind, self.groups[axis], self.tiers)
        alone = self.known[axis, kind].cost(bytes_)
        factor = self.software.comm.tp_comm_factor if axis == "tp" else 1.0
        names = ("latency_s", "bandwidth_s", "time_s") if factor != 1.0 else ()
        return alone._replace(**{name: getattr(alone, name) * factor for name in names}) if names else alone

    def reorder_s(self, op: Comm, kind: str, bytes_: Num) -> Num:
        """Seconds of the copy that torch's DTensor makes around a collective over the sequence."""
        if op.axis != "tp" or not dtensor.copies(self.software, kind):
            return 0.0
        copy_s = compute.move_pass(2.0 * bytes_, 1.0, self.rates).time_s
        return copy_s if op.joined else where(self.batch > 1, copy_s, 0.0)

    def hidden(self, op: Comm, cost: CommCost, neighbor_s: Num, reduced_bytes: Num = 0.0) -> Num:
        """Seconds of an op's calls that the `neighbor_s` seconds of its neighbor hide: a projection, or attention with cp.

        `reduced_bytes`: the full tensor where it is reduced.
        """
        overlap, slowed = self.software.overlap, contention(self.groups[op.axis], self.tiers)
        if op.axis in EXPERT_AXES:
            if self.software.moe.shared_expert_overlap:
                return hidden_s(cost.time_s, minimum(cost.time_s, neighbor_s), share=True, slowed=slowed)
            return hidden_s(cost.time_s, self.woven * minimum(cost.time_s, neighbor_s), overlap.ep, slowed)
        if op.axis not in CONTEXT_AXES:
            if async_tp.applies(self.software):
                kernels_s = async_tp.kernels_of_pieces_s(op.bytes, reduced_bytes, self.tp, self.rates.bytes_per_s)
                return async_tp.hidden_s(cost.time_s, neighbor_s, self.tp, kernels_s)
            return hidden_s(cost.time_s, in_pieces_s(cost.time_s, neighbor_s, self.tp), overlap.tp)
        at_once_s = op.count * minimum(cost.time_s, neighbor_s * op.attention_share)
        return hidden_s(cost.time_s * op.count, at_once_s, overlap.cp, slowed)


class PartTime(NamedTuple):
    """Forward, backward, and what recomputation repeats within backward."""

    forward: Work
    backward: Work
    replay: Work


def part_time(
    ops: list[Op],
    sizes: dict[str, Num],
    context: Context,
    segments: list[Segment],
    gap_s: float = 0.0,
    offloaded: Num = 0.0,
) -> PartTime:
    """Seconds of one micro-batch through a part; of its launch gaps, `gap_s` in all, forward has a third, as of the kernels.

    `offloaded`: bytes that go to host memory in forward and come back in backward.
    """
    passes = [compute.forward(op, context.rates, sizes) for op in ops]
    both = [compute.backward(op, context.rates, sizes) for op in ops]
    overlapping = exchange_overlap(ops, *with_gaps(passes, both, gap_s), context)
    forward = forward_work(ops, passes, context, range(len(ops)), overlapping)
    backward = backward_work(ops, both, context, overlapping)
    forward.launch_s, backward.launch_s = gap_s / 3.0, gap_s * 2.0 / 3.0
    replay = segment_replay(ops, passes, context, segments, gap_s)
    forward.kernels -= graphed_kernels(ops, [(done,) for done in passes], context.software)
    backward.kernels -= graphed_kernels(ops, both, context.software)
    timing, tp, sharded = context.software.timing, context.tp, context.sharded
    nodes = (
        forward_nodes(ops, timing, range(len(ops)), tp, sharded=sharded),
        backward_nodes(ops, timing, tp, sharded=sharded),
    )
    for work, run in zip((forward, backward), nodes, strict=True):
        wait_for_host(work, context.software, tp, run)
    if not same(offloaded == 0.0):
        forward.calls.append(host_copy("activations.offload", "offload", offloaded, context, forward.seconds))
        backward.calls.append(host_copy("activations.reload", "reload", offloaded, context, backward.seconds))
    return PartTime(forward, backward, replay)


def exchange_overlap(ops: list[Op], passes: list[Pass], both: list[tuple[Pass, Pass]], context: Context) -> Neighbors:
    """Compute that overlaps the all-to-all of a part's experts over ep, where the plan overlaps it."""
    if context.software.overlap.ep is not True and not context.software.moe.shared_expert_overlap:
        return ALONE
    costs = {
        i: context.price(op, op.kind).time_s
        for i, op in enumerate(ops)
        if isinstance(op, Comm) and op.kind and (op.backward or op.routing) and op.axis in EXPERT_AXES - {"etp"}
    }
    return overlapping_compute(ops, passes, both, costs, context.software.moe)


def host_copy(name: str, kind: str, bytes_: Num, context: Context, compute_s: Num) -> CommCall:
    """A layer's copies to or from host memory, on a separate stream that overlaps the layer's compute (`model.offload`)."""
    copy_s = bytes_ / context.host_bytes_per_s
    share = context.software.overlap.offload
    hidden = hidden_s(copy_s, minimum(copy_s, compute_s), True if share is None else share, slowed=0.0)
    return CommCall(name, kind, bytes_, CommCost(0.0, copy_s, "host link", copy_s, "copy"), hidden, "host")


def segment_replay(ops: list[Op], passes: list[Pass], context: Context, segments: list[Segment], gap_s: float) -> Work:
    """What recomputation of some segments repeats within one backward of a part; `passes`: its ops forward."""
    recomputed = [
        i for s in segments for i in rerun(ops, s, stops_early=context.software.activations.recompute_stops_early)
    ]
    replay = forward_work(ops, passes, context, recomputed)
    replay.launch_s = gap_s / 3.0 * len(recomputed) / len(ops)
    replay.kernels -= graphed_kernels(ops, [(done,) for done in passes], context.software, recomputed)
    nodes = forward_nodes(ops, context.software.timing, recomputed, context.tp, sharded=context.sharded)
    wait_for_host(replay, context.software, context.tp, nodes)
    return replay


def forward_work(
    ops: list[Op], passes: list[Pass], context: Context, which: range | list[int], overlapping: Neighbors = ALONE
) -> Work:
    """The forward of some of a part's ops; the all-to-alls of experts that are not in `overlapping` are exposed."""
    work = Work()
    for i in which:
        op = ops[i]
        if not isinstance(op, Comm):
            work.add(op, passes[i])
            casts = compute.operand_casts(op, context.rates)
            work.memory_s, work.kernels = work.memory_s + casts.time_s, work.kernels + casts.kernels
        elif op.kind is not None:
            cost = context.price(op, op.kind)
            near = neighbor(ops, i)
            near_s = passes[near].time_s if near is not None else 0.0
            near_s = overlapping.forward.get(i, near_s)
            hidden = context.hidden(op, cost, near_s, op.bytes if op.kind == "reduce_scatter" else 0.0)
            work.calls.append(CommCall(op.name, op.kind, op.bytes, cost, hidden, op.axis, op.count))
            work.memory_s += context.reorder_s(op, op.kind, op.bytes)
            work.kernels += op.count
    return work


def backward_work(
    ops: list[Op], passes: list[tuple[Pass, Pass]], context: Context, overlapping: Neighbors = ALONE
) -> Work:
    """The backward of a part, last op first.

    For a column-parallel projection Megatron overlaps the all-gather of its input with dgrad, and the reduction of the input's
    gradient with wgrad (megatron/core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication.backward).
    """
    work = Work()
    for i in range(len(ops) - 1, -1, -1):
        add_backward(work, ops, i, passes, context, overlapping)
    return work


def add_backward(
    work: Work, ops: list[Op], i: int, passes: list[tuple[Pass, Pass]], context: Context, overlapping: Neighbors = ALONE
) -> None:
    """Add the backward of one op of a part."""
    op = ops[i]
    if not isinstance(op, Comm):
        for done in passes[i]:
            work.add(op, done)
        accumulation_s = compute.parameter_gradients(op, context.rates)
        work.memory_s += accumulation_s
        if op.trained:
            work.weight_s += passes[i][1].time_s + accumulation_s
    elif op.backward is not None:
        near = neighbor(ops, i)
        dgrad, wgrad = passes[near] if near is not None else (NOTHING, NOTHING)
        dgrad_s = overlapping.backward.get(i, dgrad.time_s)
        if op.region == "enter" and async_tp.applies(context.software) and async_tp.waits_for_a_sum(ops, i):
            dgrad_s = 0.0
        work.calls += backward_calls(op, op.backward, context, dgrad_s, wgrad.time_s)
        work.memory_s += context.reorder_s(op, op.backward, op.bytes)
        work.kernels += op.count


def call_names(name: str) -> tuple[str, str, str]:
    """Names of an op's collectives: its own, its input gathered again in backward, its gradient's."""
    return name, f"{name}.again", f"{name}.grad"


def backward_calls(op: Comm, kind: Kind, context: Context, dgrad_s: Num, wgrad_s: Num) -> list[CommCall]:
    """The collectives of one Comm's backward: the input gathered again for wgrad, and the gradient's own."""
    calls = []
    _, regather, grad = call_names(op.name)
    asynchronous = context.software.comm.tp_backward_overlap and op.region == "enter"
    if op.regather:
        cost = context.price(op, "all_gather")
        hidden = hidden_s(cost.time_s, minimum(cost.time_s, dgrad_s), asynchronous)
        hidden = context.hidden(op, cost, dgrad_s) if op.axis in CONTEXT_AXES else hidden
        calls.append(CommCall(regather, "all_gather", op.bytes, cost, hidden, op.axis))
    sent = op.bytes if op.backward_bytes is None else op.backward_bytes
    cost = context.price(op, kind, sent)
    if asynchronous:
        hidden = hidden_s(cost.time_s, minimum(cost.time_s, wgrad_s), share=True)
    else:
        hidden = context.hidden(op, cost, dgrad_s, sent if kind == "reduce_scatter" else 0.0)
    return [*calls, CommCall(grad, kind, sent, cost, hidden, op.axis, op.count)]
