"""Lower bounds on the layouts of a pipeline: where only fast ones are needed, most are never computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from math import inf
from typing import Any

from steptime.base.num import Num, minimum
from steptime.job.job import Job
from steptime.search import stage_peaks
from steptime.search.pipeline import Chunks, Stages, sums
from steptime.search.pipeline_rows import LayoutRows
from steptime.search.recompute import RecomputeChoice

Limits = Callable[[Sequence[RecomputeChoice], LayoutRows], Any]
"""Seconds of a step, by recomputation and row, from which on a layout is of no use."""


def least_s(work_s: Num, rows: LayoutRows, stages: Stages, gbs: int) -> Num:
    """Seconds that a step takes at least. `work_s`: of a micro-batch through the whole model, which all stages share evenly."""
    microbatches = gbs // (rows.dp * rows.microbatch_sz)
    return microbatches * work_s / stages.pp + (work_s - work_s / stages.pp) / stages.vpp


@dataclass
class LowerBounds:
    """Bounds for the layouts of one job with each ZeRO level."""

    zeros: Mapping[int, Job]
    gbs: int
    chunks: Chunks

    @cached_property
    def whole(self) -> tuple[Num, Num]:
        """Of the whole model by row of the parts: seconds of a micro-batch with nothing recomputed, and parameters."""
        parts = self.chunks.parts
        counted = [(parts.assembly.embedding, 1), (parts.assembly.head, 1), *parts.assembly.runs]
        work = sum([count * (parts.of[part].forward_s + parts.of[part].backward_s) for part, count in counted])
        return work, sum([count * parts.of[part].n_params for part, count in parts.assembly.runs])

    def of_activations(self, peak: stage_peaks.PeakColumns) -> Num:
        """What a stage holds besides its states; without gradients before the first backward only what is saved is sure."""
        return peak.saved + (peak.transient if self.chunks.job.software.states.gradients_persist else 0.0)

    def useful(
        self, rows: LayoutRows, stages: Stages, choices: tuple[RecomputeChoice, ...], limits: Limits | None
    ) -> tuple[LayoutRows, Num]:
        """The rows that may fit and be fast enough, and their limits: by the whole model, then by the first stage."""
        if limits is None or not rows.at.size:
            return rows, inf
        limits_s = limits(choices, rows)
        pp, kept = stages.pp, least_s(self.whole[0][rows.part], rows, stages, self.gbs) <= limits_s.max(axis=0)
        rows, limits_s = rows.some(kept), limits_s[:, kept]
        if not rows.at.size:
            return rows, limits_s
        first = [self.chunks.of(chunk, choices, rows.part, split=stages.split) for chunk in stages.chunks[0]]
        microbatches = self.gbs // (rows.dp * rows.microbatch_sz)
        in_time = microbatches * (sums(first, "forward_s") + sums(first, "backward_s")) <= limits_s
        if not in_time.any():
            return rows.some([]), limits_s
        peak, capacity = (
            stage_peaks.peaks(stages, 0, first, microbatches),
            self.chunks.job.machine.accelerator.usable_memory_bytes,
        )
        states = [self.of_states(job, rows, pp) for job in self.zeros.values()]
        least = self.of_activations(peak) + reduce(minimum, states)
        kept = (in_time & (least <= capacity)).any(axis=0)
        return rows.some(kept), limits_s[:, kept]

    def of_states(self, job: Job, rows: LayoutRows, pp: int) -> Num:
        """States of the layers, distributed evenly over stages and ranks: no layout has less."""
        size, ranks = job.software.state_bytes, rows.dp * rows.cp * rows.tp
        updated = (size.master + size.moments) / (ranks if job.zero_level else 1.0)
        reduced = size.gradients / (ranks if job.zero_level >= 2 else 1.0)
        reduced = reduced if job.software.states.gradients_persist else 0.0
        return (size.params + reduced + updated) * self.whole[1][rows.part] / pp
