"""Start and end of every action of a pipeline schedule.

Every time is a multiple of one power of two, so that their sums and differences are exact: a long step, whose middle repeats,
is walked through three repeats with the same result as the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from functools import cached_property, lru_cache, partial
from itertools import islice
from math import frexp, ldexp
from typing import NamedTuple

from steptime.base.records import record
from steptime.schedule.actions import Action
from steptime.schedule.chunk_seconds import SecondsPerChunk, boundaries, by_kind
from steptime.schedule.graph import Graph, graph
from steptime.schedule.orders import described, first_backward, shortened
from steptime.schedule.sharded import AroundActions, additions, sharded_run
from steptime.schedule.stage_exchange import Exchange, exchanged_run


class ActionSpan(NamedTuple):
    """An action and when it ran."""

    action: Action
    start_s: float
    end_s: float


class GraphRun(NamedTuple):
    """The actions of a graph in time."""

    graph: Graph
    costs: Sequence[float]
    sends: Sequence[float]
    free: list[float]
    """When each action lets its stage continue: at its end, or after its output is sent where sends block."""
    begun: list[float] | None = None
    """When each action starts, where its inputs do not tell: exchanges hold each other up."""

    def starts(self) -> list[float]:
        """When each action starts."""
        if self.begun is not None:
            return self.begun
        free, sends = self.free, self.sends
        return [
            ready if (ready := free[previous]) > (arrived := free[source] + sends[send]) else arrived
            for previous, source, _, send in self.graph.rows
        ]

    def start(self, number: int) -> float:
        """When one action starts."""
        if self.begun is not None:
            return self.begun[number]
        previous, source, _, send = self.graph.rows[number]
        ready, arrived = self.free[previous], self.free[source] + self.sends[send]
        return ready if ready > arrived else arrived  # noqa: FURB136  (max() takes twice as long)

    def end(self, number: int) -> float:
        """When one action ends."""
        return self.start(number) + self.costs[self.graph.rows[number][2]]


class Step(NamedTuple):
    """A schedule with its seconds."""

    schedule: str
    pp: int
    vpp: int
    microbatches: int
    group: int | None
    costs: tuple[float, ...]
    """[kind][stage][chunk], flattened."""
    sends: tuple[float, ...]
    """Indexed as `Input.send`."""
    blocking: bool
    around: AroundActions | None
    """FSDP's additions to some actions."""
    exchange: Exchange
    """How the stages exchange what they make."""
    grid: float
    """The grid that seconds are rounded to."""

    def run(self, microbatches: int, group: int | None) -> GraphRun:
        """When each action ends, for `microbatches` micro-batches: the main loop of every estimate."""
        found = graph(self.schedule, self.pp, self.vpp, microbatches, group)
        if self.exchange != "free":
            what, extra = (self.pp, self.vpp, microbatches, group), additions(found, self.around, self.grid)
            begun, done = exchanged_run(self.exchange, found, what, self.costs, self.sends, extra)
            return GraphRun(found, self.costs, [0.0] * len(self.sends), done, begun)
        busy_s: Sequence[float] = self.costs
        waited: Sequence[float] = self.sends
        if self.blocking:
            busy_s = [cost + waited[send] for cost, send in zip(busy_s, found.outgoing, strict=True)]
            waited = [0.0] * len(waited)
        if self.around is not None:
            return GraphRun(found, self.costs, waited, sharded_run(found, busy_s, waited, self.around, self.grid))
        free = [0.0]
        push = free.append
        for previous, source, cost, send in islice(found.rows, 1, None):
            ready = free[previous]
            arrived = free[source] + waited[send]
            push((ready if ready > arrived else arrived) + busy_s[cost])  # noqa: FURB136  (max() doubles the loop's time)
        return GraphRun(found, self.costs, waited, free)

    def walk(self) -> Walk:
        """The step in time, from a run of a shorter step where that represents it."""
        found, skipped = self._shortened() or (self.run(self.microbatches, self.group), 0.0)
        makespan = max([found.free[numbers[-1]] for numbers in found.graph.stages]) + skipped
        work = [sum(self.costs[at : at + self.vpp]) for at in range(0, 2 * self.pp * self.vpp, self.vpp)]
        # F and B of each stage: the halves of a backward, which follow, are those of B again
        busy = [self.microbatches * (ahead + back) for ahead, back in zip(work, work[self.pp :], strict=False)]
        return Walk(makespan, busy, [makespan - seconds for seconds in busy], found, skipped, self)

    def _shortened(self) -> tuple[GraphRun, float] | None:
        """The run of a shorter step, and how much later it ends with all repeats; None where it does not represent this step.

        Times are sums and maxima of what they wait for, so once a repeat starts everything by the same seconds later than the one
        before it, so does every repeat that follows, and all that comes after them.
        """
        if (
            self.exchange == "one_stream"
        ):  # the comparison below does not see how far the streams of exchanges have come
            return None
        short, period, fewer = shortened(self.schedule, self.pp, self.vpp, self.microbatches, self.group, REPEATS)
        little = 3 * short > 2 * self.microbatches  # to gain, and lost where the short step does not settle
        if period is None or little:
            return None
        found = self.run(short, period)
        length = described(self.schedule).passes * self.vpp * period
        seconds = set()
        for actions, numbers in zip(found.graph.orders, found.graph.stages, strict=True):
            first = first_backward(actions) - 1 + length
            before, after = numbers[first : first + length], numbers[first + length : first + 2 * length]
            seconds.update([found.free[b] - found.free[a] for a, b in zip(before, after, strict=True)])
            if len(seconds) > 1:
                return None
        return found, fewer * seconds.pop()


