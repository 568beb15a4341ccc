"""Seconds of a part (block, embedding, head) for one micro-batch: op by op, with its tensor-parallel collectives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from steptime.cost import compute
from steptime.cost.comm import CommCost, collective
from steptime.cost.compute import NOTHING, Pass, Rates
from steptime.cost.overlap import beside_s, hidden_s
from steptime.machine import Tier
from steptime.mesh import Group
from steptime.num import Num, is_column, maximum
from steptime.ops import Attention, Comm, Gemm, Kind, Op
from steptime.performance import Software
from steptime.recompute import Segment, replayed


class CommCall(NamedTuple):
    """One collective of a part."""

    name: str
    kind: str
    bytes: Num
    cost: CommCost
    hidden_s: Num

    @property
    def exposed_s(self) -> Num:
        """What of it nothing hides."""
        return self.cost.time_s - self.hidden_s


@dataclass
class Work:
    """Seconds of one direction of a part, by kind of work, and its collectives."""

    gemm_s: Num = 0.0
    attention_s: Num = 0.0
    memory_s: Num = 0.0
    launch_s: Num = 0.0
    """What the device waits for the host, and for kernels too small to be listed."""
    kernels: float = 0.0
    """Kernels launched, collectives included."""
    flops: Num = 0.0
    calls: list[CommCall] = field(default_factory=list)

    @property
    def comm_s(self) -> Num:
        """Exposed communication."""
        return compute.total(call.exposed_s for call in self.calls)

    @property
    def seconds(self) -> Num:
        """All of it."""
        return self.gemm_s + self.attention_s + self.memory_s + self.launch_s + self.comm_s

    def add(self, op: Op, done: Pass) -> None:
        """Count one kernel under its kind. Unfused attention's matrix products and softmax are attention."""
        if isinstance(op, Attention) or op.name.startswith("attn.core"):
            self.attention_s += done.time_s
        elif isinstance(op, Gemm):
            self.gemm_s += done.time_s
        else:
            self.memory_s += done.time_s
        self.flops += done.flops
        self.kernels += done.kernels


@dataclass(frozen=True)
class Context:
    """What the cost of a part depends on beside its ops."""

    rates: Rates
    software: Software
    tp_group: Group
    tiers: tuple[Tier, ...]
    tp: Num
    known: dict[tuple[str, float], CommCost] = field(default_factory=dict)
    """Collectives priced so far: a block repeats a few."""

    def price(self, op: Comm, kind: str) -> CommCost:
        """Seconds of one collective over the tensor-parallel group."""
        if is_column(op.bytes) or is_column(self.tp):
            return self.collective(kind, op.bytes)
        key = (kind, float(op.bytes))
        if key not in self.known:
            self.known[key] = self.collective(kind, op.bytes)
        return self.known[key]

    def collective(self, kind: str, bytes_: Num) -> CommCost:
        """The collective as it runs among the layers."""
        alone = collective(kind, bytes_, self.tp_group, self.tiers)
        return alone._replace(time_s=alone.time_s * self.software.tp_comm_factor)


class PartTime(NamedTuple):
    """Forward, backward, and what recomputation repeats within backward."""

    forward: Work
    backward: Work
    replay: Work


def part_time(
    ops: list[Op], sizes: dict[str, Num], context: Context, segments: list[Segment], gap_s: float = 0.0
) -> PartTime:
    """Seconds of one micro-batch through a part; of its launch gaps, `gap_s` in all, forward has a third, as of the kernels."""
    passes = [compute.forward(op, context.rates, sizes) for op in ops]
    forward = forward_work(ops, passes, context, range(len(ops)))
    backward = backward_work(ops, sizes, context)
    early = context.software.recompute_stops_early
    again = [i for s in segments for i in replayed(ops, s.first, s.last, stops_early=early)]
    replay = forward_work(ops, passes, context, again)
    forward.launch_s, backward.launch_s = gap_s / 3.0, gap_s * 2.0 / 3.0
    replay.launch_s = forward.launch_s * len(again) / len(ops)
    for work in (forward, backward, replay):
        wait_for_host(work, context.software)
    return PartTime(forward, backward, replay)


