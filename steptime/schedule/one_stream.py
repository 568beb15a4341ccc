"""Schedules of several chunks whose stages send and receive on one stream each, as torch 2.10 and 2.11 ran them.

Every send and every receive is a batch of its own, and batches of a device share one stream (torch/distributed/pipelining/
schedules.py, _batch_p2p until pull request 175712 of 2026-02-25: "Coalescing serializes ops on a single CUDA stream, which causes
head-of-line blocking"). On both sides each exchange waits for the exchanges listed before it. A receive is listed as soon as the
order of the sending stage has come to its send (_add_send_recv), often long before that has run, and what the receiving stage
sends later waits for it: "rank 0 cannot execute all of its sends for stage 0, unless it has received the data for stage 8"
(pull request 165664, eight stages of two chunks).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from steptime.base.num import Num, maximum
from steptime.schedule.actions import Action
from steptime.schedule.graph import Graph
from steptime.schedule.sharded import Around, sharded_steps


def listed(found: Graph) -> list[int]:
    """A graph's actions in the order in which torch lists them with their sends and receives (schedules.py, _add_send_recv).

    Round by round every stage, if the input of its next action has been sent, lists that action and its send; the receiving
    stage lists the receive at the same moment.
    """
    turns = [_turns(actions, numbers) for actions, numbers in zip(found.orders, found.stages, strict=True)]
    next_, sent, order = [0] * len(turns), {0}, list[int]()
    while any(at < len(mine) for at, mine in zip(next_, turns, strict=True)):
        for stage, mine in enumerate(turns):
            if next_[stage] == len(mine):
                continue
            number = mine[next_[stage]]
            if number is not None and found.rows[number][1] not in sent:
                continue
            next_[stage] += 1
            if number is not None:
                sent.add(number)
                order.append(number)
    return order


def _turns(actions: tuple[Action, ...], numbers: list[int]) -> list[int | None]:
    """What a stage lists, an item a round: its actions, and None where it gathers or frees a chunk or reduces its gradients.

    schedules.py, _add_unshard_reshard and _add_reduce_grad, which are there without FSDP too.
    """
    turns, gathered = list[int | None](), frozenset[int]()
    for step, number in zip(sharded_steps(actions, ahead=True, reshard=False), numbers, strict=True):
        turns += [None] * (len(gathered - step.gathered_layers) + len(step.fetched))
        turns += [number, None] if step.reduces else [number]
        gathered = step.gathered_layers
    return turns


def one_stream_run(
    found: Graph, costs: Sequence[Num], sends: Sequence[Num], extra: Mapping[int, Around]
) -> tuple[list[Num], list[Num]]:
    """When each action of a graph starts, and when its stage continues; seconds may be columns.

    An exchange starts once both stages have run what they list before it (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp,
    pointToPoint: syncStream) and both streams are free.

    Args:
        found: the actions, numbered.
        costs: seconds by cost index.
        sends: seconds by send index.
        extra: FSDP's additions, by the number of the action.
    """
    place = found.places()
    to = {source: place[at][0] for at, (_, source, _, _) in enumerate(found.rows) if source}
    begun, free = list[Num]([0.0] * len(found.rows)), list[Num]([0.0] * len(found.rows))
    clock, stream, network = (list[Num]([0.0] * len(found.stages)) for _ in range(3))
    come, gathered = dict[int, Num](), dict[tuple[int, int], Num]()
    nothing = Around(0.0, (), 0.0)
    for number in listed(found):
        (stage, _), (_, source, cost, _), own = place[number], found.rows[number], extra.get(number, nothing)
        for chunk, seconds in own.fetched:
            gathered[stage, chunk] = network[stage] = maximum(network[stage], clock[stage]) + seconds
        start = maximum(clock[stage], come[source]) if source in come else clock[stage]
        begun[number] = maximum(start, gathered[place[number]]) if place[number] in gathered else start
        clock[stage] = begun[number] + (costs[cost] + own.added_s)
        other = to.get(number, stage)
        if other != stage:
            met = maximum(maximum(clock[stage], clock[other]), maximum(stream[stage], stream[other]))
            come[number] = stream[stage] = stream[other] = met + sends[found.outgoing[cost]]
        free[number] = clock[stage] = clock[stage] + own.after_s
    return begun, free
