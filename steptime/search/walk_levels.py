"""A schedule's actions in levels: those of one level wait only for earlier ones, so that columns compute them together."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from steptime.schedule.graph import OWN, Input, codes_of, inputs_of, partners_of
from steptime.schedule.orders import described, first_backward, order, placement


class Levels(NamedTuple):
    """A schedule's actions in levels from 1 on: action `level * pp + stage`. Arrays are [level, stage], also where a stage waits.

    A stage that waits runs an action without input that takes no time.
    """

    source: Any
    """The action that makes its input, as its place among the last `depth` levels, counted from 1; 0 means no input."""
    cost: Any
    send: Any
    """Indices of its seconds and of its input's send, as in `schedule.graph.Input`; of a stage that waits one past all costs."""
    depth: int
    """Levels whose ends are needed at once: the last one, and those that make inputs still to be used."""
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
    # A slot per action, stage by stage, one more after each stage that never runs; slot 0 has run.
    first = np.cumsum([1, *(len(actions) + 1 for actions in orders)])
    never = int(first[-1])
    ends = np.zeros((pp, len(inputs[0]) * microbatches), dtype=int)
    coded = []
    for stage, listed in enumerate(codes_of(orders, found.kinds, vpp, microbatches)):
        codes = np.array(listed)
        blocks = codes // microbatches
        slots = first[stage] + np.arange(len(listed))
        ends[stage, codes + np.array([one.known_as for one in inputs[stage]])[blocks]] = slots
        if found.pairs:
            partners = partners_of(listed, orders[stage])
            later = {code: slot for code, slot in zip(listed, slots.tolist(), strict=True) if code in partners}
            for code, partner in partners.items():
                ends[stage, code] = max(later[code], later[partner])
        coded.append((blocks, codes))
    source, cost, send = _inputs(inputs, coded, ends, first)
    level = np.array(_levels(source.tolist(), first.tolist()))
    if int((level > 0).sum()) != sum(map(len, orders)):
        raise ValueError(f"{schedule} deadlocks: pp={pp}, vpp={vpp}, microbatches={microbatches}, group={group}")
    slots = _by_level(level, first)
    number = np.zeros(never + 1, dtype=int)
    number[slots] = np.arange(pp, pp + slots.size).reshape(slots.shape)
    number[never] = 0
    ended_by = number[source[slots]]
    depth = 1 + int((np.arange(1, 1 + len(slots))[:, None] - ended_by // pp).max(where=ended_by > 0, initial=1))
    return Levels(
        np.where(ended_by > 0, 1 + ended_by % (depth * pp), 0),
        cost[slots],
        send[slots],
        depth,
        outgoing,
        [number[first[stage] : first[stage] + len(actions)] for stage, actions in enumerate(orders)],
        [first_backward(actions) for actions in orders],
    )


def _inputs(inputs: list[list[Input]], coded: list[tuple[Any, Any]], ends: Any, first: Any) -> tuple[Any, Any, Any]:
    """By slot: the slot that makes the input, and the indices of cost and send.

    `inputs`: of each stage, by block (kind and chunk). `coded`: of each stage, block and code of its actions, in order. `ends`:
    by stage and code, the slot whose end others wait for. `first`: the first slot of each stage, and the slot that never runs.
    """
    import numpy as np

    never = int(first[-1])
    waiting = sum(map(len, inputs))
    source, cost, send = np.full(never + 1, never), np.full(never + 1, waiting), np.zeros(never + 1, dtype=int)
    for stage, (blocks, codes) in enumerate(coded):
        each = np.array(inputs[stage])[blocks]
        mine, own = slice(first[stage], first[stage] + len(blocks)), each[:, 0] == OWN
        source[mine] = np.where(own, 0, ends[each[:, 0], np.where(own, 0, codes + each[:, 1])])
        cost[mine], send[mine] = each[:, 2], each[:, 3]
    return source, cost, send


def _levels(source: list[int], first: list[int]) -> list[int]:
    """The level of every slot, one more than that of the action before it and of its input; -1 where it cannot run.

    `first`: the first slot of each stage, and the slot that never runs.
    """
    level, now = [0, *[-1] * first[-1]], first[:-1]
    sweep = [*range(len(now)), *range(len(now) - 2, 0, -1)]  # down with the forwards, up with the backwards
    moved = True
    while moved:
        moved = False
        for stage in sweep:
            slot = now[stage]
            before = level[slot - 1]
            while (needed := level[source[slot]]) >= 0:
                before = 1 + (needed if needed > before else before)  # noqa: FURB136  (max() takes twice as long)
                level[slot] = before
                slot += 1
            moved |= slot > now[stage]
            now[stage] = slot
    return level


def _by_level(level: Any, first: Any) -> Any:
    """The slot that each stage runs in each level, the one that never runs where the stage waits; arguments as of `_levels`."""
    import numpy as np

    slots = np.full((level.max(), len(first) - 1), first[-1])
    for stage in range(len(first) - 1):
        mine = np.arange(first[stage], first[stage + 1] - 1)
        slots[level[mine] - 1, stage] = mine
    return slots


def walked(found: Levels, busy_s: list[Any], waited: list[Any] | None, wanted: Any) -> Any:
    """When the `wanted` actions, which are numbers, end: [place in `wanted`, layout].

    `busy_s`: seconds of each cost index, by layout. `waited`: of each send index; None where sends hold their senders alone.
    """
    import numpy as np

    seconds, sends = np.array([*busy_s, np.zeros_like(busy_s[0])]), None if waited is None else np.array(waited)
    pp, layouts = found.source.shape[1], seconds.shape[1]
    places: dict[int, list[tuple[int, int]]] = {}
    for place, number in enumerate(wanted):
        places.setdefault(number // pp, []).append((place, number % pp))
    result = np.empty((len(wanted), layouts))
    free = np.zeros((1 + found.depth * pp, layouts))
    rows = [free[1 + pp * at : 1 + pp * (at + 1)] for at in range(found.depth)]
    arrived, other = np.empty((2, pp, layouts))
    before = rows[0]
    for level, (source, cost, send) in enumerate(zip(found.source, found.cost, found.send, strict=True), 1):
        now = rows[level % found.depth]
        free.take(source, 0, arrived, "clip")
        if sends is not None:
            np.add(arrived, sends.take(send, 0, other, "clip"), out=arrived)
        np.maximum(arrived, before, out=arrived)
        np.add(arrived, seconds.take(cost, 0, other, "clip"), out=now)
        for place, stage in places.get(level, ()):
            result[place] = now[stage]
        before = now
    return result
