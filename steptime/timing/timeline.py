"""One step in time: the pipeline's actions, the sends between them, and the work before and after.

The order is that of the step's parts: parameters are gathered, the pipeline runs, gradients are reduced, the
optimizer updates, replicas wait for the slowest. FSDP's exposed communication is spread evenly over the actions. Of a pipeline
that runs several times a step, the last pass is shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from steptime.job.assembly import Chunk
from steptime.schedule import Action, ActionSpan, Place, StageTimes, placement
from steptime.schedule.orders import described
from steptime.timing.data_parallel import Calls, DataParallel, Reduction, gather_ends, reduction_ends, worst_stage
from steptime.timing.op_times import Direction
from steptime.timing.step_time import StepTime, sends


class Slice(NamedTuple):
    """Something that runs on one track of a stage."""

    track: str
    """compute, or the axis of a communication: tp, cp, dp, pp ..."""
    name: str
    kind: str
    """The part of the step that it belongs to, as in `Time.parts_s`."""
    start_s: float
    end_s: float


class Sent(NamedTuple):
    """One tensor from one stage to another; the times are those of the receiver's wait."""

    stage: int
    action: Action
    to_stage: int
    to_action: Action
    start_s: float
    end_s: float
    used_s: float
    """When the receiver's action starts."""


