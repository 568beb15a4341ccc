"""A pass of a micro-batch through a chunk, op by op in the order it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from steptime.cost import compute
from steptime.cost.part_seconds import add_backward, exchange_overlap, forward_work
from steptime.cost.work import CommCall, Work
from steptime.job.assembly import Chunk
from steptime.job.mesh import comm_part
from steptime.job.parts import Part
from steptime.model.ops import Comm
from steptime.timing.step_time import StepTime

Direction = Literal["F", "B"]


class OpTime(NamedTuple):
    """One op, launch gap, recomputation or collective of a part.

    `kind` is a part of the step, as `Time.parts_s` names it; `seconds` are those that it adds to the chunk, for a collective the
    exposed ones.
    """

    name: str
    kind: str
    seconds: float
    call: CommCall | None = None
    before: bool = True
    """Of a collective, whether what hides it runs after it."""


class LayerTimes(NamedTuple):
    """One layer, the embedding or the head."""

    name: str
    ops: list[OpTime]


def chunk_op_times(timing: StepTime, chunk: Chunk, direction: Direction) -> list[LayerTimes]:
    """The parts of a chunk in the order they run; their seconds sum to the chunk's.

    Recomputation precedes each layer's backward, a kind of layer's seconds spread evenly over its layers.
    """
    assembly = timing.assembly
    first = sum(timing.job.layers_per_chunk[: chunk.depth])
    known = {part: part_op_times(timing, part, direction) for part, _ in chunk.runs}
    regather = replayed_times(timing, chunk) if direction == "B" else {}
    known = {part: regather.get(part, []) + ops for part, ops in known.items()}
    found = [LayerTimes("embedding", part_op_times(timing, assembly.embedding, direction))] if chunk.embedding else []
    for part, count in chunk.runs:
        found += [LayerTimes(f"layer {first + i} ({part.kind})", known[part]) for i in range(count)]
        first += count
    if chunk.head:
        replayed = regather.get(assembly.head, [])
        found.append(LayerTimes("head", replayed + part_op_times(timing, assembly.head, direction)))
    return found if direction == "F" else found[::-1]


def part_op_times(timing: StepTime, part: Part, direction: Direction) -> list[OpTime]:
    """The ops of one part in one direction, its launch gaps last."""
    context, ops = timing.context, part.ops
    found: list[OpTime] = []
    done = [compute.forward(op, context.rates, part.sizes) for op in ops]
    both = [compute.backward(op, context.rates, part.sizes) for op in ops]
    overlapping = exchange_overlap(ops, done, both, context)
    if direction == "F":
        for i, op in enumerate(ops):
            work = forward_work(ops, done, context, [i], overlapping)
            found += op_times(op.name, work, before=isinstance(op, Comm) and op.region != "leave")
    else:
        for i in range(len(ops) - 1, -1, -1):
            work = Work()
            add_backward(work, ops, i, both, context, overlapping)
            found += op_times(ops[i].name, work, before=True)
    whole = timing.parts.of[part].forward if direction == "F" else timing.parts.of[part].backward
    found += [OpTime("launch gaps", "launch", float(whole.launch_s))] if whole.launch_s else []
    copies = (call for call in whole.calls if call.axis == "host")
    return found + [OpTime(call.name, "host_comm", float(call.exposed_s), call) for call in copies]


def op_times(name: str, work: Work, *, before: bool) -> Iterator[OpTime]:
    """The kernels of one op by kind of work, then its collectives."""
    kinds = (("gemm", work.gemm_s), ("attention", work.attention_s), ("memory_bound", work.memory_s))
    yield from (OpTime(name, kind, float(seconds)) for kind, seconds in kinds if seconds)
    for call in work.calls:
        yield OpTime(call.name, comm_part(call.axis), float(call.exposed_s), call, before)


def replayed_times(timing: StepTime, chunk: Chunk) -> dict[Part, list[OpTime]]:
    """What one backward of a chunk recomputes, by kind of layer: the mean over its layers, and its collectives."""
    counts: dict[Part, int] = {timing.assembly.head: 1}
    for part, count in chunk.runs:
        counts[part] = counts.get(part, 0) + count
    found: dict[Part, list[OpTime]] = {}
    for times, part, work in timing.parts.replays(chunk):
        share = times / counts[part]
        ops = [OpTime("recomputation", "recompute", share * float(work.seconds - work.comm_s))]
        for call in work.calls:
            mean = call._replace(count=share * call.count, hidden_s=share * call.hidden_s)
            ops.append(OpTime(f"{call.name}, recomputed", comm_part(call.axis), float(mean.exposed_s), mean))
        found.setdefault(part, []).extend(op for op in ops if op.seconds or op.call)
    return found