def wait_for_host(work: Work, software: Software) -> None:
    """Add what the device waits for the host.

    Launches run ahead of the device, so it waits only where all of the kernels are shorter than all of the launches; with
    blocking launches the two take turns.
    """
    host_s = work.kernels * software.host_kernel_s
    if not host_s:
        return
    late_s = host_s if software.blocking_launches else maximum(0.0, host_s - work.seconds)
    work.launch_s = work.launch_s + late_s


def forward_work(ops: list[Op], passes: list[Pass], context: Context, which: range | list[int]) -> Work:
    """The forward of some of a part's ops."""
    work = Work()
    for i in which:
        op = ops[i]
        if not isinstance(op, Comm):
            work.add(op, passes[i])
        elif op.kind is not None:
            cost = context.price(op, op.kind)
            near = nearby_gemm(ops, i)
            beside = passes[near].time_s if near is not None else 0.0
            hidden = hidden_s(cost.time_s, beside, context.software.overlap.tp, context.tp)
            work.calls.append(CommCall(op.name, op.kind, op.bytes, cost, hidden))
            work.kernels += 1.0
    return work


def nearby_gemm(ops: list[Op], i: int) -> int | None:
    """The projection beside a collective: after one that enters the tensor-parallel region, before one that leaves it.

    Other collectives wait for what they reduce or gather (the loss's sums, a projection cut finer than its heads).
    """
    if enters(ops[i]):
        order = range(i + 1, len(ops))
    elif leaves(ops[i]):
        order = range(i - 1, -1, -1)
    else:
        return None
    return next((j for j in order if isinstance(ops[j], Gemm)), None)


def enters(op: Op) -> bool:
    """Whether a collective stands before a column-parallel projection."""
    return op.name.endswith((".gather", ".copy"))


def leaves(op: Op) -> bool:
    """Whether a collective stands after a row-parallel projection."""
    return op.name.endswith((".scatter", ".reduce"))


def backward_work(ops: list[Op], sizes: dict[str, Num], context: Context) -> Work:
    """The backward of a part, last op first.

    Of a column-parallel projection Megatron runs the gather of its input beside dgrad, and the reduction of the input's gradient
    beside wgrad (megatron/core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication.backward).
    """
    work = Work()
    passes = [compute.backward(op, context.rates, sizes) for op in ops]
    for i in range(len(ops) - 1, -1, -1):
        op = ops[i]
        if not isinstance(op, Comm):
            for done in passes[i]:
                work.add(op, done)
            work.memory_s += compute.parameter_gradients(op, context.rates)
        elif op.backward is not None:
            near = nearby_gemm(ops, i)
            dgrad, wgrad = passes[near] if near is not None else (NOTHING, NOTHING)
            work.calls += backward_calls(op, op.backward, context, dgrad.time_s, wgrad.time_s)
            work.kernels += 1.0
    return work


def backward_calls(op: Comm, kind: Kind, context: Context, dgrad_s: Num, wgrad_s: Num) -> list[CommCall]:
    """The collectives of one Comm's backward: the input gathered again for wgrad, and the gradient's own."""
    calls = []
    asynchronous = context.software.tp_backward_overlap and enters(op)
    if op.regather:
        cost = context.price(op, "all_gather")
        hidden = beside_s(cost.time_s, dgrad_s) if asynchronous else 0.0 * dgrad_s
        calls.append(CommCall(f"{op.name}.again", "all_gather", op.bytes, cost, hidden))
    cost = context.price(op, kind)
    if asynchronous:
        hidden = beside_s(cost.time_s, wgrad_s)
    else:
        hidden = hidden_s(cost.time_s, dgrad_s, context.software.overlap.tp, context.tp)
    return [*calls, CommCall(f"{op.name}.grad", kind, op.bytes, cost, hidden)]
