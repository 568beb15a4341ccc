"""Micro-batches in groups, the last of them smaller, at the end of a long step; the order in which GPipe's return."""

from __future__ import annotations

from steptime.schedule import order
from steptime.schedule.live import states


def test_the_last_group_is_that_of_the_whole_step():
    """20 micro-batches in groups of 3, two chunks on one stage: the last group is 18 and 19.

    Forwards and backwards alternate: F18 B15, F19 B16 of the first chunk, F18 of the second, before B17 of the first: 17, 18 and
    19 of the first chunk are held, 18 of the second. After F19 of the second both chunks hold 18 and 19, until B18 of the second.
    """
    (stage,) = states("interleaved", 1, 2, 20, 3)
    ends = [(of.in_flight, of.action.kind, of.action.microbatch, of.action.chunk) for of in stage[-3:]]
    assert ends == [((3, 1), "B", 17, 0), ((2, 2), "F", 19, 1), ((2, 2), "B", 18, 1)]


def test_backwards_of_all_forwards():
    """torch/distributed/pipelining/schedules.py (2.13): ScheduleGPipe's first in, first out, ScheduleLoopedBFS' last in."""
    for vpp, back in ((1, [0, 1, 2]), (2, [2, 1, 0] * 2)):
        for actions in order("gpipe", 2, vpp, 3):
            assert [of.microbatch for of in actions if of.kind == "B"] == back
