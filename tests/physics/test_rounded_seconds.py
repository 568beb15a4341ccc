"""Seconds of a walk are multiples of a power of two with which every time of the step is exact; and what its stages are busy.

A float has 53 binary digits: from 64 to 128 neighbors are 2**-46 apart, so a step of up to 128 s has seconds rounded to 2**-46.
"""

from __future__ import annotations

import pytest

from steptime.schedule import walk


@pytest.mark.parametrize(("extra", "kept"), [(2.0**-46, 15 * 2.0**-46), (2.0**-47, 0.0)])
def test_a_step_is_at_most_twice_its_busiest_stage(extra, kept):
    """1F1B, 8 stages, 8 micro-batches, 1 s each way: 2 * (16 for one + 8 * 2 of a stage) = 64 s. All 8 one after another would be
    128: steps of 2**-45. The step has 15 forwards and 15 backwards in turn."""
    ways = [[1.0]] * 8, [[1.0 + extra]] * 8
    assert walk("1f1b", 8, 1, 8, *ways, [0.0] * 8).makespan_s == 30 + kept
    assert walk("1f1b", 8, 1, 8, *reversed(ways), [0.0] * 8).makespan_s == 30 + kept


def test_a_step_of_sends():
    """GPipe, 16 stages, 10 micro-batches, sends of 1 s: 2 * (30 for one + 10 * 2 * 2 * 1) = 140 s, so 2**-45; 10 * 30 = 300 would
    be 2**-44. Half of a multiple goes to the even one: down 1 s, up 1 s and 2**-45; 15 sends each way."""
    none = [[0.0]] * 16
    done = walk("gpipe", 16, 1, 10, none, none, [1.0 + 2.0**-46] * 15, [1.0 + 2.0**-45] * 15)
    assert done.makespan_s == 15 + 15 * (1.0 + 2.0**-45)


def test_micro_batches_one_after_another():
    """GPipe, 2 stages, 6 micro-batches, 1 s each way and for sends: 6 * (4 + 2) = 36 s, so 2**-47. Forward stage 0 runs 0 to 6,
    stage 1 2 to 8; back stage 1 8 to 14, and stage 0, which has the first gradient at 10, to 16."""
    one = [[1.0 + 2.0**-48]] * 2
    assert walk("gpipe", 2, 1, 6, one, one, [1.0]).makespan_s == 16


def test_stages_that_wait_for_each_other():
    """GPipe, three stages, each with 1 s in another of its three chunks: 11 micro-batches run 0 to 11 on stage 0, to 22 on stage
    1, to 33 on stage 2, more than 2 * (3 + 11 * 1) = 28 s. Then 11 * 3 = 33 counts, and 2**-47 in place of 2**-48."""
    second = 1.0 + 2.0**-48
    forward = [[second, 0.0, 0.0], [0.0, second, 0.0], [0.0, 0.0, second]]
    assert walk("gpipe", 3, 3, 11, forward, [[0.0] * 3] * 3, [0.0] * 3).makespan_s == 33


def test_busy_seconds_of_chunks_and_halves():
    """4 micro-batches of two chunks: stage 0 4 * (1 + 2 + 3 + 4), stage 1 4 * (5 + 6 + 7 + 8). ZB-H1, 4 micro-batches: forward 1,
    gradients of inputs 2 and of weights 4: 4 * 7; stage 1 4 * (3 + 5 + 6)."""
    done = walk("interleaved", 2, 2, 4, [[1.0, 2.0], [5.0, 6.0]], [[3.0, 4.0], [7.0, 8.0]], [0.0, 0.0])
    assert done.busy_s == [40, 104]
    assert done.idle_s == [done.makespan_s - 40, done.makespan_s - 104]
    split = walk("zero_bubble", 2, 1, 4, [[1.0], [3.0]], [[2.0], [5.0]], [0.0], weight_s=[[4.0], [6.0]])
    assert split.busy_s == [28, 56]
