"""A schedule's actions in levels: those of one level wait only for earlier ones, so that columns compute them together."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from steptime.schedule.graph import OWN, Input, inputs_of, partners_of
from steptime.schedule.orders import described, first_backward, order, placement


class Levels(NamedTuple):
    """A schedule's actions, numbered from 1 level by level; 0 means no predecessor. Arrays have one entry per action."""

    ends: list[int]
    """The number after the last action of each level."""
    previous: Any
    """The action before it on its stage."""
    source: Any
    """The action that makes its input."""
    cost: Any
    send: Any
    """Indices of its seconds and of its input's send, as in `schedule.graph.Input`."""
    outgoing: list[int]
    """As `schedule.graph.Graph.outgoing`."""
    stages: list[Any]
    """The numbers of each stage's actions, in order."""
    first_backward: list[int]
    """Of each stage, the place of its first backward."""


@lru_cache(maxsize=64)
def levels(schedule: str, pp: int, vpp: int, microbatches: int, group: int | None = None) -> Levels:
    """Sort a schedule's actions into levels: each stage runs its next action as soon as the input is made.

    Raises:
        ValueError: as `order`; or the order deadlocks.
    """
    import numpy as np

    orders, found = order(schedule, pp, vpp, microbatches, group), described(schedule)
    inputs, outgoing = inputs_of(found.kinds, placement(schedule, pp, vpp), pp, microbatches)
    block_of = {(kind, chunk): k * vpp + chunk for k, kind in enumerate(found.kinds) for chunk in range(vpp)}
    # A slot per action, stage by stage, one more after each stage that never runs; slot 0 has run.
    first = np.cumsum([1, *(len(actions) + 1 for actions in orders)])
    never = int(first[-1])
    made = np.zeros((pp, len(block_of) * microbatches), dtype=int)
    coded = []
    for stage, actions in enumerate(orders):
        blocks = np.array([block_of[action.kind, action.chunk] for action in actions])
        codes = blocks * microbatches + np.array([action.microbatch for action in actions])
        slots = first[stage] + np.arange(len(actions))
        made[stage, codes + np.array([one.known_as for one in inputs[stage]])[blocks]] = slots
        if found.pairs:
            partners = partners_of(codes.tolist(), actions)
            later = {code: slot for code, slot in zip(codes.tolist(), slots.tolist(), strict=True) if code in partners}
            for code, partner in partners.items():
                made[stage, code] = max(later[code], later[partner])
        coded.append((blocks, codes))
    source, cost, send = _inputs(inputs, coded, made, first)
    sorted_slots, ends = _sorted(source, first[:-1], never)
    if len(sorted_slots) != sum(map(len, orders)):
        raise ValueError(f"{schedule} deadlocks: pp={pp}, vpp={vpp}, microbatches={microbatches}, group={group}")
    number = np.zeros(never + 1, dtype=int)
    number[sorted_slots] = np.arange(1, len(sorted_slots) + 1)
    before = sorted_slots - 1
    before[np.isin(sorted_slots, first[:-1])] = 0
    return Levels(
        ends,
        number[before],
        number[source[sorted_slots]],
        cost[sorted_slots],
        send[sorted_slots],
        outgoing,
        [number[first[stage] : first[stage] + len(actions)] for stage, actions in enumerate(orders)],
        [first_backward(actions) for actions in orders],
    )


def _inputs(inputs: list[list[Input]], coded: list[tuple[Any, Any]], made: Any, first: Any) -> tuple[Any, Any, Any]:
    """By slot: the slot that makes the input, and the indices of cost and send.

    Args:
        inputs: of each stage, by block (kind and chunk).
        coded: of each stage, block and code of its actions, in order.
        made: by stage and code, the slot whose end others wait for.
        first: the first slot of each stage, and the slot that never runs.
    """
    import numpy as np

    never = int(first[-1])
    source, cost, send = np.full(never + 1, never), np.zeros(never, dtype=int), np.zeros(never, dtype=int)
    for stage, (blocks, codes) in enumerate(coded):
        each = np.array(inputs[stage])[blocks]
        mine, own = slice(first[stage], first[stage] + len(blocks)), each[:, 0] == OWN
        source[mine] = np.where(own, 0, made[each[:, 0], np.where(own, 0, codes + each[:, 1])])
        cost[mine], send[mine] = each[:, 2], each[:, 3]
    return source, cost, send


def _sorted(source: Any, first: Any, never: int) -> tuple[Any, list[int]]:
    """Slots level by level, as far as they can run, and the number after the last of each level."""
    import numpy as np

    has_run = np.zeros(never + 1, dtype=bool)
    has_run[0] = True
    now, total = first.copy(), 1
    found: list[Any] = []
    ends: list[int] = []
    while True:
        runs = has_run[source[now]]
        slots = now[runs]
        if not slots.size:
            return (np.concatenate(found) if found else slots), ends
        has_run[slots] = True
        found.append(slots)
        total += slots.size
        ends.append(total)
        now += runs


def walked(found: Levels, held: list[Any], waited: list[Any] | None, free: Any) -> None:
    """Fill in when each action ends, [action, layout].

    Args:
        found: the schedule.
        held: seconds of each cost index, by layout.
        waited: seconds of each send index; None where sends hold their senders alone.
        free: [actions + 1, layouts]; the first row is set to 0.
    """
    import numpy as np

    seconds, free[0] = np.array(held), 0.0
    sends = None if waited is None else np.array(waited)
    most = max(end - start for start, end in zip([1, *found.ends], found.ends, strict=False))
    room, other = np.empty((2, most, free.shape[1]))
    start = 1
    for end in found.ends:
        mine = slice(start - 1, end - 1)
        arrived, ready = room[: end - start], other[: end - start]
        free.take(found.source[mine], 0, arrived, "clip")
        if sends is not None:
            arrived += sends.take(found.send[mine], 0, ready, "clip")
        np.maximum(arrived, free.take(found.previous[mine], 0, ready, "clip"), out=arrived)
        np.add(arrived, seconds.take(found.cost[mine], 0, ready, "clip"), out=free[start:end])
        start = end
