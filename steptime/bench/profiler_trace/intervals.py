"""Turns operators and kernels into intervals of the step's parts, and intervals into seconds that sum to the step.

Everything is in whole nanoseconds: what is cut into pieces sums to the whole exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from steptime.bench.profiler_trace.events import Activity, HostOp, Trace
from steptime.bench.profiler_trace.kernel_names import COMM, WORK, kernel_part, op_part

_LASTING = {"gemm", "attention", "recompute", "optimizer", "wait"}
"""Parts that an operator passes on to those it calls: copies inside a product belong to the product."""
_OUTSIDE, _EVALUATING, _IN_NODE = range(3)
ORDER = {part: i for i, part in enumerate((*WORK, *COMM, "launch", "idle"))}
"""Priority where several run at once: work before communication before the host's launches."""


class Frame(NamedTuple):
    """An operator on a thread's stack."""

    name: str
    part: str
    """"" for a range whose name has no meaning here."""
    backward: int
    """Whether autograd's engine runs it, and whether a backward node does."""
    start: int


class PartInterval(NamedTuple):
    """Time that something took [ns]."""

    start: int
    end: int
    part: str
    what: str
    """Kind of a collective, name of an operator or kernel."""


class PartSpan(NamedTuple):
    """Total and exposed time of one (part, what) in a step [ns]."""

    covered: int
    """Time in which it ran (a union: two at once count once)."""
    exposed: int
    """Time not covered by anything earlier in `ORDER`."""


def frame(op: HostOp, parent: Frame | None) -> Frame:
    """The part of an operator, given the operator that called it.

    Recomputation is recognized by autograd's own mark: inside a backward node gradients are off, except for a forward pass that
    is run again (torch/utils/checkpoint.py, reentrant and not; Megatron's CheckpointFunction). Autograd functions written in
    Python ("FlashAttnFunc", DTensor's "NestedRedistribute": no "::" in their name) always carry the mark, so of these only those
    count that a checkpoint's own node calls; the time that such a function spends itself is Python's, so it is launching.
    """
    own, above = op_part(op.name), parent.backward if parent else _OUTSIDE
    if op.name.startswith("autograd::engine::evaluate_function"):
        return Frame(op.name, own, _EVALUATING, op.start)
    backward = _IN_NODE if above == _EVALUATING else above
    if parent and parent.part in _LASTING and not (parent.part != "wait" and own == "wait"):
        return Frame(op.name, parent.part, backward, op.start)
    replayed = op.builds_graph and ("::" in op.name or (parent is not None and "CheckpointFunction" in parent.name))
    if above == _IN_NODE and replayed and own != "wait":
        return Frame(op.name, "recompute", backward, op.start)
    if not own:
        own = {"op": "memory_bound" if "::" in op.name else "launch", "range": "", "call": "launch"}[op.kind]
    return Frame(op.name, own, backward, op.start)


def own_time(ops: list[HostOp], launched: dict[int, Frame]) -> Iterator[tuple[int, int, Frame]]:
    """The intervals in which each operator of a thread ran itself, not one that it called: (start, end, frame).

    `launched` takes the frame of what launched each correlation.
    """
    stack: list[tuple[int, Frame]] = []
    at = 0
    for op in sorted(ops, key=lambda op: (op.start, -op.end)):
        while stack and stack[-1][0] <= op.start:
            end, top = stack.pop()
            if end > at:
                yield at, end, top
                at = end
        if stack and op.start > at:
            yield at, op.start, stack[-1][1]
        at = max(at, op.start)
        below = frame(op, stack[-1][1] if stack else None)
        stack.append((op.end, below))  # one that outlives its caller keeps its time
        if op.correlation:
            launched[op.correlation] = below
    while stack:
        end, top = stack.pop()
        if end > at:
            yield at, end, top
            at = end


def host_intervals(trace: Trace, launched: dict[int, Frame]) -> list[PartInterval]:
    """What the host's threads did. With a device, everything on the host is launching, except waiting."""
    found = []
    for ops in trace.threads.values():
        for start, end, top in own_time(ops, launched):
            if top.part and top.part != "wait":
                found.append(PartInterval(start, end, top.part if trace.on_cpu else "launch", top.name))
    return found


def device_part(work: Activity, launched: dict[int, Frame]) -> str:
    """A kernel's part: that of the operator which launched it, else what its own name says."""
    source = launched.get(work.correlation)
    if source and source.part in {"gemm", "attention", "recompute", "optimizer"}:
        return source.part
    return kernel_part(work.name)


def share_out(intervals: Iterable[PartInterval], start: int, end: int) -> dict[tuple[str, str], PartSpan]:
    """Total and exposed time of every (part, what) in a window; uncovered time is `idle`.

    Work is distinguished by part only (its `what` is ""). The exposed times sum to end - start.
    """
    edges: list[tuple[int, int, tuple[int, str, str]]] = []
    for item in intervals:
        first, last = max(item.start, start), min(item.end, end)
        if last > first:
            key = (ORDER[item.part], item.part, item.what if item.part in COMM else "")
            edges += [(first, 1, key), (last, -1, key)]
    edges.sort()
    running: dict[tuple[int, str, str], int] = {}
    covered: dict[tuple[str, str], int] = {}
    exposed: dict[tuple[str, str], int] = {}
    at = start
    for when, change, key in edges:
        if when > at:
            for active in running:
                covered[active[1:]] = covered.get(active[1:], 0) + when - at
            owner = min(running)[1:] if running else ("idle", "")
            exposed[owner] = exposed.get(owner, 0) + when - at
            at = when
        left = running.pop(key, 0) + change
        if left:
            running[key] = left
    if end > at:
        exposed["idle", ""] = exposed.get(("idle", ""), 0) + end - at
    covered["idle", ""] = exposed.get(("idle", ""), 0)
    return {key: PartSpan(covered[key], exposed.get(key, 0)) for key in covered}
