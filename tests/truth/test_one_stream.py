"""The order in which torch lists the sends and receives of schedules of several chunks."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from steptime.schedule import placement
from steptime.schedule.graph import graph
from steptime.schedule.one_stream import listed

NAMES = {
    "interleaved": "Interleaved1F1B",
    "gpipe": "LoopedBFS",
    "zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
}


def torch_lists(schedule: str, pp: int, vpp: int, microbatches: int) -> list[list[str]]:
    """Forwards, backwards, sends and receives of every stage (2F0, 2SEND_F0 ...) as torch's runtime runs them."""
    found = get_schedule_ops(NAMES[schedule], pp, microbatches, vpp, with_comms=True)
    return [[text for one in actions if "SHARD" not in (text := str(one)) and "GRAD" not in text] for actions in found]


def own_lists(schedule: str, pp: int, vpp: int, microbatches: int) -> list[list[str]]:
    """The same from the order of the actions."""
    found, places = graph(schedule, pp, vpp, microbatches), placement(schedule, pp, vpp)
    chunk = {(place.stage, place.chunk): depth for depth, place in enumerate(places)}
    action_of = {
        number: (stage, action)
        for stage, (actions, numbers) in enumerate(zip(found.orders, found.stages, strict=True))
        for action, number in zip(actions, numbers, strict=True)
    }
    to = {source: action_of[at] for at, (_, source, _, _) in enumerate(found.rows) if source}
    lists: list[list[str]] = [[] for _ in range(pp)]
    for number in listed(found):
        stage, (kind, microbatch, of) = action_of[number]
        lists[stage].append(f"{chunk[stage, of]}{kind}{microbatch}")
        other, target = to.get(number, (stage, None))
        if target is not None and other != stage:
            way = "F" if kind == "F" else "B"
            lists[stage].append(f"{chunk[stage, of]}SEND_{way}{microbatch}")
            lists[other].append(f"{chunk[other, target.chunk]}RECV_{way}{microbatch}")
    return lists


@pytest.mark.parametrize(
    ("schedule", "pp", "vpp", "microbatches"),
    [
        *[
            ("interleaved", *of)
            for of in ((2, 2, 4), (3, 2, 3), (4, 2, 8), (8, 2, 16), (4, 3, 12), (4, 8, 8), (8, 4, 12))
        ],
        *[("gpipe", *of) for of in ((2, 2, 4), (4, 3, 4), (4, 2, 1))],
        *[("zero_bubble", *of) for of in ((2, 2, 4), (3, 3, 6), (4, 2, 8))],
        *[("zbv", *of) for of in ((2, 2, 4), (3, 2, 7), (4, 2, 16))],
    ],
)
def test_sends_and_receives_are_listed_as_torch_does(schedule, pp, vpp, microbatches):
    """torch 2.13, _add_send_recv; its actions that gather and free parameters and reduce gradients left out."""
    assert own_lists(schedule, pp, vpp, microbatches) == torch_lists(schedule, pp, vpp, microbatches)
