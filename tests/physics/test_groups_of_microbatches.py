"""What a stage holds at the end of a long step whose micro-batches run in groups, the last of them smaller."""

from __future__ import annotations

from steptime.schedule.live import states


def test_the_last_group_is_that_of_the_whole_step():
    """20 micro-batches in groups of 3, two chunks on one stage: the last group is 18 and 19.

    Forwards and backwards alternate: F18 B15, F19 B16 of the first chunk, F18 of the second, before B17 of the first: 17, 18 and
    19 of the first chunk are held, 18 of the second. After F19 of the second both chunks hold 18 and 19, until B18 of the second.
    """
    (stage,) = states("interleaved", 1, 2, 20, 3)
    ends = [(of.held, of.action.kind, of.action.microbatch, of.action.chunk) for of in stage[-3:]]
    assert ends == [((3, 1), "B", 17, 0), ((2, 2), "F", 19, 1), ((2, 2), "B", 18, 1)]
