"""Dependencies of a schedule's actions, sorted so that every input precedes its use."""

from functools import lru_cache
from typing import NamedTuple, TypeAlias

from steptime.schedule.actions import Action, ActionKind, Orders, Place
from steptime.schedule.orders import described, order, placement


class Input(NamedTuple):
    """Where the actions of one kind and chunk of a stage get their input, and what they cost."""

    stage: int
    """The stage that makes the input; `OWN` where the stage's own order implies it."""
    shift: int
    """From an action's code to the code of the action that makes its input."""
    cost: int
    """Index into the costs [kind][stage][chunk], flattened."""
    send: int
    """Index into the send times: 0 for none, then the forward boundaries, then the backward ones."""
    known_as: int
    """From an action's code to the code that others wait for: an I takes the place of the B."""


class Graph(NamedTuple):
    """A schedule's actions, numbered from 1 so that every input precedes its use; 0 means no predecessor."""

    orders: Orders
    rows: list[tuple[int, int, int, int]]
    """For each action: the previous one on its stage, the one that makes its input, and `Input`'s cost and send."""
    outgoing: list[int]
    """By cost index: the send index of the action's output."""
    stages: list[list[int]]
    """The actions of each stage in order."""
    first_forward: list[list[int]]
    """[pp][vpp]"""
    last_backward: list[list[int]]
    """[pp][vpp] the last gradients of the weights of each chunk"""

    def places(self) -> dict[int, Place]:
        """Stage and chunk of each action by its number."""
        return {
            number: Place(stage, action.chunk)
            for stage, (actions, numbers) in enumerate(zip(self.orders, self.stages, strict=True))
            for action, number in zip(actions, numbers, strict=True)
        }


MISSING = -1
OWN = -1
_Known: TypeAlias = tuple[list[int], int, int, int, int]
"""An `Input` with the numbers assigned so far on its stage, by code; MISSING until assigned."""


@lru_cache(maxsize=64)
def graph(schedule: str, pp: int, vpp: int, microbatches: int, group: int | None = None) -> Graph:
    """Sort a schedule's actions topologically, once for all its walks.

    Raises:
        ValueError: as `order`; or the order deadlocks.
    """
    orders = order(schedule, pp, vpp, microbatches, group)
    found = described(schedule)
    kinds = found.kinds
    total = sum(map(len, orders))
    codes, per_stage = codes_of(orders, kinds, vpp, microbatches), len(kinds) * vpp * microbatches
    partners = [partners_of(codes[stage], orders[stage]) if found.pairs else {} for stage in range(pp)]
    numbers = [[MISSING] * per_stage for _ in range(pp)]
    blocks_of, outgoing = inputs_of(kinds, placement(schedule, pp, vpp), pp, microbatches)
    first_number = [0] * per_stage
    inputs: list[list[_Known]] = []
    for mine in blocks_of:
        known = [(first_number if one.stage == OWN else numbers[one.stage], *one[1:]) for one in mine]
        inputs.append([one for one in known for _ in range(microbatches)])
    stages: list[list[int]] = [[] for _ in range(pp)]
    rows = [(0, 0, 0, 0)]
    sweep = [*range(pp), *range(pp - 2, 0, -1)]  # down with the forwards, up with the backwards
    while len(rows) <= total:
        before = len(rows)
        for stage in sweep:
            _advance(codes[stage], inputs[stage], numbers[stage], stages[stage], rows, partners[stage])
        if len(rows) == before:
            raise ValueError(f"{schedule} deadlocks: pp={pp}, vpp={vpp}, microbatches={microbatches}, group={group}")
    blocks = [[n[at : at + microbatches] for at in range(0, per_stage, microbatches)] for n in numbers]
    first = [[min(block) for block in stage[:vpp]] for stage in blocks]
    last = [[max(map(max, stage[chunk::vpp])) for chunk in range(vpp)] for stage in blocks]
    return Graph(orders, rows, outgoing, stages, first, last)


def codes_of(orders: Orders, kinds: tuple[ActionKind, ...], vpp: int, microbatches: int) -> list[list[int]]:
    """Each action as its number within its stage, (kind * vpp + chunk) * microbatches + microbatch."""
    keys = [Action(kind, m, chunk) for kind in kinds for chunk in range(vpp) for m in range(microbatches)]
    code_of = {key: code for code, key in enumerate(keys)}
    return [list(map(code_of.__getitem__, actions)) for actions in orders]


def inputs_of(
    kinds: tuple[ActionKind, ...], places: tuple[Place, ...], pp: int, microbatches: int
) -> tuple[list[list[Input]], list[int]]:
    """`Input` by stage, of each kind and chunk, and `Graph.outgoing`."""
    outgoing = [0] * (len(kinds) * len(places))
    return [_inputs(kinds, places, stage, pp, microbatches, outgoing) for stage in range(pp)], outgoing


def _inputs(
    kinds: tuple[ActionKind, ...],
    places: tuple[Place, ...],
    stage: int,
    pp: int,
    microbatches: int,
    outgoing: list[int],
) -> list[Input]:
    """`Input` of a stage's actions, by kind and chunk; fills `outgoing` of what they wait for."""
    vpp = len(places) // pp
    depth_of = {place: depth for depth, place in enumerate(places)}
    inputs = []
    for k, kind in enumerate(kinds):
        for chunk in range(vpp):
            cost = (k * pp + stage) * vpp + chunk
            alias = -vpp * microbatches if kind == "I" else 0
            depth = depth_of[Place(stage, chunk)] + (-1 if kind == "F" else 1)
            if kind == "W" or not 0 <= depth < len(places):  # the stage's own order implies it
                here = Input(OWN, 0, cost, 0, alias)
            else:
                source = places[depth]
                first, second = (source.stage, stage) if kind == "F" else (stage, source.stage)
                boundary = first if second == (first + 1) % pp else second
                send = 0 if source.stage == stage else 1 + boundary + pp * (kind != "F")
                here = Input(source.stage, (source.chunk - chunk) * microbatches + alias, cost, send, alias)
                outgoing[(k * pp + source.stage) * vpp + source.chunk] = send
            inputs.append(here)
    return inputs


def partners_of(codes: list[int], actions: tuple[Action, ...]) -> dict[int, int]:
    """Codes of the forwards and backwards of a stage that run as pairs, in both directions."""
    pairs = [at for at in range(len(actions) - 1) if (actions[at].kind, actions[at + 1].kind) == ("F", "B")]
    return {codes[at + i]: codes[at + 1 - i] for at in pairs for i in (0, 1)}


def _advance(
    codes: list[int],
    inputs: list[_Known],
    numbers: list[int],
    done: list[int],
    rows: list[tuple[int, int, int, int]],
    partners: dict[int, int],
) -> None:
    """Number a stage's next actions as far as their inputs have numbers; a pair takes the number of its second action."""
    previous = done[-1] if done else 0
    for at in range(len(done), len(codes)):
        code = codes[at]
        upstream, shift, cost, send, known_as = inputs[code]
        source = upstream[code + shift]
        if source == MISSING:
            return
        number = len(rows)
        rows.append((previous, source, cost, send))
        done.append(number)
        previous = number
        if code not in partners:
            numbers[code + known_as] = number
        elif code > partners[code]:  # forwards have the lower codes
            numbers[code] = numbers[partners[code]] = number
