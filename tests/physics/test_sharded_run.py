"""A 1F1B step of two stages and two micro-batches with FSDP's gathers and reductions, second by second.

Stage 0 runs F0 F1 B0 B1, stage 1 F0 B0 F1 B1. Forwards take 2 and 3 s, backwards 5 and 7 s; a send takes 1 s down, 4 s up.
"""

from __future__ import annotations

from collections.abc import Sequence

from steptime.schedule import walk
from steptime.schedule.actions import Action
from steptime.schedule.graph import graph
from steptime.schedule.sharded import Around, AroundActions, sharded_run

HELD = [2.0, 3.0, 5.0, 7.0]
"""[forward, backward][stage]"""
WAITED = [0.0, 1.0, 0.0, 4.0, 0.0]
"""Nothing to wait for, then the boundaries below each stage, down and up."""


def additions(gather_s: float) -> AroundActions:
    """Gathers and reductions of either stage; stage 1 gathers `gather_s` before its first forward."""
    said = {
        (0, Action("F", 0, 0)): Around(0.5, ((0, 10.0),), 0.0),
        (0, Action("B", 1, 0)): Around(0.0, (), 20.0),
        (1, Action("F", 0, 0)): Around(0.0, ((0, gather_s),), 0.0),
        (1, Action("F", 1, 0)): Around(0.25, (), 8.0),
    }

    def around(stage: int, actions: Sequence[Action]) -> dict[Action, Around]:
        return {action: said[stage, action] for action in actions if (stage, action) in said}

    return around


def ends(gather_s: float) -> list[list[float]]:
    """When the actions of each stage are over."""
    found = graph("1f1b", 2, 1, 2)
    over = sharded_run(found, HELD, WAITED, additions(gather_s), 1.0)
    return [[over[number] for number in numbers] for numbers in found.stages]


def test_inputs_gathers_and_reductions():
    """Stage 0: F0 waits 10 for its gather, 10 + 2 + 0.5; F1 14.5. Stage 1: its gather is there at 6, F0's input at 13.5: 16.5; B0
    23.5; F1's input came at 15.5: 23.5 + 3 + 0.25 = 26.75; 8 s later, 34.75, B1 starts: 41.75. Stage 0: B0 27.5 + 5, B1
    45.75 + 5, and its reduction of 20 at the end.
    """
    assert ends(6.0) == [[12.5, 14.5, 32.5, 70.75], [16.5, 23.5, 26.75, 41.75]]


def test_a_gather_that_comes_after_the_input():
    """Stage 1's gather takes 20: F0 23, B0 30, F1 33.25, B1 41.25 + 7; stage 0: B0 34 + 5, B1 52.25 + 5 + 20."""
    assert ends(20.0) == [[12.5, 14.5, 39.0, 77.25], [23.0, 30.0, 33.25, 48.25]]


def test_the_same_step_walked():
    """As `test_inputs_gathers_and_reductions`: the last reduction ends at 70.75. Stage 0's gradients are complete 5 s after B1's
    input has arrived, at 41.75 + 4 = 45.75; the stage computes 2 * (2 + 5) s of the step, stage 1 2 * (3 + 7).
    """
    found = walk("1f1b", 2, 1, 2, [[2.0], [3.0]], [[5.0], [7.0]], [1.0], [4.0], around=additions(6.0))
    assert found.makespan_s == 70.75
    assert found.last_backward_start[0] == [45.75]
    assert found.last_backward_end[0] == [50.75]
    assert found.first_forward_start == [[0.0], [13.5]]
    assert found.busy_s == [14.0, 20.0]