REPEATS = 3
"""Repeats of a long step that are walked: in the first the times may still settle, the other two show the period."""


@record
class StageTimes:
    """When every action of one stage starts and ends, in order."""

    actions: Sequence[Action]
    at_s: float
    stretch: float
    _run: GraphRun = field(repr=False)
    _starts: list[float] = field(repr=False)
    """Of every action of the run."""
    _numbers: list[int] = field(repr=False)
    """The run's number of each action."""

    @property
    def starts_s(self) -> list[float]:
        """When each action starts."""
        at_s, stretch, starts = self.at_s, self.stretch, self._starts
        return [at_s + stretch * starts[number] for number in self._numbers]

    def end_s(self, index: int) -> float:
        """When one action ends."""
        number, run = self._numbers[index], self._run
        return self.at_s + self.stretch * (self._starts[number] + run.costs[run.graph.rows[number][2]])

    @property
    def spans(self) -> list[ActionSpan]:
        """Each action with its start and end."""
        ends = map(self.end_s, range(len(self._numbers)))
        return list(map(ActionSpan, self.actions, self.starts_s, ends))


@record
class Walk:
    """A schedule in time: lists are per stage, [pp], or per chunk, [pp][vpp]."""

    makespan_s: float
    busy_s: list[float]
    """Seconds of forwards and backwards."""
    idle_s: list[float]
    """The rest of the makespan: the bubble, and delays from sends."""
    _run: GraphRun = field(repr=False)
    _skipped_s: float = field(repr=False)
    """How much later everything after the walked repeats happens in the whole step."""
    _step: Step = field(repr=False)

    @cached_property
    def first_forward_start(self) -> list[list[float]]:
        """When the first forward of each chunk starts."""
        return [[self._run.start(number) for number in chunks] for chunks in self._run.graph.first_forward]

    @cached_property
    def last_backward_start(self) -> list[list[float]]:
        """When the action that completes the gradients of each chunk starts."""
        return [[self._run.start(n) + self._skipped_s for n in chunks] for chunks in self._run.graph.last_backward]

    @cached_property
    def last_backward_end(self) -> list[list[float]]:
        """When the gradients of each chunk are complete."""
        return [[self._run.end(n) + self._skipped_s for n in chunks] for chunks in self._run.graph.last_backward]

    @property
    def idle_fraction(self) -> float:
        """Idle share of the makespan, mean over stages."""
        return sum(self.idle_s) / (len(self.idle_s) * self.makespan_s) if self.makespan_s else 0.0

    def times(self, at_s: float = 0.0, stretch: float = 1.0) -> list[StageTimes]:
        """Every action of each stage in time.

        `at_s`: when the pipeline starts; `stretch`: by how much everything in it takes longer.
        """
        whole = self._step.run(self._step.microbatches, self._step.group)
        starts, stages = whole.starts(), zip(whole.graph.orders, whole.graph.stages, strict=True)
        return [StageTimes(actions, at_s, stretch, whole, starts, numbers) for actions, numbers in stages]


