"""FSDP in a pipeline, in columns: its memory, and its schedule walked with what FSDP adds to the actions."""

from __future__ import annotations

from collections.abc import Iterator

from steptime import fsdp
from steptime.answer.verdict import update_temporaries
from steptime.base.config import ConfigError
from steptime.base.num import Num, maximum, where
from steptime.cost.comm import collective
from steptime.fsdp.pipeline_memory import REPEATS
from steptime.job.candidates import Candidates
from steptime.job.job import Job
from steptime.job.limits import MOST_ACTIONS, MOST_MICROBATCHES
from steptime.job.mesh import Group
from steptime.memory.buffers import at_peak, gradient_copies, step_change
from steptime.memory.overhead import StreamPools, overhead, reserved_bytes
from steptime.memory.states import States
from steptime.schedule.orders import described, shortened
from steptime.schedule.stage_exchange import exchange_of
from steptime.search.fsdp_chunks import ColumnSeconds, FsdpChunks
from steptime.search.fsdp_groups import ends, picked
from steptime.search.lower_bounds import Limits
from steptime.search.pipeline import Stages, counts_of
from steptime.search.pipeline_layouts import Block, Pipelines
from steptime.search.pipeline_rows import legal_rows, shardings_of
from steptime.search.recompute import RecomputeChoice
from steptime.search.space import SPLIT_SETTINGS, Shape
from steptime.search.step_seconds import send_share
from steptime.search.walk_columns import makespans
from steptime.software.hidden_shares import Share
from steptime.timing.step_time import straggler_s


def covers_shape(shape: Shape) -> bool:
    """Whether it is such a pipeline: of one whose backwards are split, each layout is estimated."""
    return shape.pp > 1 and not (shape.schedule and described(shape.schedule).split)


