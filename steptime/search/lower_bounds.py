"""Lower bounds on the layouts of a pipeline: where only fast ones are needed, most are never computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, reduce

from steptime.base.num import Num, minimum
from steptime.job.job import Job
from steptime.search import stage_peaks
from steptime.search.pipeline import Chunks, Stages, sums
from steptime.search.pipeline_rows import LayoutRows
from steptime.search.recompute import RecomputeChoice


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
        self, rows: LayoutRows, stages: Stages, choices: tuple[RecomputeChoice, ...], limit_s: float
    ) -> LayoutRows:
        """The rows that may take less than `limit_s` and fit: by the whole model distributed evenly, and by the first stage."""
        work, (pp, vpp) = self.whole[0][rows.part], (stages.pp, stages.vpp)
        microbatches = self.gbs // (rows.dp * rows.microbatch_sz)
        rows = rows.some(microbatches * work / pp + (work - work / pp) / vpp <= limit_s)
        if not rows.at.size:
            return rows
        first = [self.chunks.of(chunk, choices, rows.part, split=stages.split) for chunk in stages.chunks[0]]
        microbatches = self.gbs // (rows.dp * rows.microbatch_sz)
        in_time = microbatches * (sums(first, "forward_s") + sums(first, "backward_s")) <= limit_s
        if not in_time.any():
            return rows.some([])
        peak, capacity = (
            stage_peaks.peaks(stages, 0, first, microbatches),
            self.chunks.job.machine.accelerator.usable_memory_bytes,
        )
        states = [self.of_states(job, rows, pp) for job in self.zeros.values()]
        least = self.of_activations(peak) + reduce(minimum, states)
        return rows.some((in_time & (least <= capacity)).any(axis=0))

    def of_states(self, job: Job, rows: LayoutRows, pp: int) -> Num:
        """States of the layers, distributed evenly over stages and ranks: no layout has less."""
        size, ranks = job.software.state_bytes, rows.dp * rows.cp * rows.tp
        updated = (size.master + size.moments) / (ranks if job.zero_level else 1.0)
        reduced = size.gradients / (ranks if job.zero_level >= 2 else 1.0)
        reduced = reduced if job.software.states.gradients_persist else 0.0
        return (size.params + reduced + updated) * self.whole[1][rows.part] / pp