class Traffic(NamedTuple):
    """The communication of one axis within one action."""

    axis: str
    calls: float
    busy_s: float
    exposed_s: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """One step of one replica, by stage; seconds count from the step's start."""

    timing: StepTime

    @property
    def step_s(self) -> float:
        """The step."""
        return self.timing.step_s

    @property
    def start_s(self) -> float:
        """When the pipeline starts: after the exposed part of the parameters' gather; of several passes, the last."""
        return (self.timing.dp.gather_exposed_s if self.timing.dp else 0.0) + (self.timing.passes - 1) * self.pass_s

    @property
    def pass_s(self) -> float:
        """One pass of the pipeline, FSDP's exposed communication spread over all of them."""
        return self.timing.walk.makespan_s + self.timing.fsdp_exposed_s / self.timing.passes

    @property
    def stretch(self) -> float:
        """By how much FSDP's exposed communication lengthens every action."""
        span = self.timing.walk.makespan_s
        return self.pass_s / span

    @property
    def end_s(self) -> float:
        """When the pipeline ends."""
        return self.start_s + self.pass_s

    @cached_property
    def times(self) -> list[StageTimes]:
        """Start and end of every action of every stage."""
        return self.timing.walk.times(self.start_s, self.stretch)

    @cached_property
    def actions(self) -> list[list[ActionSpan]]:
        """Every action of every stage in order."""
        return [times.spans for times in self.times]

    def chunk(self, stage: int, virtual: int) -> Chunk:
        """The model chunk that an action of a stage runs."""
        return self.timing.assembly.stages[stage][virtual]

    def traffic(self, stage: int, virtual: int, direction: Direction) -> list[Traffic]:
        """Communication within one action, by axis: the layers' own, and FSDP's."""
        parts, chunk = self.timing.parts, self.chunk(stage, virtual)
        works = [(n, parts.of[p].forward if direction == "F" else parts.of[p].backward) for n, p in parts.works(chunk)]
        works += [(n, work) for n, _, work in parts.replays(chunk)] if direction == "B" else []
        sums: dict[str, Traffic] = {}
        for n, work in works:
            for call in work.calls:
                of = sums.get(call.axis, Traffic(call.axis, 0.0, 0.0, 0.0))
                calls = n * float(call.count)
                busy_s, exposed_s = (
                    of.busy_s + calls * float(call.cost.time_s),
                    of.exposed_s + n * float(call.exposed_s),
                )
                sums[call.axis] = Traffic(call.axis, of.calls + calls, busy_s, exposed_s)
        return [*sums.values(), *self.sharded(direction)]

    def sharded(self, direction: Direction) -> Iterator[Traffic]:
        """FSDP's groups in one direction of a micro-batch, equal parts per chunk; the exposed part lengthens the actions."""
        if self.timing.fsdp:
            of, job = self.timing.fsdp, self.timing.job
            done = (of.forward if direction == "F" else of.backward).over(job.parallelism.vpp)
            exposed = max(0.0, self.timing.fsdp_exposed_s / (job.microbatches * job.parallelism.vpp))
            shown = (
                min(done.network_s, exposed * job.parallelism.vpp * done.network_s / of.network_s)
                if of.network_s
                else 0.0
            )
            yield Traffic("dp", done.calls, done.network_s, shown)

    def sent(self) -> Iterator[Sent]:
        """Every send of the pipeline, sender by sender."""
        job = self.timing.job
        p = job.parallelism
        if p.pp == 1:
            return
        places = placement(job.schedule, p.pp, p.vpp)
        depth_of = {place: depth for depth, place in enumerate(places)}
        delays = [self.stretch * float(delay) for delay in sends(job, self.timing.boundary_costs)]
        starts = [
            {_arrival(action): start for action, start, _ in stage if action.kind != "W"} for stage in self.actions
        ]
        pairs = described(job.schedule).pairs
        for stage, spans in enumerate(self.actions):
            for (action, _, own_end_s), (following, _, next_end_s) in zip(spans, [*spans[1:], spans[-1]], strict=True):
                paired = pairs and (action.kind, following.kind) == ("F", "B")
                end_s = next_end_s if paired else own_end_s
                depth = depth_of[Place(stage, action.chunk)] + (1 if action.kind == "F" else -1)
                if action.kind == "W" or not 0 <= depth < len(places) or places[depth].stage == stage:
                    continue
                to = places[depth]
                delay = delays[stage if to.stage == (stage + 1) % p.pp else to.stage]  # as long either way
                received = action._replace(chunk=to.chunk)
                yield Sent(
                    stage, action, to.stage, received, end_s, end_s + delay, starts[to.stage][_arrival(received)]
                )

    def around(self, stage: int) -> list[Slice]:
        """What a stage does before, during and after the pipeline."""
        timing = self.timing
        found = list(self._data_parallel(timing.dp, stage)) if timing.dp else []
        at = self.end_s + (timing.dp.reduce_exposed_s if timing.dp else 0.0)
        ends = stage in {0, timing.job.parallelism.pp - 1}
        after = (
            ("tp", "all-reduce of gradients left partial by sp", "tp_comm", timing.norm_reduce.time_s, True),
            ("embedding", "all-reduce of the tied embedding", "embedding_comm", timing.embedding_reduce.time_s, ends),
            ("compute", "optimizer", "optimizer", timing.optimizer_s - timing.optimizer.around_s, True),
            ("compute", "host, outside the micro-batches", "launch", timing.optimizer.around_s, True),
            ("compute", "wait for the slowest replica", "stragglers", timing.straggler_s, True),
        )
        for track, name, kind, seconds, mine in after:
            if seconds and mine:
                found.append(Slice(track, name, kind, at, at + seconds))
            at += seconds
        return found

    def _data_parallel(self, dp: DataParallel, stage: int) -> Iterator[Slice]:
        """Gathers and reductions: all of them at their places in the walk if they overlap; else the exposed part."""
        walk, software = self.timing.walk, self.timing.job.software
        overlaps, after_s = software.overlap.dp is True, self.end_s + dp.reduce_exposed_s
        if dp.gathers and overlaps and software.comm.sharded_gather != "broadcast":
            ends = gather_ends(dp.gathers[stage], stage, walk, self.timing.chunks)
            yield from (_slice(call, end_s, call.cost.time_s) for end_s, _, call in ends)
        elif dp.gathers:
            yield from _in_a_row(dp.gathers, stage, dp.gather_exposed_s, self.start_s)
        if overlaps and all(call.times == 1 for chunk in dp.reductions[stage] for call in chunk):
            done = reduction_ends(dp.reductions[stage], stage, walk)
            yield from (_slice(call, self.start_s + end_s, call.cost.time_s) for end_s, call in done)
        else:
            yield from _in_a_row(dp.reductions, stage, dp.reduce_exposed_s, after_s)


def _arrival(action: Action) -> tuple[bool, int, int]:
    """The action that an action waits for: the previous stage's forward, or the next stage's backward of either kind."""
    return action.kind == "F", action.microbatch, action.chunk


def _slice(call: Reduction, end_s: float, seconds: float, times: int = 1) -> Slice:
    name = f"{call.kind} of {call.name}".replace("_", "-")
    return Slice("dp", name if times == 1 else f"{times} x {name}", "dp_comm", end_s - seconds, end_s)


def _in_a_row(calls: Calls, stage: int, exposed_s: float, end_s: float) -> Iterator[Slice]:
    """A stage's collectives one after the other, the last ending at `end_s`; of all of their seconds the exposed share."""
    worst_s = worst_stage(calls)
    share = exposed_s / worst_s if worst_s else 0.0
    mine = [(call, share * call.cost.time_s * call.times) for chunk in calls[stage] for call in chunk]
    at = end_s - sum(seconds for _, seconds in mine)
    for call, seconds in mine:
        at += seconds
        yield _slice(call, at, seconds, call.times)
