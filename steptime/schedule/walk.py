"""When every action of a pipeline schedule starts and ends.

Every time is a multiple of one power of two, so that their sums and differences are exact: a long step, whose middle repeats,
is walked through three repeats and comes out as if all of it had been.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from math import frexp, ldexp
from typing import NamedTuple, TypeAlias

from steptime.schedule.graph import Graph, graph
from steptime.schedule.orders import Action, described, first_backward, shortened

PerChunk: TypeAlias = Sequence[Sequence[float]]
"""Seconds of each chunk, [pp][vpp]."""


class Span(NamedTuple):
    """An action and when it ran."""

    action: Action
    start_s: float
    end_s: float


class Run(NamedTuple):
    """The actions of a graph in time."""

    graph: Graph
    costs: list[float]
    sends: list[float]
    free: list[float]
    """When each action lets its stage go on: at its end, or once its output is sent where sends block."""

    def start(self, number: int) -> float:
        """When an action starts."""
        previous, source, _, send = self.graph.rows[number]
        return max(self.free[previous], self.free[source] + self.sends[send])

    def end(self, number: int) -> float:
        """When an action ends."""
        return self.start(number) + self.costs[self.graph.rows[number][2]]


@dataclass(eq=False)
class Walk:
    """A schedule in time: lists are per stage, [pp], or per chunk, [pp][vpp]."""

    makespan_s: float
    busy_s: list[float]
    """Seconds of forwards and backwards."""
    idle_s: list[float]
    """The rest of the makespan: the bubble, and what sends delay."""
    _run: Run = field(repr=False)
    _skipped_s: float = field(repr=False)
    """How much later everything after the repeats of the run is in the whole step."""
    _whole: Callable[[], Run] = field(repr=False)
    """The run of all micro-batches."""

    @cached_property
    def stage_end(self) -> list[float]:
        """When the last action of each stage ends."""
        return [self._run.end(numbers[-1]) + self._skipped_s for numbers in self._run.graph.stages]

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

    def spans(self) -> list[list[Span]]:
        """Every action of each stage in order, with its start and end."""
        whole = self._whole()
        return [
            [Span(action, whole.start(n), whole.end(n)) for action, n in zip(actions, numbers, strict=True)]
            for actions, numbers in zip(whole.graph.orders, whole.graph.stages, strict=True)
        ]


def walk(
    schedule: str,
    pp: int,
    vpp: int,
    microbatches: int,
    forward_s: PerChunk,
    backward_s: PerChunk,
    send_s: Sequence[float],
    send_back_s: Sequence[float] | None = None,
    *,
    weight_s: PerChunk | None = None,
    blocking: bool = False,
    group: int | None = None,
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
        weight_s: [pp][vpp] seconds of the weights' gradients where `backward_s` leaves them out, as a split schedule needs it.
        blocking: a send also holds its sender. (Waiting for the receiver to post its receive is not modelled.)
        group: as in `order`.

    Raises:
        ValueError: as `order`, or lists of the wrong length.
    """
    tables = _tables(schedule, forward_s, backward_s, weight_s)
    costs = [seconds for kind in tables for stage in kind for seconds in stage]
    if any(len(kind) != pp or any(len(stage) != vpp for stage in kind) for kind in tables):
        raise ValueError(f"forward_s and backward_s must be [{pp}][{vpp}]")
    sends = [0.0, *_boundaries(send_s, pp, vpp), *_boundaries(send_s if send_back_s is None else send_back_s, pp, vpp)]
    longest = microbatches * (sum(costs) + vpp * sum(sends))
    costs, sends = _exact(costs, longest), _exact(sends, longest)

    def run(count: int, group: int | None) -> Run:
        return _run(graph(schedule, pp, vpp, count, group), costs, sends, blocking=blocking)

    short = shortened(schedule, pp, vpp, microbatches, group, REPEATS)
    found, skipped = _repeating(run, *short, microbatches, len(tables) * vpp) or (run(microbatches, group), 0.0)
    makespan = max([found.free[numbers[-1]] for numbers in found.graph.stages]) + skipped
    stages = [[costs[at : at + vpp] for at in range(stage * vpp, len(costs), pp * vpp)] for stage in range(pp)]
    busy = [microbatches * sum(map(sum, kinds)) for kinds in stages]
    idle = [makespan - seconds for seconds in busy]
    return Walk(makespan, busy, idle, found, skipped, partial(run, microbatches, group))


REPEATS = 3
"""Repeats of a long step that are walked: the first may still settle, the other two tell."""


def _tables(
    schedule: str, forward_s: PerChunk, backward_s: PerChunk, weight_s: PerChunk | None
) -> tuple[PerChunk, ...]:
    """Seconds by kind of action."""
    if described(schedule).split:
        if weight_s is None:
            raise ValueError(f"{schedule} runs the weights' gradients apart: it needs weight_s")
        return forward_s, backward_s, weight_s
    if weight_s is None:
        return forward_s, backward_s
    both = zip(backward_s, weight_s, strict=True)
    return forward_s, [[b + w for b, w in zip(*rows, strict=True)] for rows in both]


def _exact(seconds: list[float], longest: float) -> list[float]:
    """Rounded to multiples of the power of two that keeps every sum up to `longest` exact."""
    grid = ldexp(1.0, frexp(longest)[1] - 1)  # numbers from here to twice this are as far apart as the multiples
    return [(value + grid) - grid for value in seconds]


def _repeating(
    run: Callable[[int, int | None], Run], short: int, group: int | None, fewer: int, microbatches: int, each: int
) -> tuple[Run, float] | None:
    """The run of a short step that stands for the whole one, and how much later that ends; None where it does not.

    A stage runs `each` actions of a micro-batch.

    Times are sums and maxima of what they wait for, so once a repeat starts everything by the same seconds later than the one
    before it, so does every repeat that follows, and all that comes after them.
    """
    if not fewer or 3 * short > 2 * microbatches:  # little to gain, and lost where the short step never settles
        return None
    found = run(short, group)
    length = each * (microbatches - short) // fewer
    seconds = set()
    for actions, numbers in zip(found.graph.orders, found.graph.stages, strict=True):
        first = first_backward(actions) - 1 + length
        before, after = numbers[first : first + length], numbers[first + length : first + 2 * length]
        seconds.update([found.free[b] - found.free[a] for a, b in zip(before, after, strict=True)])
        if len(seconds) > 1:
            return None
    return found, fewer * seconds.pop()


def _run(found: Graph, costs: list[float], sends: list[float], *, blocking: bool) -> Run:
    """When each action is over: the one loop that is run for every estimate."""
    held, waited = costs, sends
    if blocking:
        held = [cost + sends[send] for cost, send in zip(costs, found.outgoing, strict=True)]
        waited = [0.0] * len(sends)
    free = [0.0]
    push = free.append
    for previous, source, cost, send in islice(found.rows, 1, None):
        ready = free[previous]
        arrived = free[source] + waited[send]
        push((ready if ready > arrived else arrived) + held[cost])  # noqa: FURB136  (max() doubles the loop's time)
    return Run(found, costs, waited, free)


def _boundaries(send_s: Sequence[float], pp: int, vpp: int) -> list[float]:
    """One send time for each of the pp boundaries."""
    if len(send_s) == pp:
        return list(send_s)
    if len(send_s) == pp - 1 and vpp == 1:
        return [*send_s, 0.0]
    raise ValueError(f"send times must be one for each of {pp} boundaries, not {len(send_s)}")
