"""The screen: step time and memory of every layout that can run, pipeline by pipeline, in numpy columns."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import exp
from typing import Any, Protocol

from steptime import fsdp
from steptime.answer.distance import RECOMPUTE, clipped
from steptime.answer.interval import interval_at
from steptime.answer.measured import measured, place_of
from steptime.base.config import ConfigError
from steptime.job.candidates import Candidates
from steptime.job.job import Job, facts
from steptime.job.layer_rules import default_profile
from steptime.schedule.orders import described
from steptime.search import estimated, fsdp_layouts, fsdp_pipelines, oversized, rounds
from steptime.search.fsdp_pipelines import FsdpPipelines
from steptime.search.grid import grid, schedules, shapes, with_split
from steptime.search.part_columns import PartColumns, PartKey, by_sp, code, parts_of
from steptime.search.pipeline import Chunks, stages
from steptime.search.pipeline_layouts import Block, Pipelines
from steptime.search.pipeline_rows import LayoutRows
from steptime.search.recompute import RecomputeChoice, allowed, of_layers, of_plan, usual
from steptime.search.search import Search
from steptime.search.sharded_weights import ShardedWeights
from steptime.search.space import Axes, Counts, Grid, Shape, on_fewest_devices, zero_levels
from steptime.software.hidden_shares import Share
from steptime.software.performance import resolve
from steptime.timing.part_times import pricing


class Bound(Protocol):
    """What a search may leave out."""

    search: Search
    """Results so far."""

    def changes(self, shape: Shape) -> int:
        """Settings that a pipeline changes; those that change fewer are screened first."""
        ...

    def near(self, shape: Shape, rows: LayoutRows, least: Callable[[Shape, LayoutRows], Any]) -> Any:
        """Rows of a pipeline that are screened first, a bool for each. `least`: seconds that they take at least."""
        ...

    def limits_s(self, shape: Shape, choices: Sequence[RecomputeChoice], rows: LayoutRows) -> Any:
        """Seconds of a step, by recomputation and row of a pipeline, from which on a layout is of no use."""
        ...


@dataclass
class Screen:
    """The screen of one job, of which everything is fixed but the layout."""

    plan: Job
    axes: Axes
    counts: Counts
    bound: Bound | None = None
    """Which layouts are not needed, where not all of them are."""
    every: bool = False
    """Whether layouts that need many times a device's memory are computed too."""
    _allowed: dict[tuple[str, str], bool] = field(default_factory=dict)

    @cached_property
    def job(self) -> Job:
        """The job on as few devices as possible."""
        return on_fewest_devices(self.plan)

    @cached_property
    def zeros(self) -> dict[int, Job]:
        """The job with each ZeRO level that it can have."""
        jobs: dict[int, Job] = {}
        for level in self.levels:
            with suppress(ConfigError):  # its rows break the same rule
                said = self.job.parallelism.fsdp is not None
                jobs[level] = self.job if said else self.job.replace(**{"parallelism.zero_level": level})
        return jobs

    @cached_property
    def levels(self) -> list[int]:
        """ZeRO levels that are tried: 3, whose layouts are all estimated, where the plan has it or it is requested."""
        wanted = self.plan.zero_level == 3 or "zero_level" in self.axes.said or not estimated.covered(self.job)
        return [z for z in zero_levels(self.job, self.axes) if z < 3 or wanted]

    def send_share(self, *, interleaved: bool) -> Share | None:
        """Share of the sends between stages that is overlapped."""
        default = default_profile(self.job.model, fsdp=self.job.parallelism.fsdp is not None)
        return resolve(self.job.performance, default, interleaved=interleaved).overlap.pp

    def choices(self, layers: int, schedule: str | None) -> tuple[RecomputeChoice, ...]:
        """Recomputations for chunks of up to so many layers; none with a backward in two halves, which has its own rule."""
        said = of_plan(self.axes.said)
        found = tuple(allowed(self.job, said or [*self.usual, *of_layers(layers)], self._allowed))
        if schedule is None or not described(schedule).split:
            return found
        return tuple(one for one in found if one.form(1).granularity == "none")

    @cached_property
    def usual(self) -> list[RecomputeChoice]:
        """Recomputations that any pipeline can have."""
        return usual(self.plan)

    @cached_property
    def margin(self) -> dict[str, float]:
        """Of each granularity of recomputation the least ln of the 90th percentile of reserved memory over the estimate.

        Degrees and micro-batch widen it outside of what was measured alone (`measured.HELD_PER_DOUBLING`).
        """
        place = place_of(self.job)
        inside = place._replace(at=(*place.at[:3], *clipped(place, measured("memory"))[3:]))
        kinds = {name: inside.kind._replace(recompute=name) for name in RECOMPUTE}
        return {name: interval_at("memory", inside._replace(kind=kind)).high for name, kind in kinds.items()}

    def most(self, choices: Sequence[RecomputeChoice]) -> Any:
        """`Block.most` of some recomputations."""
        import numpy as np

        return np.array([[exp(self.margin[choice.form(1).granularity])] for choice in choices])

    def blocks(self, devices: int, gbs: int) -> Iterator[tuple[float, Block]]:
        """Every layout on so many devices with this batch, and the share of them that is done with each block."""
        found = grid(self.job, self.plan, self.axes, devices, gbs, self.counts, self.weight, self.levels)
        listed = list(shapes(found))
        columns = {z: job for z, job in self.zeros.items() if estimated.covered(job)}
        if columns and listed:
            for at, block in self._in_columns(found, columns, listed):
                yield (at + 1.0) / len(listed), block
        for zero, job in self.zeros.items():
            if zero not in columns:
                yield from self._fsdp(found, zero, job, listed)

    def _fsdp(self, found: Grid, zero: int, job: Job, listed: list[Shape]) -> Iterator[tuple[float, Block]]:
        """FSDP's layouts: pipelines in columns where these cover them."""
        piped, others = list[Shape](), list[Shape]()
        for shape in listed:
            (piped if estimated.in_pipelines(job) and self._covers(job, shape) else others).append(shape)
        for at, block in self._in_columns(found, {zero: job}, piped, FsdpPipelines) if piped else ():
            yield (at + 1.0) / len(listed), block
        for share, block in self._one_by_one(found, zero, job, others) if others else ():
            yield (len(piped) + share * len(others)) / len(listed), block

    def _covers(self, job: Job, shape: Shape) -> bool:
        """Whether columns cover FSDP's layouts of a pipeline: with layers that are checkpointed one by one."""
        choices = self.choices(estimated.outline(job, shape).layers, shape.schedule) if shape.pp > 1 else ()
        forms = [choice.form(1) for choice in choices]
        return fsdp_pipelines.covers_shape(shape) and all(f.method == "block" or {*f.n_layers} <= {1} for f in forms)

    def _in_columns(
        self, found: Grid, zeros: dict[int, Job], listed: list[Shape], of: type[Pipelines] = Pipelines
    ) -> Iterator[tuple[int, Block]]:
        """The layouts that columns cover, pipeline by pipeline."""
        weights = ShardedWeights(self.job, oversized.legal_shardings(found)[1])
        useful = found if self.every else self.useful(found, zeros, weights, listed)
        if not (bound := self.bound):
            yield from self._screened(useful, zeros, listed, of, weights)
            return
        listed = sorted(listed, key=lambda one: (bound.changes(one), -min(one.vpp, 8)))
        least = rounds.LeastSeconds(self.job, zeros, part_keys(useful, zeros), useful)
        near = rounds.kept(useful, list(zeros), listed, lambda shape, rows: bound.near(shape, rows, least))
        yield from self._screened(near, zeros, listed, of, weights)

        def in_time(shape: Shape, rows: LayoutRows) -> Any:
            choices = self.choices(estimated.outline(self.job, shape).layers, shape.schedule)
            return least(shape, rows) <= bound.limits_s(shape, choices, rows).max(axis=0, initial=0.0)

        others = rounds.kept(rounds.others(useful, near), list(zeros), listed, in_time)
        yield from self._screened(others, zeros, listed, of, weights)

    def _screened(
        self,
        found: Grid,
        zeros: dict[int, Job],
        listed: list[Shape],
        of: type[Pipelines],
        weights: ShardedWeights,
    ) -> Iterator[tuple[int, Block]]:
        """All layouts of a grid, pipeline by pipeline."""
        keys = part_keys(found, zeros)
        if not keys:
            return
        job = next(iter(zeros.values()))  # parts of ZeRO 3 add no whole gradients
        parts = self.parts(keys, found, job)
        chunks = Chunks(self.job, parts)
        priced = pricing(Candidates(job, dp=found.devices, gbs=found.devices).as_job)
        common = of(self.job, zeros, found, chunks, weights, priced, self.most)
        plain, bound = facts(self.job), self.bound
        for at, shape in enumerate(listed):
            view = plain._replace(pp=shape.pp, vpp=shape.vpp, schedule_said=shape.schedule)
            split_stages = stages(parts.assembly, with_split(view, shape.split), estimated.schedule_of(self.job, shape))
            share = self.send_share(interleaved=shape.vpp > 1)
            limits = partial(bound.limits_s, shape) if bound else None
            choices = self.choices(split_stages.layers, shape.schedule)
            for block in common.blocks(split_stages, shape, choices, share, limits) if choices else ():
                yield at, block

    def useful(self, found: Grid, zeros: dict[int, Job], weights: ShardedWeights, listed: list[Shape]) -> Grid:
        """The grid less the layouts that are hopeless, which are counted."""
        lost = oversized.oversized(zeros, found, weights)
        for shape in listed:
            layers = estimated.outline(self.job, shape).layers
            oversized.count(self.counts, found, lost, shape, len(self.choices(layers, shape.schedule)))
        return oversized.without(found, lost)

    def _one_by_one(self, found: Grid, zero: int, job: Job, listed: list[Shape]) -> Iterator[tuple[float, Block]]:
        """The layouts that no pipeline in columns covers: FSDP's together, others one by one."""
        done, total = 0.0, sum(len(shape.rows) for shape in listed)
        for shape in listed:
            stages = estimated.outline(self.job, shape)
            choices = self.choices(stages.layers, shape.schedule)
            together = shape.pp == 1 and fsdp.applies(job)
            blocks = (
                fsdp_layouts.blocks(job, zero, found, stages, shape, choices, self.most)
                if together
                else estimated.blocks(job, zero, found, stages, shape, choices)
            )
            for block in blocks:
                done += len(shape.rows) / len(choices) if together else 1
                yield min(done / total, 1.0), block

    def weight(self, schedule: str | None) -> int:
        """Recomputations of a layout, where all of its layers lie in one chunk."""
        return len(self.choices(self.job.model.n_layers, schedule))

    def parts(self, keys: list[PartKey], found: Grid, job: Job) -> PartColumns:
        """The parts for some keys of a grid. `job`: with a ZeRO level of its layouts."""
        sets = dict.fromkeys(r.modules for r in self.choices(self.job.model.n_layers, None) if r.modules)
        sets |= dict.fromkeys([frozenset(("mtp",))] if self.job.model.mtp else [])
        split = any(name and described(name).split for name in schedules(self.plan, self.axes))
        return parts_of(by_sp(job), keys, list(sets), found.devices, found.gbs, split=split)


def part_keys(found: Grid, zeros: Container[int]) -> list[PartKey]:
    """What the parts of all rows depend on that can run under some ZeRO levels."""
    import numpy as np

    keys: dict[PartKey, None] = {}
    for choice, legal in found.legal.items():
        if choice.zero_level not in zeros:
            continue
        rows = [found.columns[name][legal] for name in PartKey._fields[1:]]
        _, first = np.unique(code(*rows), return_index=True)
        for key in np.stack(rows, axis=-1)[first].astype(int).tolist():
            keys[PartKey(choice.sp, *key)] = None
    return list(keys)
