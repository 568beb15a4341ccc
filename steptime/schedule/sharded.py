"""Which actions of a pipeline gather their chunk's sharded parameters, and after which actions the gradients are reduced.

torch/distributed/pipelining (2.13): stage.py, backward_maybe_with_nosync, keeps parameters gathered and gradients unreduced after
every backward; perform_reduce_grad reduces them once, after the last. schedules.py, _add_unshard_reshard, has the schedules of
several chunks fetch the next three ahead and drop the others; GPipe and 1F1B of one chunk gather in FSDP's own hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import islice
from typing import NamedTuple, TypeAlias

from steptime.base.num import Num, maximum
from steptime.schedule.actions import Action
from steptime.schedule.graph import Graph

ACTIVE = 3
"""Most chunks whose parameters a stage holds gathered at once (schedules.py, max_active_stages)."""
HOOKED = frozenset({"gpipe", "1f1b"})
"""Schedules that gather nothing ahead when there is one chunk per stage."""


class ShardedStep(NamedTuple):
    """An action of a stage, and FSDP's work around it."""

    action: Action
    fetched: tuple[int, ...]
    """Chunks whose parameters are requested just before it."""
    gathers: bool
    """Its own chunk's layers are not gathered when it starts: it gathers them layer by layer."""
    roots: bool
    """The same for the chunk's parameters outside of layers."""
    gathered_layers: frozenset[int]
    """Chunks whose layers are gathered when it starts."""
    gathered_roots: frozenset[int]
    reduces: bool
    """It is the last action of its chunk: gradients are reduced after it, before the stage continues."""


class _Gathered:
    """Chunks whose parameters are gathered, updated action by action."""

    def __init__(self, actions: Sequence[Action]) -> None:
        """`actions`: all actions of the stage."""
        self.layers = set[int]()
        self.roots = set[int]()
        self.active: list[int] = []
        self.last: dict[int, int] = {action.chunk: at for at, action in enumerate(actions)}
        """The last action of every chunk."""
        self.coming: list[list[int]] = [[]]
        """At every action the next distinct chunks that run, in that order."""
        for action in reversed(actions):
            later = [chunk for chunk in self.coming[-1] if chunk != action.chunk]
            self.coming.append([action.chunk, *later[: ACTIVE - 1]])
        self.coming.reverse()

    def fetch(self, at: int) -> tuple[int, ...]:
        """Request the chunks of the next actions, and free those that are not among them."""
        coming = self.coming[at]
        if {*coming} == {*self.active}:
            return ()
        for chunk in [chunk for chunk in self.active if chunk not in coming]:
            self.active.remove(chunk)
            self.drop(chunk)
        fetched = tuple(chunk for chunk in coming if chunk not in self.active)
        self.active += fetched
        self.layers |= set(fetched)
        self.roots |= set(fetched)
        return fetched

    def drop(self, chunk: int) -> None:
        """Free a chunk's parameters."""
        self.layers.discard(chunk)
        self.roots.discard(chunk)


@lru_cache(maxsize=256)
def sharded_steps(
    actions: tuple[Action, ...], *, ahead: bool, reshard: bool, first: int | None = None
) -> list[ShardedStep]:
    """A stage's actions with the gathers and reductions of FSDP.

    Args:
        actions: the stage's order.
        ahead: the schedule fetches chunks before they run.
        reshard: layers are freed after each forward (reshard_after_forward); a root never is.
        first: the chunk that holds the embedding. Its input needs no gradient, so all of a split backward runs in its second half
            (stage.py, backward_one_chunk: "Skip the backward for the first stage").
    """
    run = [_as_run(action, first) for action in actions if (action.kind, action.chunk) != ("I", first)]
    gathered, steps = _Gathered(run), list[ShardedStep]()
    for at, action in enumerate(run):
        kind, chunk = action.kind, action.chunk
        fetched = gathered.fetch(at) if ahead else ()
        gathers, roots = (kind != "W" and chunk not in those for those in (gathered.layers, gathered.roots))
        reduces = at == gathered.last[chunk]
        steps.append(
            ShardedStep(action, fetched, gathers, roots, frozenset(gathered.layers), frozenset(gathered.roots), reduces)
        )
        if kind != "W":
            gathered.layers.add(chunk)
            gathered.roots.add(chunk)
        if kind == "F" and reshard:
            gathered.layers.discard(chunk)
    return steps


def _as_run(action: Action, first: int | None) -> Action:
    """Whether the second half of the first chunk's backward does all of it."""
    return action._replace(kind="B") if (action.kind, action.chunk) == ("W", first) else action


class Around(NamedTuple):
    """FSDP's additions to an action of a stage."""

    added_s: Num
    """Seconds added to it."""
    fetched: tuple[tuple[int, Num], ...]
    """Chunks gathered from its start on, one after another, each with its seconds; an action of a chunk waits for it."""
    after_s: Num
    """Seconds before the stage continues; the action's output is sent before them."""

    def rounded(self, grid: float) -> Around:
        """All seconds rounded to the grid."""
        fetched = tuple((chunk, (seconds + grid) - grid) for chunk, seconds in self.fetched)
        return Around((self.added_s + grid) - grid, fetched, (self.after_s + grid) - grid)


AroundActions: TypeAlias = "Callable[[int, Sequence[Action]], dict[Action, Around]]"
"""(stage, its order) to FSDP's additions, for those of its actions that have any."""


def sharded_run(
    found: Graph, busy_s: Sequence[Num], waited: Sequence[Num], around: AroundActions, grid: float
) -> list[Num]:
    """When each action ends, as in `walk.Step.run`, with FSDP's additions; a stage's last one includes its reduction.

    Seconds may be columns. `grid`: what is added is rounded with it, as `walk.walk` rounds the rest.
    """
    extra, place = additions(found, around, grid), found.places()
    free, network, come = list[Num]([0.0]), list[Num]([0.0] * len(found.orders)), dict[tuple[int, int], Num]()
    for number, (previous, source, cost, send) in enumerate(islice(found.rows, 1, None), 1):
        ready = free[previous] + extra[previous].after_s if previous in extra else free[previous]
        stage, _ = where = place[number]
        start = maximum(ready, free[source] + waited[send] if send else free[source])
        if number in extra:
            for chunk, seconds in extra[number].fetched:
                come[stage, chunk] = network[stage] = maximum(network[stage], ready) + seconds
        if where in come:
            start = maximum(start, come[where])
        start += busy_s[cost]  # in place: a column of its own
        if number in extra:
            start += extra[number].added_s
        free.append(start)
    for numbers in found.stages:
        if numbers[-1] in extra:
            free[numbers[-1]] = free[numbers[-1]] + extra[numbers[-1]].after_s
    return free


def additions(found: Graph, around: AroundActions | None, grid: float) -> dict[int, Around]:
    """FSDP's additions by the number of the action, rounded; none without FSDP."""
    extra: dict[int, Around] = {}
    for stage, (actions, numbers) in enumerate(zip(found.orders, found.stages, strict=True) if around else ()):
        assert around is not None
        mine = around(stage, actions)
        extra.update(
            {
                number: mine[action].rounded(grid)
                for action, number in zip(actions, numbers, strict=True)
                if action in mine
            }
        )
    return extra
