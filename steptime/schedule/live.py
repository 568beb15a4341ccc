"""How many micro-batches each stage holds, and what they weigh at the worst moment."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from operator import itemgetter, mul
from typing import NamedTuple, TypeAlias

from steptime.base.num import Num, is_column, where
from steptime.schedule.orders import Action, order

PerChunk: TypeAlias = Sequence[Sequence[Num]]
"""Bytes of each chunk, [pp][vpp]: numbers or columns."""


class State(NamedTuple):
    """What a stage holds when a forward ends or a backward starts: either way that micro-batch is included."""

    live: tuple[int, ...]
    """[vpp] micro-batches that each chunk holds saved tensors of."""
    action: Action


class Peak(NamedTuple):
    """The worst moment of a stage."""

    bytes: Num
    saved_bytes: Num
    """The part that is saved for backward; the rest is the action's own."""
    action: Action


@lru_cache(maxsize=64)
def states(schedule: str, pp: int, vpp: int, microbatches: int, group: int | None = None) -> list[list[State]]:
    """Of each stage, the states that could hold the most: no other of the same kind and chunk has every count as high.

    Raises:
        ValueError: as `order`.
    """
    return [_maximal(_distinct(actions, vpp)) for actions in order(schedule, pp, vpp, microbatches, group)]


def _distinct(actions: Sequence[Action], vpp: int) -> list[State]:
    """The different states of a stage: of a run of forwards of one chunk the last, of a run of backwards the first."""
    live = [0] * vpp
    first: dict[tuple[str, int, tuple[int, ...]], Action] = {}
    for (kind, chunk), run in groupby(actions, key=itemgetter(0, 2)):
        same = list(run)
        live[chunk] += len(same) * (kind == "F")
        first.setdefault((kind, chunk, tuple(live)), same[-1] if kind == "F" else same[0])
        live[chunk] -= len(same) * (kind == "B")
    return [State(counts, action) for (_, _, counts), action in first.items()]


def _maximal(found: list[State]) -> list[State]:
    """The states that no other dominates: from the fullest down, only one already kept can dominate the next."""
    kept: list[State] = []
    for state in sorted(found, key=lambda state: -sum(state.live)):
        rivals = (k.live for k in kept if k.action.kind == state.action.kind and k.action.chunk == state.action.chunk)
        if not any(all(a >= b for a, b in zip(rival, state.live, strict=True)) for rival in rivals):
            kept.append(state)
    return kept


def peaks(
    schedule: str,
    pp: int,
    vpp: int,
    microbatches: int,
    weights: PerChunk,
    fwd_extra: PerChunk,
    bwd_extra: PerChunk,
    group: int | None = None,
) -> list[Peak]:
    """The most bytes each stage holds beside its states.

    Args:
        schedule: a name in `SCHEDULES`.
        pp: pipeline stages.
        vpp: model chunks per stage.
        microbatches: micro-batches per step.
        weights: [pp][vpp] bytes a chunk saves for the backward of one micro-batch.
        fwd_extra: [pp][vpp] most bytes of a forward beside all that is saved when it ends (its own micro-batch too).
        bwd_extra: [pp][vpp] most bytes of a backward beside all that is saved when it starts (its own too).
        group: as in `order`.

    Returns:
        [pp] the peak, the saved part of it, and the first action that reaches it (of columns the stage's first). No byte may be
        negative.

    Raises:
        ValueError: as `order`.
    """
    worst = []
    for stage, candidates in enumerate(states(schedule, pp, vpp, microbatches, group)):
        extra = {"F": fwd_extra[stage], "B": bwd_extra[stage]}
        best = Peak(-1.0, 0.0, candidates[0].action)
        for live, action in candidates:
            saved = sum(map(mul, live, weights[stage]))
            total = saved + extra[action.kind][action.chunk]
            more = total > best.bytes
            if is_column(more):
                best = Peak(where(more, total, best.bytes), where(more, saved, best.saved_bytes), best.action)
            elif more:
                best = Peak(total, saved, action)
        worst.append(best)
    return worst


def in_flight(schedule: str, pp: int, vpp: int, microbatches: int, group: int | None = None) -> list[float]:
    """Most micro-batches each stage holds at once, in units of its whole set of chunks: [pp].

    1F1B holds min(p - r, m) on stage r; interleaved min(v m, 2 (p - r - 1) + (v - 1) group + 1) / v, one chunk more than its
    warm-up. On stage 0 that is min(m, p + (p - 1) / v) where pp divides m (Korthikanti et al. 2022, arXiv 2205.05198, 4.2).

    >>> in_flight("1f1b", 4, 1, 8), in_flight("interleaved", 4, 2, 8)
    ([4.0, 3.0, 2.0, 1.0], [5.5, 4.5, 3.5, 2.5])
    """
    return [max(sum(state.live) for state in found) / vpp for found in states(schedule, pp, vpp, microbatches, group)]