class FsdpPipelines(Pipelines):
    """FSDP's layouts of one job on one number of devices."""

    def blocks(
        self,
        stages: Stages,
        shape: Shape,
        choices: tuple[RecomputeChoice, ...],
        share: Share | None,
        limits_s: Limits | None = None,  # noqa: ARG002
    ) -> Iterator[Block]:
        """One block; as `Pipelines.blocks`."""
        import numpy as np

        rows = self.rows(shape)
        ((zero, job),) = self.zeros.items()
        legal = legal_rows(self.grid, zero, shape.schedule, rows)
        rows, legal = rows.some(legal), legal[legal]
        if not rows.at.size:
            return
        try:
            said = self.said(stages, shape)
        except ConfigError:  # a rule that the grid does not know of
            return
        shardings, at = shardings_of(rows.tp, rows.ep, rows.etp)
        found = picked(ends(said, stages, shardings, self.grid.devices), at)
        degrees = {name: getattr(rows, name) for name in ("tp", "cp", "ep", "etp", "dp", "microbatch_sz")}
        view = Candidates(said, **degrees, gbs=1.0 * self.grid.gbs)
        view.all_on(self.grid.devices)
        chunks = FsdpChunks(self, stages, choices, rows, found, view.as_job)
        outside = sum(overhead(view.as_job)) + 0.0 * rows.tp
        allocated, reserved = self.needed_bytes(chunks)
        capacity = job.machine.accelerator.usable_memory_bytes
        block = Block(
            self.job, self.grid.devices, self.grid.gbs, stages, shape.split, zero, choices, rows, legal,
            np.full_like(reserved, np.inf), allocated + outside, reserved + outside, capacity, self.most(choices), outside,
        )  # fmt: skip
        self.walk(block, chunks, share)
        yield block

    def said(self, stages: Stages, shape: Shape) -> Job:
        """The job in this pipeline, on as few devices as it takes."""
        settings = {"parallelism.pp": stages.pp, "parallelism.vpp": stages.vpp, "parallelism.schedule": stages.said}
        copies, chunks = self.job.parallelism.dp, stages.pp * stages.vpp
        most = min(self.job.data.gbs // copies * stages.pp, MOST_MICROBATCHES, MOST_ACTIONS // chunks)
        batch = most // stages.pp * stages.pp * copies  # interleaving wants a multiple of pp; the rows have their own
        return self.job.replace(**settings, **SPLIT_SETTINGS[shape.split], **{"data.gbs": batch})

    def needed_bytes(self, chunks: FsdpChunks) -> tuple[Num, Num]:
        """Allocated and reserved bytes of the stage with the most."""
        import numpy as np

        rows, stages, job = chunks.rows, chunks.stages, chunks.view
        microbatches = self.grid.gbs // (rows.dp * rows.microbatch_sz)
        shape = len(chunks.choices), rows.at.size
        allocated, reserved = np.zeros(shape), np.zeros(shape)
        steps: dict[tuple[int, int | None], list[int]] = {}
        for m in counts_of(microbatches):
            short, period, _ = shortened(stages.schedule, stages.pp, stages.vpp, m, None, REPEATS)
            steps.setdefault((short, period), []).append(m)
        pooled, expandable = fsdp.pooled(self.job), self.job.software.buffers.expandable_segments
        for kind, of in enumerate(chunks.ends.stages):
            buffers = self.buffers(stages, kind, rows, 0.0)
            states = States(of.params, of.gradients, of.optimizer, [], owned=of.owned, update_bytes=of.update)
            copies = gradient_copies(job, states)
            updating = update_temporaries(job, states) + (buffers.between - buffers.moving + step_change(copies))
            for step, counts in steps.items():
                mine = np.isin(microbatches, counts)
                moment = chunks.moment(kind, step)
                more = updating > moment.added_bytes
                passing = moment.activations_bytes + moment.transient_bytes
                moving = where(more, updating, passing)
                to_come = where(more, 0.0, moment.grads_not_yet_allocated_bytes)
                gradients = of.gradients - to_come
                fixed = of.params + gradients + of.optimizer + (buffers.staying + buffers.moving + at_peak(copies))
                pools = StreamPools(to_come, maximum(passing, updating), 0.0) if pooled else None
                peak = reserved_bytes(fixed, moving, pools, expandable=expandable)
                allocated[:, mine] = maximum(allocated, fixed + moving)[:, mine]
                reserved[:, mine] = maximum(reserved, peak)[:, mine]
        return allocated, reserved

    def walk(self, block: Block, chunks: FsdpChunks, share: Share | None) -> None:
        """Fill in the seconds of the layouts that may fit."""
        import numpy as np

        stages, rows, job = chunks.stages, chunks.rows, chunks.view
        wanted = block.fits
        if not wanted.any():
            return
        chunk_figures = self.chunk_figures(stages, chunks.choices, rows.part)
        tiers, microbatches = self.priced.dp_tiers, self.grid.gbs // (rows.dp * rows.microbatch_sz)
        found = chunks.seconds(tiers, self.priced.context.rates)
        sent = self.sends(stages, rows)
        left = send_share(share)
        makespan = makespans(
            stages,
            chunk_figures,
            microbatches,
            [left * seconds for seconds in (*sent.each, sent.wrap)],
            blocking=share is not True,
            wanted=wanted,
            around=lambda some_of: ColumnSeconds(chunks, found, tiers, some_of),
            exchange=exchange_of(job.software.layout.stage_exchange, stages.schedule, stages.vpp),
        )
        work = [sum(f.forward_s + f.backward_s for f in mine) for mine in chunk_figures]
        busiest: Num = 0
        most: Num = 0.0
        for kind, seconds in enumerate(work):
            busiest, most = where(seconds > most, kind, busiest), maximum(most, seconds)
        partial: Num = 0.0
        for kind, of in enumerate(chunks.ends.stages):
            cost = collective("all_reduce", of.partial_bytes, Group("tp", rows.tp, 1), self.priced.context.tiers).time_s
            partial = where(busiest == kind, of.tensors * microbatches * cost, partial)
        after = chunks.ends.embedding_s + rows.sp * partial + chunks.ends.optimizer_s
        step = makespan + after + straggler_s(job, makespan)
        block.step_s[:] = np.where(wanted, step, np.inf)
