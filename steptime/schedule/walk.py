"""When every action of a pipeline schedule starts and ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import islice
from typing import NamedTuple, TypeAlias

from steptime.schedule.orders import KINDS, Action, Orders, Place, order, placement

PerChunk: TypeAlias = Sequence[Sequence[float]]
"""Seconds of each chunk, [pp][vpp]."""


class Span(NamedTuple):
    """An action and when it ran."""

    action: Action
    start_s: float
    end_s: float


class Input(NamedTuple):
    """Where the actions of one kind and chunk of a stage get their input, and what they cost."""

    numbers: list[int]
    """By code, the numbers given so far on the stage that makes the input; MISSING until given."""
    shift: int
    """From an action's code to the code of the one that makes its input."""
    cost: int
    """Index into the costs [kind][stage][chunk], flattened."""
    send: int
    """Index into the send times: 0 for none, then the forward boundaries, then the backward ones."""


class Plan(NamedTuple):
    """A schedule's actions, numbered from 1 so that every input precedes its use; 0 is "nothing before"."""

    rows: list[tuple[int, int, int, int]]
    """Of each action: the one before it on its stage, the one that makes its input, and `Input`'s cost and send."""
    outgoing: list[int]
    """By cost index, the send index of what that action makes."""
    stages: list[list[int]]
    """The actions of each stage in order."""
    first_forward: list[list[int]]
    """[pp][vpp]"""
    last_backward: list[list[int]]
    """[pp][vpp]"""


MISSING = -1


@lru_cache(maxsize=64)
def plan(schedule: str, pp: int, vpp: int, microbatches: int, group: int | None = None) -> Plan:
    """Sort a schedule's actions topologically, once for all its walks.

    Raises:
        ValueError: as `order`; or the order deadlocks.
    """
    orders = order(schedule, pp, vpp, microbatches, group)
    # Within a stage an action's code is (kind * vpp + chunk) * microbatches + microbatch: lists instead of dictionaries.
    keys = [Action(kind, m, chunk) for kind in KINDS for chunk in range(vpp) for m in range(microbatches)]
    code_of = {key: code for code, key in enumerate(keys)}
    codes = [list(map(code_of.__getitem__, actions)) for actions in orders]
    numbers = [[MISSING] * len(keys) for _ in range(pp)]
    outgoing = [0] * (len(KINDS) * pp * vpp)
    inputs = [_inputs(schedule, vpp, stage, numbers, outgoing) for stage in range(pp)]
    stages: list[list[int]] = [[] for _ in range(pp)]
    rows = [(0, 0, 0, 0)]
    sweep = [*range(pp), *range(pp - 2, 0, -1)]  # down with the forwards, up with the backwards
    while len(rows) <= pp * len(keys):
        before = len(rows)
        for stage in sweep:
            _advance(codes[stage], inputs[stage], numbers[stage], stages[stage], rows)
        if len(rows) == before:
            raise ValueError(f"{schedule} deadlocks: pp={pp}, vpp={vpp}, microbatches={microbatches}, group={group}")
    blocks = [[n[at : at + microbatches] for at in range(0, len(keys), microbatches)] for n in numbers]
    first = [[min(block) for block in stage[:vpp]] for stage in blocks]
    last = [[max(block) for block in stage[vpp : 2 * vpp]] for stage in blocks]
    return Plan(rows, outgoing, stages, first, last)


def _inputs(schedule: str, vpp: int, stage: int, numbers: list[list[int]], outgoing: list[int]) -> list[Input]:
    """`Input` by code of a stage's actions; fills `outgoing` of what they wait for."""
    pp = len(numbers)
    microbatches = len(numbers[stage]) // (len(KINDS) * vpp)
    places = placement(schedule, pp, vpp)
    depth_of = {place: depth for depth, place in enumerate(places)}
    inputs = []
    for k, kind in enumerate(KINDS):
        for chunk in range(vpp):
            cost = (k * pp + stage) * vpp + chunk
            depth = depth_of[Place(stage, chunk)] + (-1 if kind == "F" else 1)
            if not 0 <= depth < len(places):  # the stage's own order implies it
                here = Input([0] * len(numbers[stage]), 0, cost, 0)
            else:
                source = places[depth]
                first, second = (source.stage, stage) if kind == "F" else (stage, source.stage)
                boundary = first if second == (first + 1) % pp else second
                send = 0 if source.stage == stage else 1 + boundary + pp * k
                here = Input(numbers[source.stage], (source.chunk - chunk) * microbatches, cost, send)
                outgoing[(k * pp + source.stage) * vpp + source.chunk] = send
            inputs += [here] * microbatches
    return inputs


