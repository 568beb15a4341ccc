"""Memory of a layer whose backward takes turns with the forward of another micro-batch's layer (`overlap.ep`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import NamedTuple

from steptime.base.num import Num
from steptime.memory.forward_walk import forward_steps
from steptime.memory.ledger import NO_BYTES, Ledger, PartMemory, Peak
from steptime.memory.op_walk import Autograd, BackwardWalk, Kept
from steptime.model.offload import copied_bytes
from steptime.model.ops import Op, Tensor

Steps = list[tuple[Peak, Num]]
"""Of each op in the order of a walk its peak, and the bytes that are held after it."""


class Walks(NamedTuple):
    """The walks of one layer's forward (F) and backward (B)."""

    at_start: dict[str, Num]
    """Bytes at the start of each."""
    steps: dict[str, Steps]
    saved: Num
    ahead: Num
    """As in `PartMemory`."""


def walk_woven(ops: list[Op], x: Tensor, out: str, saved: Kept, autograd: Autograd) -> PartMemory:
    """As `op_walk.walk_part`, of what forward keeps; the same two walks give the peaks of each pass alone and of both in turn."""
    found = walks(ops, x, out, saved, autograd)
    forward, backward = most(found.steps["F"]), most(found.steps["B"]).worse(woven_peak(ops, found))
    return PartMemory(found.saved, forward, backward, ahead=found.ahead)


def walks(ops: list[Op], x: Tensor, out: str, saved: Kept, autograd: Autograd) -> Walks:
    """Walk one layer, which keeps tensors as `saved` says, forward and backward."""
    kept, sizes, segments, sent = saved
    backward = BackwardWalk(ops, sizes, segments, kept, autograd, sent)
    start = {"F": sizes[x.name], "B": backward.ledger.bytes}
    steps = {"F": steps_of(forward_steps(ops, sizes, kept, x.name, out)), "B": steps_of(backward.steps(out))}
    return Walks(start, steps, sum([sizes[name] for name in kept]), copied_bytes(sent, sizes))


def steps_of(walk: Iterator[Ledger]) -> Steps:
    """Each op of a walk by itself."""
    found: Steps = []
    for ledger in walk:
        found.append((ledger.peak, ledger.bytes))
        ledger.most, ledger.op = NO_BYTES
    return found


def most(steps: Steps) -> Peak:
    """The peak of a walk."""
    ledger = Ledger(0.0)
    for peak, _ in steps:
        ledger.mark(peak.op, peak.bytes)
    return ledger.peak


def woven_peak(ops: list[Op], found: Walks) -> Peak:
    """Most bytes of both layers; none where a layer sends no rows to other ranks.

    Pieces in turn: combine back, attention to router forward, experts back, dispatch forward and back, experts and combine
    forward, attention to router back (megatron/core/models/common/model_chunk_schedule_plan.py,
    TransformerLayerSchedulePlan.run).
    """
    sent = [i for i, op in enumerate(ops) if op.step in {"dispatch", "dispatch_probs"} and not op.depth]
    if not sent:
        return NO_BYTES
    returned = next(i for i, op in enumerate(ops) if op.step == "combine")
    cuts = (0, sent[0], sent[-1] + 1, returned, len(ops))
    before, dispatch, experts, combine = (end - start for start, end in pairwise(cuts))
    turns = (
        ("B", combine),
        ("F", before),
        ("B", experts),
        ("F", dispatch),
        ("B", dispatch),
        ("F", experts + combine),
        ("B", before),
    )
    return in_turn(found, turns)


def in_turn(found: Walks, turns: Sequence[tuple[str, int]]) -> Peak:
    """The most that two walks hold together while they alternate ops."""
    now, left = dict(found.at_start), {side: iter(mine) for side, mine in found.steps.items()}
    peak = NO_BYTES
    for side, count in turns:
        (other,) = now.keys() - {side}
        for own, after in islice(left[side], count):
            peak = peak.worse(Peak(own.bytes + now[other], own.op))
            now[side] = after
    return peak
