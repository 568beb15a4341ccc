"""Gradients that are not kept between steps: peaks of stages that run all forwards before their first backward.

No gradient exists before it, so such a stage may hold less than one that has as many micro-batches and all gradients
(`memory.stages`). Of the stages of one kind the first ones can be such, and the next one not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steptime.base.num import Num
from steptime.job.job import Job
from steptime.memory.stages import PeakMoment, moments_of_first
from steptime.search.pipeline import ChunkFigures, Chunks, Stages, counts_of
from steptime.search.pipeline_states import AroundPipeline
from steptime.search.recompute import RecomputeChoice
from steptime.search.stage_peaks import InFlightCounts, PeakColumns, peak


def in_flight_after_warmup(stages: Stages, kind: int, microbatches: int) -> int | None:
    """The most micro-batches that a stage of a kind holds whose first backward precedes a forward.

    None where all of them are so; 0 where none is.
    """
    if stages.vpp > 1 or stages.split or stages.pp == 1 or microbatches > stages.pp - stages.first[kind]:
        return None if stages.schedule != "gpipe" or stages.vpp > 1 or stages.pp == 1 else 0
    if stages.schedule == "gpipe":
        return 0
    return next((stages.pp - stage for stage in stages.of[kind] if stages.pp - stage < microbatches), 0)


def worst(
    job: Job,
    stages: Stages,
    chunk_figures: Sequence[Sequence[ChunkFigures]],
    peaks: Sequence[PeakColumns],
    microbatches: Any,
    known: tuple[Chunks, tuple[RecomputeChoice, ...], Any],
    ends: AroundPipeline,
    at: Any,
) -> list[tuple[int, PeakMoment]]:
    """The worst moments of every kind of stage: one, or two where gradients are not kept between steps."""
    if job.software.states.gradients_persist:
        return [(kind, PeakMoment(peak.saved, peak.transient, "")) for kind, peak in enumerate(peaks)]
    found: list[tuple[int, PeakMoment]] = []
    for kind, one in enumerate(peaks):
        of = *known, ends.states.stages[kind].local[at]
        found += [(kind, moment) for moment in moments(job, stages, kind, chunk_figures[kind], one, microbatches, of)]
    return found


def moments(
    job: Job,
    stages: Stages,
    kind: int,
    chunk_figures: Sequence[ChunkFigures],
    usual: PeakColumns,
    microbatches: Any,
    found: tuple[Chunks, tuple[RecomputeChoice, ...], Any, Any],
) -> list[PeakMoment]:
    """The worst moment of a kind's stages without gradients before their first backward, and of its others.

    `usual`: where every stage has all gradients from the start. `found`: the chunks, recomputations, and by row the row of the
    parts, and parameters of the stage on a device.
    """
    import numpy as np

    saved, transient = (np.broadcast_to(x, chunk_figures[0].saved.shape).copy() for x in usual)
    nothing: Num = np.zeros_like(saved)
    first = PeakMoment(nothing.copy(), nothing.copy(), "", nothing.copy())
    for m in counts_of(microbatches):
        alone = stages.pp == 1 and m == 1 and job.zero_level < 2
        later = 0 if alone else in_flight_after_warmup(stages, kind, m)
        if later is None:
            continue
        rows = np.flatnonzero(microbatches == m)
        some = chunk_figures[0].rows(rows)
        saved[:, rows], transient[:, rows] = _of_count(some, later)
        for choice in range(len(found[1])):
            of = _first(job, stages, kind, some, choice, m, rows, found)
            first.activations_bytes[choice, rows] = of.activations_bytes
            first.transient_bytes[choice, rows] = of.transient_bytes
            first.grads_not_yet_allocated_bytes[choice, rows] = of.grads_not_yet_allocated_bytes
    return [PeakMoment(saved, transient, "", nothing), first]


def _of_count(figures: ChunkFigures, in_flight: int) -> PeakColumns:
    """The worst moment of a stage that holds this many micro-batches of its one chunk."""
    if not in_flight:
        return PeakColumns(0.0, 0.0)
    return peak([figures], (InFlightCounts((in_flight,), True, 0), InFlightCounts((in_flight,), False, 0)))


def _first(
    job: Job,
    stages: Stages,
    kind: int,
    figures: ChunkFigures,
    choice: int,
    microbatches: int,
    rows: Any,
    found: tuple[Chunks, tuple[RecomputeChoice, ...], Any, Any],
) -> PeakMoment:
    """`memory.stages.before_gradients`, or `first_backward` without a pipeline, of some rows."""
    chunks, choices, part, n_params = found
    parts = chunks.first(stages.chunks[kind][0], choices[choice], part[rows])
    own = figures.saved[choice] if stages.pp > 1 else None
    others = (microbatches - 1) * figures.saved[choice] if stages.pp > 1 else 0.0
    each = moments_of_first(job, parts, n_params[rows], others, own)
    worst = next(each)
    for moment in each:
        worst = worst.worse(moment)
    later = PeakMoment(others, figures.backward_extra[choice], "")
    return worst.worse(later) if microbatches > 1 else worst
