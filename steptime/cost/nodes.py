"""Nodes of a traced graph that the host runs one by one: those of an op, forward and backward.

torchtitan's GraphTrainer traces forward, loss and backward by make_fx and calls the generated code of that graph, one Python call
of an operator per node (pytorch/torchtitan@27aa4907 torchtitan/experiments/graph_trainer/make_fx_tracer.py, run_traced). The
counts below are those of its Llama 3, Qwen3 and DeepSeek-V3 blocks at 7a8e76d1, traced on a CPU with a fake process group, and of
blocks of the same form (tests/truth/test_torch_traced_nodes.py). Fused norms count as on CUDA: the kernel and its two outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from steptime.base.num import Num, where
from steptime.model.graphs import captured
from steptime.model.ops import Comm, Gemm, Move, Op
from steptime.model.segments import MOE
from steptime.software.timing_settings import TimingSettings

IDLE_SHARE = 0.4
"""Time of a node without effect divided by that of another: removing 2,006 views to the same shape, then 421 slices of whole
tensors and 450 pairs of transposes, took a step from 984 to 896 ms, 31 us each (pytorch/torchtitan@7a8e76d1
autoresearch/results.tsv; rows torchtitan-dsv3-n015 and n016, marked fit), against 77 us of a node (`hardware.host.node_s`)."""
PER_KERNEL = 2.15
"""Nodes of a group of element-wise kernels, each way, per kernel: rotary embeddings of complex numbers are 10 kernels, 21 nodes
forward and 22 backward, most of the others views."""
ROUTED_PER_KERNEL = 2.85, 1.05
"""The same where rows are routed to experts, forward and backward (their counts have no gradient). In DeepSeek-V3's block over tp
2 and ep 2 router, dispatch and combination are 36 kernels, of 99 and 38 nodes without products, collectives and activation."""


class Nodes(NamedTuple):
    """Nodes of some ops in one direction."""

    working: Num = 0.0
    idle: Num = 0.0
    """Those without effect: views to the same shape, slices of whole tensors, detached tensors, transposes of transposes."""

    def plus(self, other: Nodes) -> Nodes:
        """Both together."""
        return Nodes(self.working + other.working, self.idle + other.idle)

    def times(self, count: Num) -> Nodes:
        """So many of them."""
        return Nodes(self.working * count, self.idle * count)

    def time_s(self, timing: TimingSettings) -> Num:
        """Seconds of the host; the passes that simplify a graph leave out what has no effect."""
        idle = 0.0 if timing.step_graph == "simplified" else self.idle * IDLE_SHARE
        return timing.node_s * (self.working + idle)


NO_NODES = Nodes()
LINEAR = Nodes(5.0, 1.0), Nodes(7.0, 3.0)
"""Forward: the weight's cast and transpose, the product, views. Backward: two products, transposes, the cast of the gradient."""
NORM = Nodes(4.0, 1.0), Nodes(4.0, 1.0)
ATTENTION = Nodes(7.0, 1.0), Nodes(8.0, 1.0)
"""The kernel, what it returns, and transposes of queries, keys, values and output."""
SHARDED = Nodes(2.0, 1.0), Nodes(2.0, 0.0)
"""Of a weight that FSDP shards: its all-gather and the wait for it, a slice; its gradient's reduce-scatter and the wait."""
SPLIT = Nodes(0.0, 3.0), Nodes(0.0, 1.0)
"""Views of a weight that tensor parallelism splits or repeats."""
SUMMED = Nodes(2.0, 0.0)
"""The all-reduce over tensor-parallel ranks of a norm's gradient, and the wait for it."""


def run_by_host(timing: TimingSettings) -> bool:
    """Whether the host runs the nodes of a graph, at a time that is known."""
    return timing.step_graph != "none" and timing.node_s > 0.0 and timing.cuda_graphs is not True


def forward_nodes(ops: list[Op], timing: TimingSettings, which: Iterable[int], tp: Num, *, sharded: bool) -> Nodes:
    """Nodes of some ops of a part, forward, without those that CUDA graphs launch; none where the host runs no graph."""
    if not run_by_host(timing):
        return NO_NODES
    inside = captured(ops, timing.cuda_graphs)
    return _sum(of_op(ops[i], tp, sharded=sharded)[0] for i in which if i not in inside)


def backward_nodes(ops: list[Op], timing: TimingSettings, tp: Num, *, sharded: bool) -> Nodes:
    """Nodes of a part's backward, as of `forward_nodes`; gradients of a tensor that several ops read are added."""
    if not run_by_host(timing):
        return NO_NODES
    inside = captured(ops, timing.cuda_graphs)
    outside = [op for i, op in enumerate(ops) if i not in inside]
    reads = Counter(name for op in outside for name in dict.fromkeys(op.inputs))
    added = Nodes(float(sum(times - 1 for times in reads.values())))
    return _sum([added, *(of_op(op, tp, sharded=sharded)[1] for op in outside)])


def of_op(op: Op, tp: Num, *, sharded: bool) -> tuple[Nodes, Nodes]:
    """Nodes of one op, forward and backward."""
    if isinstance(op, Comm):
        return _collective(op.kind, tp), _collective(op.backward, tp)
    forward, backward = _own(op)
    split = where(tp > 1, 1.0, 0.0)
    for _ in op.params:
        if sharded:
            forward, backward = forward.plus(SHARDED[0]), backward.plus(SHARDED[1])
        forward, backward = forward.plus(SPLIT[0].times(split)), backward.plus(SPLIT[1].times(split))
        if not isinstance(op, Gemm):
            backward = backward.plus(SUMMED.times(split))
    return forward, backward


def _own(op: Op) -> tuple[Nodes, Nodes]:
    if isinstance(op, Gemm):
        return LINEAR
    if not isinstance(op, Move):
        return ATTENTION
    if op.params:
        return NORM
    forward, backward = ROUTED_PER_KERNEL if op.role in MOE else (PER_KERNEL, PER_KERNEL)
    alone = 0.0 if op.same_grad else float(len(op.inputs))
    several = op.kernels > 1.0
    return Nodes(where(several, forward * op.kernels, 1.0)), Nodes(where(several, backward * op.kernels, alone))


def _collective(kind: str | None, ranks: Num) -> Nodes:
    """A collective and the wait for it, with a view of what was gathered; what is scattered is split and joined before it."""
    if kind is None:
        return NO_NODES
    return Nodes(3.0 if kind == "all_gather" else 4.0 + ranks if kind == "reduce_scatter" else 2.0)


def _sum(nodes: Iterable[Nodes]) -> Nodes:
    found = NO_NODES
    for one in nodes:
        found = found.plus(one)
    return found
