"""Bytes of every layout on one pipeline at the peak of its worst stage, bit for bit those of an estimate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from steptime.base.num import Num, maximum, where
from steptime.schedule import default_group
from steptime.schedule.live import State, states
from steptime.schedule.orders import shortened
from steptime.search.pipeline import Flavor, Stages


class Peak(NamedTuple):
    """The worst moment of a stage [B]."""

    saved: Num
    transient: Num


class Counted(NamedTuple):
    """What a stage holds at one moment: how many micro-batches of each chunk, and which chunk acts."""

    held: tuple[int, ...]
    forward: bool
    chunk: int


def moments(stages: Stages, kind: int, microbatches: int) -> tuple[Counted, ...]:
    """The moments of a stage that could hold the most, whatever its chunks weigh, as long as alike chunks weigh alike."""
    if stages.vpp == 1:  # 1F1B has min(pp - stage, m) in flight, GPipe all
        most = microbatches if stages.schedule == "gpipe" else stages.pp - stages.first[kind]
        held = (min(most, microbatches),)
        return (Counted(held, True, 0), Counted(held, False, 0))
    alike = _alike(stages, kind)
    group = default_group(stages.pp, microbatches)
    short, period, _ = shortened(stages.schedule, stages.pp, stages.vpp, microbatches, group, 1)
    return _worst(stages.schedule, stages.pp, stages.vpp, short, period or group, stages.first[kind], alike)


def _alike(stages: Stages, kind: int) -> tuple[int, ...]:
    """Of each chunk of a stage the first one like it."""
    made = [(c.runs, c.embedding, c.head) for c in stages.chunks[kind]]
    return tuple(made.index(one) for one in made)


@lru_cache(maxsize=4096)
def _worst(
    schedule: str, pp: int, vpp: int, microbatches: int, group: int, stage: int, alike: tuple[int, ...]
) -> tuple[Counted, ...]:
    """Those of the stage's states that no other one outweighs: at most as many of every sort of chunk, acting alike."""
    found = {_counted(state, alike) for state in states(schedule, pp, vpp, microbatches, group)[stage]}
    return tuple(
        one
        for one in found
        if not any(
            other != one
            and (other.forward, other.chunk) == (one.forward, one.chunk)
            and all(a >= b for a, b in zip(other.held, one.held, strict=True))
            for other in found
        )
    )


def _counted(state: State, alike: tuple[int, ...]) -> Counted:
    held = [0] * len(alike)
    for chunk, count in enumerate(state.held):
        held[alike[chunk]] += count
    return Counted(tuple(held), state.action.kind == "F", alike[state.action.chunk])


def peak(flavors: Sequence[Flavor], found: Sequence[Counted]) -> Peak:
    """The worst of some moments of a stage whose chunks are `flavors`."""
    worst: Num = None
    saved_then: Num = None
    for held, forward, chunk in found:
        saved: Num = 0.0
        for count, flavor in zip(held, flavors, strict=True):
            if count:
                saved = saved + count * flavor.saved
        total = saved + (flavors[chunk].forward_extra if forward else flavors[chunk].backward_extra)
        if worst is None:
            worst, saved_then = total, saved
        else:
            more = total > worst
            saved_then = where(more, saved, saved_then)
            worst = maximum(worst, total)
    return Peak(saved_then, worst - saved_then)


def peaks(stages: Stages, kind: int, flavors: Sequence[Flavor], microbatches: Any) -> Peak:
    """The worst moment of a kind of stage for rows of `flavors` with these micro-batches."""
    import numpy as np

    sorts: dict[tuple[Counted, ...], list[Any]] = {}
    for m in np.unique(microbatches):
        sorts.setdefault(moments(stages, kind, int(m)), []).append(m)
    if len(sorts) == 1:
        return peak(flavors, next(iter(sorts)))
    saved = np.empty_like(flavors[0].saved)
    transient = np.empty_like(saved)
    for found, counts in sorts.items():
        rows = np.isin(microbatches, counts)
        of = peak([flavor.rows(rows) for flavor in flavors], found)
        saved[:, rows], transient[:, rows] = of
    return Peak(saved, transient)
