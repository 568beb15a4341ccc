"""Bytes of every layout on one pipeline at the peak of its worst stage, equal bit for bit to those of an estimate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import ge
from typing import Any, NamedTuple

from steptime.base.num import Num, maximum, where
from steptime.schedule import default_group
from steptime.schedule.actions import in_groups
from steptime.schedule.live import stage_peak, states
from steptime.schedule.orders import shortened
from steptime.search.pipeline import ChunkFigures, Stages, contents, counts_of, rows_of_all


class PeakColumns(NamedTuple):
    """The worst moment of a stage [B]."""

    saved: Num
    transient: Num


class InFlightCounts(NamedTuple):
    """One moment of a stage: micro-batches held of each chunk, and the running chunk."""

    in_flight: tuple[int, ...]
    forward: bool
    chunk: int


def moments(stages: Stages, kind: int, microbatches: int) -> tuple[InFlightCounts, ...]:
    """The moments of a stage that could hold the most, whatever its chunks weigh, as long as alike chunks weigh alike."""
    if stages.vpp == 1:  # 1F1B has min(pp - stage, m) in flight, GPipe all
        most = microbatches if stages.schedule == "gpipe" else stages.pp - stages.first[kind]
        in_flight = (min(most, microbatches),)
        return (InFlightCounts(in_flight, True, 0), InFlightCounts(in_flight, False, 0))
    group = default_group(stages.pp, microbatches)
    short, period, _ = shortened(stages.schedule, stages.pp, stages.vpp, microbatches, group, 1)
    return worst_moments(stages.pp - 1 - stages.first[kind], short, period or group, alike(stages, kind))


def alike(stages: Stages, kind: int) -> tuple[int, ...]:
    """For each chunk of a stage the first equal one."""
    sorts = list(map(contents, stages.chunks[kind]))
    return tuple(sorts.index(one) for one in sorts)


@lru_cache(maxsize=4096)
def worst_moments(behind: int, microbatches: int, group: int, alike: tuple[int, ...]) -> tuple[InFlightCounts, ...]:
    """Of an interleaved stage with `behind` stages after it, the moments that no other one outweighs.

    That is with at most as many of every sort of chunk, acting alike. The order is that of `schedule.orders`: warm-up, pairs of
    a forward and a backward, and the rest of the backwards, over groups of micro-batches, chunk by chunk. `alike`: of each chunk
    the first one like it.
    """
    vpp = len(alike)
    table = [chunk for _, chunk in in_groups(vpp, microbatches, group)]
    warmup = min(2 * behind + (vpp - 1) * group, len(table))
    in_flight, seen = [0] * vpp, dict[tuple[bool, int], set[tuple[int, ...]]]()
    for k in range(len(table) + warmup):
        if k < len(table):
            chunk = alike[table[k]]
            in_flight[chunk] += 1
            seen.setdefault((True, chunk), set()).add(tuple(in_flight))
        if k >= warmup:
            chunk = alike[vpp - 1 - table[k - warmup]]
            seen.setdefault((False, chunk), set()).add(tuple(in_flight))
            in_flight[chunk] -= 1
    ordered = {acts: sorted(found, key=lambda counts: (-sum(counts), counts)) for acts, found in seen.items()}
    return tuple(InFlightCounts(one, *acts) for acts, found in ordered.items() for one in largest(found))


def largest(found: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The counts that no other ones exceed everywhere; `found`: those that exceed others before these."""
    kept: list[tuple[int, ...]] = []
    for one in found:
        if not any(all(map(ge, other, one)) for other in kept):
            kept.append(one)
    return kept


def peak(chunk_figures: Sequence[ChunkFigures], found: Sequence[InFlightCounts]) -> PeakColumns:
    """The worst of some moments of a stage whose chunks are `chunk_figures`."""
    worst: Num = None
    saved_then: Num = None
    for in_flight, forward, chunk in found:
        saved: Num = 0.0
        for count, figures in zip(in_flight, chunk_figures, strict=True):
            if count:
                saved = saved + count * figures.saved
        total = saved + (chunk_figures[chunk].forward_extra if forward else chunk_figures[chunk].backward_extra)
        if worst is None:
            worst, saved_then = total, saved
        else:
            more = total > worst
            saved_then = where(more, saved, saved_then)
            worst = maximum(worst, total)
    return PeakColumns(saved_then, worst - saved_then)


def in_order(stages: Stages, kind: int, chunk_figures: Sequence[ChunkFigures], microbatches: Any) -> PeakColumns:
    """The worst moment of a kind of stage by the schedule's own order of every stage."""
    import numpy as np

    found = np.zeros_like(chunk_figures[0].saved)
    for m in counts_of(microbatches):
        rows = np.flatnonzero(microbatches == m)
        some = rows_of_all(chunk_figures, rows)
        early, late = [figures.saved for figures in some], None
        extra = {"F": [figures.forward_extra for figures in some], "B": [figures.backward_extra for figures in some]}
        if stages.split:
            late = [figures.kept for figures in some]
            early = [whole - after for whole, after in zip(early, late, strict=True)]
            extra |= {"I": [figures.input_extra for figures in some], "W": [figures.weight_extra for figures in some]}
        every = states(stages.schedule, stages.pp, stages.vpp, m)
        for one in {tuple(every[stage]) for stage in stages.of[kind]}:
            worst = stage_peak(one, early, late, extra)
            in_flight = worst.saved_bytes + (worst.bytes - worst.saved_bytes)
            found[:, rows] = maximum(found[:, rows], in_flight)
    return PeakColumns(found, 0.0)


def peaks(stages: Stages, kind: int, chunk_figures: Sequence[ChunkFigures], microbatches: Any) -> PeakColumns:
    """The worst moment of a kind of stage for rows of `chunk_figures` with these micro-batches."""
    import numpy as np

    if stages.schedule not in {"1f1b", "interleaved"} and (stages.split or stages.vpp > 1):
        return in_order(stages, kind, chunk_figures, microbatches)

    sorts: dict[tuple[InFlightCounts, ...], list[Any]] = {}
    for m in counts_of(microbatches):
        sorts.setdefault(moments(stages, kind, m), []).append(m)
    if len(sorts) == 1:
        return peak(chunk_figures, next(iter(sorts)))
    saved = np.empty_like(chunk_figures[0].saved)
    transient = np.empty_like(saved)
    for found, counts in sorts.items():
        rows = np.flatnonzero(np.isin(microbatches, counts))
        of = peak(rows_of_all(chunk_figures, rows), found)
        saved[:, rows], transient[:, rows] = of
    return PeakColumns(saved, transient)
