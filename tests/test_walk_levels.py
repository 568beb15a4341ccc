"""Actions of a schedule in levels: the order that columns compute, against the walk of one layout."""

from __future__ import annotations

import numpy as np
import pytest

from steptime.schedule.graph import graph
from steptime.search.walk_levels import levels, walked

STEPS = [
    ("1f1b", 1, 1, 3, None), ("1f1b", 4, 1, 9, None), ("1f1b", 8, 1, 40, None), ("gpipe", 3, 2, 5, None),
    ("interleaved", 4, 3, 8, 4), ("interleaved", 2, 4, 10, 5), ("zero_bubble", 4, 1, 12, None),
    ("zero_bubble", 4, 2, 12, None), ("zbv", 4, 2, 11, None), ("dualpipev", 3, 2, 9, None),
]  # fmt: skip


def test_two_stages_by_hand():
    """1F1B, two stages, two micro-batches: 0 runs F0 F1 B0 B1, 1 runs F0 B0 F1 B1.

    By level: F0 of 0; F1 of 0 and F0 of 1; B0 of 1; B0 of 0 and F1 of 1; B1 of 1; B1 of 0. With forwards of 1 s, backwards of
    2 s and free sends stage 1 runs from 1 to 7 s without a pause; stage 0 gets B0 at 4 s and B1 at 7 s.
    """
    found = levels("1f1b", 2, 1, 2)
    assert (found.cost < 4).sum(axis=1).tolist() == [1, 2, 1, 2, 1, 1]
    held = [np.ones(1)] * 2 + [2.0 * np.ones(1)] * 2
    ends = [walked(found, held, None, numbers)[:, 0].tolist() for numbers in found.stages]
    assert ends == [[1.0, 2.0, 6.0, 9.0], [2.0, 4.0, 5.0, 7.0]]
    assert found.first_backward == [2, 1]


@pytest.mark.parametrize("step", STEPS)
def test_levels_end_when_the_walk_of_each_layout_does(step):
    """Bit for bit, with sends that delay and sends that hold their sender."""
    found, rows = levels(*step), graph(*step)
    rng, layouts = np.random.default_rng(1), 7
    costs = [rng.random(layouts) for _ in rows.outgoing]
    sends = [np.zeros(layouts), *(rng.random(layouts) for _ in range(2 * step[1]))]
    assert found.outgoing == rows.outgoing
    for waited in (sends, None):
        expected = np.zeros((len(rows.rows), layouts))
        for number, (previous, source, cost, send) in enumerate(rows.rows[1:], 1):
            arrived = expected[source] if waited is None else expected[source] + waited[send]
            expected[number] = np.maximum(expected[previous], arrived) + costs[cost]
        for mine, theirs in zip(found.stages, rows.stages, strict=True):
            np.testing.assert_array_equal(walked(found, costs, waited, mine), expected[theirs])


def test_an_order_that_waits_for_itself_is_an_error():
    """Groups of one micro-batch: the second chunk's forward needs what the last stage has not run."""
    with pytest.raises(ValueError, match="interleaved deadlocks: pp=4, vpp=2, microbatches=8, group=1"):
        levels("interleaved", 4, 2, 8, 1)
    with pytest.raises(ValueError, match="deadlocks"):
        graph("interleaved", 4, 2, 8, 1)