def _advance(
    codes: list[int], inputs: list[Input], numbers: list[int], done: list[int], rows: list[tuple[int, int, int, int]]
) -> None:
    """Number a stage's next actions as far as their inputs have numbers."""
    previous = done[-1] if done else 0
    for at in range(len(done), len(codes)):
        code = codes[at]
        upstream, shift, cost, send = inputs[code]
        source = upstream[code + shift]
        if source == MISSING:
            return
        number = len(rows)
        rows.append((previous, source, cost, send))
        done.append(number)
        numbers[code] = previous = number


@dataclass(eq=False)
class Walk:
    """A schedule in time: lists are per stage, [pp], or per chunk, [pp][vpp]."""

    makespan_s: float
    busy_s: list[float]
    """Seconds of forwards and backwards."""
    idle_s: list[float]
    """The rest of the makespan: the bubble, and what sends delay."""
    _plan: Plan = field(repr=False)
    _orders: Orders = field(repr=False)
    _costs: list[float] = field(repr=False)
    _sends: list[float] = field(repr=False)
    _free: list[float] = field(repr=False)
    """When each action lets its stage go on: at its end, or once its output is sent where sends block."""

    def start(self, number: int) -> float:
        """When an action of the plan starts."""
        previous, source, _, send = self._plan.rows[number]
        return max(self._free[previous], self._free[source] + self._sends[send])

    def end(self, number: int) -> float:
        """When an action of the plan ends."""
        return self.start(number) + self._costs[self._plan.rows[number][2]]

    @cached_property
    def stage_end(self) -> list[float]:
        """When the last action of each stage ends."""
        return [self.end(numbers[-1]) for numbers in self._plan.stages]

    @cached_property
    def first_forward_start(self) -> list[list[float]]:
        """When the first forward of each chunk starts."""
        return [[self.start(number) for number in chunks] for chunks in self._plan.first_forward]

    @cached_property
    def last_backward_start(self) -> list[list[float]]:
        """When the last backward of each chunk starts."""
        return [[self.start(number) for number in chunks] for chunks in self._plan.last_backward]

    @cached_property
    def last_backward_end(self) -> list[list[float]]:
        """When the gradients of each chunk are complete."""
        return [[self.end(number) for number in chunks] for chunks in self._plan.last_backward]

    @property
    def idle_fraction(self) -> float:
        """Idle share of the makespan, mean over stages."""
        return sum(self.idle_s) / (len(self.idle_s) * self.makespan_s) if self.makespan_s else 0.0

    def spans(self) -> list[list[Span]]:
        """Every action of each stage in order, with its start and end."""
        return [
            [
                Span(action, self.start(number), self.end(number))
                for action, number in zip(actions, numbers, strict=True)
            ]
            for actions, numbers in zip(self._orders, self._plan.stages, strict=True)
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
        blocking: a send also holds its sender. (Waiting for the receiver to post its receive is not modelled.)
        group: as in `order`.

    Raises:
        ValueError: as `order`, or lists of the wrong length.
    """
    table = plan(schedule, pp, vpp, microbatches, group)
    costs = [seconds for kind in (forward_s, backward_s) for stage in kind for seconds in stage]
    if len(costs) != len(table.outgoing):
        raise ValueError(f"forward_s and backward_s must be [{pp}][{vpp}]")
    sends = [0.0, *_boundaries(send_s, pp, vpp), *_boundaries(send_s if send_back_s is None else send_back_s, pp, vpp)]
    held = costs
    if blocking:
        held = [cost + sends[send] for cost, send in zip(costs, table.outgoing, strict=True)]
        sends = [0.0] * len(sends)
    free = _run(table.rows, held, sends)
    makespan = max([free[numbers[-1]] for numbers in table.stages])
    busy = [microbatches * (sum(f) + sum(b)) for f, b in zip(forward_s, backward_s, strict=True)]
    idle = [max(0.0, makespan - seconds) for seconds in busy]
    orders = order(schedule, pp, vpp, microbatches, group)
    return Walk(makespan, busy, idle, table, orders, costs, sends, free)


def _run(rows: list[tuple[int, int, int, int]], costs: list[float], sends: list[float]) -> list[float]:
    """When each planned action is over: the one loop that is run for every estimate."""
    over = [0.0]
    push = over.append
    for previous, source, cost, send in islice(rows, 1, None):
        ready = over[previous]
        arrived = over[source] + sends[send]
        push((ready if ready > arrived else arrived) + costs[cost])  # noqa: FURB136  (max() doubles the loop's time)
    return over


def _boundaries(send_s: Sequence[float], pp: int, vpp: int) -> list[float]:
    """One send time for each of the pp boundaries."""
    if len(send_s) == pp:
        return list(send_s)
    if len(send_s) == pp - 1 and vpp == 1:
        return [*send_s, 0.0]
    raise ValueError(f"send times must be one for each of {pp} boundaries, not {len(send_s)}")