def walk(
    schedule: str,
    pp: int,
    vpp: int,
    microbatches: int,
    forward_s: SecondsPerChunk,
    backward_s: SecondsPerChunk,
    send_s: Sequence[float],
    send_back_s: Sequence[float] | None = None,
    *,
    weight_s: SecondsPerChunk | None = None,
    blocking: bool = False,
    group: int | None = None,
    around: AroundActions | None = None,
    exchange: Exchange = "free",
) -> Walk:
    """Run a schedule: every action starts when its stage is free and its input has arrived.

    Args:
        schedule: a name in `SCHEDULES`.
        pp: pipeline stages.
        vpp: model chunks per stage.
        microbatches: micro-batches per step.
        forward_s: [pp][vpp] seconds of one forward.
        backward_s: [pp][vpp] seconds of one backward, recomputation included.
        send_s: [pp] exposed seconds from stage r to r + 1; the last, the wrap-around to stage 0, may be left out when vpp is 1.
        send_back_s: the same boundaries in the direction of the gradients; `send_s` when not said.
        weight_s: [pp][vpp] seconds of the weights' gradients where `backward_s` leaves them out; one piece takes both.
        blocking: a send also holds its sender. (Waiting for the receiver to post its receive is not modeled.)
        group: as in `order`.
        around: what FSDP adds to some actions; then only the makespan counts it all.
        exchange: whether exchanges hold each other up: interleaved 1F1B in time steps, or any but DualPipeV on one stream.

    Raises:
        ValueError: as `order`, or lists of the wrong length.
    """
    tables = by_kind(schedule, pp, vpp, forward_s, backward_s, weight_s)
    costs = tuple([seconds for kind in tables for stage in kind for seconds in stage])
    sends = (0.0, *boundaries(send_s, pp, vpp), *boundaries(send_back_s or send_s, pp, vpp))
    stages = [sum(tables[0][stage]) + sum(tables[1][stage]) for stage in range(pp)]
    one = sum(stages) + vpp * sum(sends)  # a micro-batch alone
    likely = 2.0 * (one + microbatches * (max(stages) + 2 * vpp * len(tables) * max(sends)))
    step = partial(Step, schedule, pp, vpp, microbatches, group, blocking=blocking, around=around, exchange=exchange)
    found = _walked(step, (costs, sends), min(likely, microbatches * one))
    return found if found.makespan_s <= likely else _walked(step, (costs, sends), microbatches * one)


def _walked(step: Callable[..., Step], seconds: Sequence[tuple[float, ...]], longest: float) -> Walk:
    """A step whose seconds are rounded to multiples of the power of two that keeps every sum up to `longest` exact."""
    grid = ldexp(1.0, frexp(longest)[1] - 1)  # numbers from here to twice this are as far apart as the multiples
    costs, sends = (tuple([(value + grid) - grid for value in of]) for of in seconds)
    exact = step(costs=costs, sends=sends, grid=grid)
    return exact.walk() if exact.around else _known(exact)


@lru_cache(maxsize=8)
def _known(step: Step) -> Walk:
    """A step's walk, made once: replicas and ZeRO levels, as weak scaling varies them, leave the pipeline as it is."""
    return step.walk()
