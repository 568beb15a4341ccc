"""The situations in which a stage under FSDP may hold the most, whatever its chunks weigh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import ge
from typing import Any

from steptime.fsdp.pipeline_memory import Situation, situations
from steptime.schedule import Action, order
from steptime.schedule.orders import first_backward
from steptime.schedule.sharded import sharded_steps


def stages_that_differ(orders: Sequence[Sequence[Action]], mine: Sequence[int]) -> Iterator[Sequence[Action]]:
    """Of the stages of a kind the orders of those that may hold the most.

    The first one has the most micro-batches in flight; but one that runs all forwards before its first backward holds no
    gradients beside them: so the first one, too, that does not.
    """
    yield orders[mine[0]]
    turns = (
        orders[stage] for stage in mine if any(a.kind == "F" for a in orders[stage][first_backward(orders[stage]) :])
    )
    first = next(turns, None)
    if first is not None and first is not orders[mine[0]]:
        yield first


@lru_cache(maxsize=1024)
def worst_situations(
    shape: tuple[str, int, int],
    step: tuple[int, int | None],
    mine: tuple[int, ...],
    like: tuple[int, ...],
    *,
    ahead: bool,
    reshard: bool,
) -> list[Situation]:
    """The situations of a kind of stage that no other one outweighs, whatever its chunks weigh.

    `shape`: schedule, stages and chunks per stage; `step`: micro-batches and their group; `like`: of each chunk the first
    one that is equal.
    """
    most: dict[Any, dict[tuple[int, ...], Situation]] = {}
    for actions in stages_that_differ(order(*shape, *step), mine):
        steps = sharded_steps(tuple(actions), ahead=ahead, reshard=reshard)
        for one in situations(steps, shape[2]):
            held = [0] * len(like)
            for chunk, count in zip(like, one.beside.whole, strict=True):
                held[chunk] += count
            most.setdefault(_sort(one, like), {}).setdefault(tuple(held), one)
    found = []
    for sort in most.values():
        kept: list[tuple[int, ...]] = []
        for held_of in sorted(sort, reverse=True):
            if not any(all(map(ge, other, held_of)) for other in kept):
                kept.append(held_of)
        found += [sort[held_of] for held_of in kept]
    return found


def _sort(one: Situation, like: tuple[int, ...]) -> tuple[object, ...]:
    """All but the micro-batches of a situation, the same for equal chunks."""
    states = zip(like, one.gradients, one.beside.unreduced, strict=True)
    each = [(*state, at in one.layers_held, at in one.roots_held) for at, state in enumerate(states)]
    own = each.pop(one.chunk)
    return own, one.passing, one.reduces, tuple(sorted(each))
