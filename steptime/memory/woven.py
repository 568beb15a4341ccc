"""Peak of a layer whose backward takes turns with the forward of another micro-batch's layer (`overlap.ep`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice, pairwise

from steptime.memory.forward_walk import forward_steps
from steptime.memory.ledger import NO_BYTES, Ledger, Peak
from steptime.memory.op_walk import Autograd, BackwardWalk, kept_by_part
from steptime.model.ops import Op, Tensor


def woven_peak(ops: list[Op], x: Tensor, out: str, modules: AbstractSet[str | float], autograd: Autograd) -> Peak:
    """Most bytes of both layers; none where a layer sends no rows to other ranks.

    Pieces in turn: combine back, attention to router forward, experts back, dispatch forward and back, experts and combine
    forward, attention to router back (megatron/core/models/common/model_chunk_schedule_plan.py,
    TransformerLayerSchedulePlan.run).
    """
    sent = [i for i, op in enumerate(ops) if op.step.startswith("dispatch") and not op.depth]
    if not sent:
        return NO_BYTES
    returned = next(i for i, op in enumerate(ops) if op.step == "combine")
    kept, sizes, segments, away = kept_by_part(ops, x, modules, autograd)
    forward = forward_steps(ops, sizes, kept, x.name, out)
    walk = BackwardWalk(ops, sizes, segments, kept, autograd, away)
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
    sides = {"F": (Ledger(sizes[x.name]), forward), "B": (walk.ledger, walk.steps(out))}
    return in_turn(sides, turns)


def in_turn(sides: dict[str, tuple[Ledger, Iterator[Ledger]]], turns: Sequence[tuple[str, int]]) -> Peak:
    """The most that two walks hold together while they alternate ops; `sides`: each with its bytes at the start."""
    held = {side: ledger.bytes for side, (ledger, _) in sides.items()}
    peak = NO_BYTES
    for side, count in turns:
        (other,) = sides.keys() - {side}
        for ledger in islice(sides[side][1], count):
            peak = peak.worse(Peak(ledger.peak.bytes + held[other], ledger.peak.op))
            ledger.most, ledger.op = NO_BYTES
            held[side] = ledger.bytes
    return peak
