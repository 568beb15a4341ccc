"""Interleaved 1F1B in time steps, as torch ran it until 2.9.

Every stage has at most one action in a time step. After it the stage sends the output, receives what its neighbors send in the
same step, and waits for both before the next step (torch 2.6 distributed/pipelining/schedules.py,
PipelineScheduleMulti._step_microbatches): a stage that computes for longer holds up those that it exchanges with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from steptime.base.num import Num, maximum
from steptime.schedule.graph import Graph
from steptime.schedule.orders import default_group


@lru_cache(maxsize=64)
def step_numbers(pp: int, vpp: int, microbatches: int, group: int | None = None) -> tuple[tuple[int, ...], ...]:
    """The time step of each action of every stage, in the order they run (schedules.py, _get_1f1b_rank_ops).

    A stage starts one step after the one before it. Its first pair of a forward and a backward starts once the last chunk's first
    backward could have come back; of the cool-down every other step is empty.

    >>> step_numbers(2, 2, 2)[1]
    (1, 2, 4, 5, 6, 7, 9, 11)
    """
    group = default_group(pp, microbatches) if group is None else group
    count = vpp * microbatches
    found = []
    for stage in range(pp):
        behind = pp - 1 - stage
        warmup = min((vpp - 1) * group + 2 * behind, count)
        pairs = max(vpp * pp + 2 * behind, warmup + stage)
        steady = [pairs + at for at in range(2 * (count - warmup))]
        cooldown = [pairs + 2 * at + 1 for at in range(count - warmup, count)]
        found.append((*range(stage, stage + warmup), *steady, *cooldown))
    return tuple(found)


def stepped_run(
    found: Graph,
    numbers_of_steps: Sequence[Sequence[int]],
    costs: Sequence[Num],
    sends: Sequence[Num],
    added: Mapping[int, Num],
) -> tuple[list[Num], list[Num]]:
    """When each action of a graph starts, and when its stage has exchanged what it made; seconds may be columns.

    Args:
        found: the actions, numbered.
        numbers_of_steps: as `step_numbers`.
        costs: seconds by cost index.
        sends: seconds by send index.
        added: seconds that are added to an action, by its number.
    """
    stage_of, steps = _places(found, numbers_of_steps)
    to = {source: stage_of[at] for at, (_, source, _, _) in enumerate(found.rows) if source}
    begun, free = list[Num]([0.0] * len(found.rows)), list[Num]([0.0] * len(found.rows))
    clock: list[Num] = [0.0] * len(found.orders)
    for running in steps:
        ready, meets = list(clock), [dict[int, Num]() for _ in clock]
        for number in running:
            stage, cost = stage_of[number], found.rows[number][2]
            begun[number] = clock[stage]
            ready[stage] = ready[stage] + (costs[cost] + added.get(number, 0.0))
            other = to.get(number, stage)
            if other != stage:
                seconds = sends[found.outgoing[cost]]
                meets[stage][other] = maximum(meets[stage].get(other, 0.0), seconds)
                meets[other][stage] = maximum(meets[other].get(stage, 0.0), seconds)
        clock = list(ready)
        for stage, others in enumerate(meets):
            for other, seconds in others.items():
                clock[stage] = maximum(clock[stage], maximum(ready[stage], ready[other]) + seconds)
        for number in running:
            free[number] = clock[stage_of[number]]
    return begun, free


def _places(found: Graph, numbers_of_steps: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """The stage of each action, and the actions of each time step."""
    stage_of = [0] * len(found.rows)
    steps: list[list[int]] = [[] for _ in range(1 + max(each[-1] for each in numbers_of_steps))]
    for stage, (numbers, at) in enumerate(zip(found.stages, numbers_of_steps, strict=True)):
        for number, step in zip(numbers, at, strict=True):
            stage_of[number] = stage
            steps[step].append(number)
    return stage_of, steps
