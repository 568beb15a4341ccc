"""torch's pipelining of 2.10 and 2.11: one stream for all sends and receives of a stage."""

from __future__ import annotations

import numpy as np
import pytest

from steptime.schedule import walk
from steptime.schedule.actions import Action
from steptime.schedule.graph import graph
from steptime.schedule.one_stream import _turns
from steptime.schedule.sharded import Around
from steptime.schedule.stage_exchange import exchange_of, exchanged_run

FORWARD, BACKWARD = [[1.0, 1.0]] * 3, [[2.0, 2.0]] * 3


def starts(sends: list[float], exchange: str, schedule: str = "interleaved") -> list[list[float]]:
    """When the first three forwards of each of three stages start, three micro-batches."""
    weights = [[0.5, 0.5]] * 3 if schedule in {"zero_bubble", "zbv"} else None
    found = walk(schedule, 3, 2, 3, FORWARD, BACKWARD, sends, weight_s=weights, exchange=exchange)
    return [times.starts_s[:3] for times in found.times()]


@pytest.mark.parametrize("schedule", ["interleaved", "gpipe", "zero_bubble"])
def test_a_send_waits_for_the_receive_listed_before_it(schedule):
    """Three stages of two chunks, forwards of 1 s (pytorch/pytorch pull request 165664: 0F0, 0SEND_F0, 8RECV_F0, 0F1, 0SEND_F1).

    Stage 0 ends its forwards at 1, 2 and 3 s. After the first send it lists the receive of what stage 2 makes of it, from 2 to
    3 s: its second send waits until then, and its third until stage 2 has run the second forward, from 4 to 5 s. Where an action
    starts as soon as its input is made, they start a second after one another.
    """
    assert starts([0.0] * 3, "one_stream", schedule) == [[0.0, 1.0, 2.0], [1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]
    assert starts([0.0] * 3, "free", schedule) == [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0], [2.0, 3.0, 4.0]]


def test_in_a_v_the_stage_before_the_last_waits():
    """The last of three stages runs both its chunks of a micro-batch, the first from 2 to 4 s, and sends what it made back.

    The middle stage lists that receive before the one of the third micro-batch, whose forward so starts at 4 s, not at 3 s.
    """
    assert starts([0.0] * 3, "one_stream", "zbv")[1] == [1.0, 2.0, 4.0]
    assert starts([0.0] * 3, "free", "zbv")[1] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"])
def test_torch_2_10_runs_every_schedule_of_several_chunks_so(schedule):
    """They run in _PipelineScheduleRuntime (pytorch/pytorch pull request 164777); the pairs of DualPipeV are not modeled.

    Time steps are those of interleaved 1F1B, and a stage of one chunk has neither.
    """
    assert exchange_of("one_stream", schedule, 2) == ("free" if schedule == "dualpipev" else "one_stream")
    assert exchange_of("time_steps", schedule, 2) == ("time_steps" if schedule in {"1f1b", "interleaved"} else "free")
    assert exchange_of("one_stream", schedule, 1) == exchange_of("free", schedule, 2) == "free"


def test_an_exchange_holds_both_streams():
    """The same with exchanges of 1 s: stage 2 gets the first micro-batch at 4 s and has sent it on at 6 s.

    Only then the next send begins. Its output is there at 7 s, with stage 2 at 9, back at 11; the third then starts, until 12.
    """
    assert starts([1.0] * 3, "one_stream") == [[0.0, 1.0, 2.0], [2.0, 7.0, 12.0], [4.0, 9.0, 14.0]]


def test_two_stages_of_equal_chunks_lose_nothing():
    """If sends take no time: stage 0's second send and what stage 1 makes of the first are always ready together."""
    every = [
        walk("interleaved", 2, 2, 4, FORWARD[:2], BACKWARD[:2], [0.0] * 2, exchange=e) for e in ("free", "one_stream")
    ]
    assert every[0].makespan_s == every[1].makespan_s


@pytest.mark.parametrize("microbatches", [8, 64])
def test_columns_are_their_scalars(microbatches):
    """The seconds of two layouts at once are those of each."""
    found, what = graph("interleaved", 4, 2, microbatches), (4, 2, microbatches, None)
    both = [[np.array([1.0, 2.0])] * 16, [np.array([0.0, 0.5])] * 9]
    together = exchanged_run("one_stream", found, what, *both, {})
    alone = [exchanged_run("one_stream", found, what, *([of[i] for of in each] for each in both), {}) for i in (0, 1)]
    for i, one in enumerate(alone):
        assert [float(np.broadcast_to(n, 2)[i]) for n in together[1]] == [float(n) for n in one[1]]


def test_long_steps_are_walked_whole():
    """64 micro-batches: the makespan is where the last action ends."""
    found = walk("interleaved", 4, 2, 64, [[1.0, 1.0]] * 4, [[2.0, 2.0]] * 4, [0.0] * 4, exchange="one_stream")
    assert found.makespan_s == found.times()[0].starts_s[-1] + 2.0


def test_gathers_are_waited_for_and_reductions_come_after_sends():
    """Two stages of two chunks: both gathers of stage 0 take 3 s, one after the other, its forwards of chunk 1 start at 6 s.

    Its forwards of chunk 0 run from 3 to 5 s and those of stage 1 until 6. The last backward of stage 1 is followed by a
    reduction of 10 s, before which its output is sent: stage 0 ends as without it, and stage 1 ends 10 s later.
    """
    found, what, costs = graph("interleaved", 2, 2, 2), (2, 2, 2, None), [1.0] * 4 + [2.0] * 4
    first, last = found.stages[0][0], found.stages[1][-1]
    gathers = {first: Around(0.0, ((0, 3.0), (1, 3.0)), 0.0)}
    alone = exchanged_run("one_stream", found, what, costs, [0.0] * 5, gathers)
    assert [alone[0][number] for number in found.stages[0][:3]] == [3.0, 4.0, 6.0]
    both = exchanged_run("one_stream", found, what, costs, [0.0] * 5, gathers | {last: Around(0.0, (), 10.0)})
    assert both[1][found.stages[0][-1]] == alone[1][found.stages[0][-1]]
    assert both[1][last] == alone[1][last] + 10.0


def test_rounds_in_which_a_stage_lists_nothing():
    """Four chunks on one stage, forward then back (schedules.py, _add_unshard_reshard and _add_reduce_grad), three at once.

    Chunks 0, 1 and 2 are gathered; before the second forward 0 is freed and 3 gathered. Every backward is followed by its
    reduction; before the second 3 is freed and 0 gathered, then 2 and 1 are freed.
    """
    actions = (*(Action("F", 0, chunk) for chunk in range(4)), *(Action("B", 0, chunk) for chunk in (3, 2, 1, 0)))
    none = None
    assert _turns(actions, [10, 11, 12, 13, 14, 15, 16, 17]) == [
        none, none, none, 10, none, none, 11, 12, 13,
        14, none, none, none, 15, none, none, 16, none, none, 17, none,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "vpp", "expected"),
    [
        ("interleaved", 2, "one_stream"),
        ("gpipe", 2, "one_stream"),
        ("interleaved", 1, "free"),
        ("dualpipev", 2, "free"),
    ],
)
def test_schedules_that_exchanges_hold_up(schedule, vpp, expected):
    """Those of several chunks; DualPipeV's pairs, which are not modeled, send each output as it is ready."""
    assert exchange_of("one_stream", schedule, vpp) == expected


@pytest.mark.parametrize(("exchange", "end"), [("one_stream", 6.0), ("time_steps", 16.0)])
def test_what_an_action_takes_longer(exchange, end):
    """The first forward of 1 s takes 5 s more, and the stage 10 s more before it goes on. On one stream the output is sent before
    these, in time steps after.
    """
    found, what, costs = graph("interleaved", 2, 2, 2), (2, 2, 2, None), [1.0] * 4 + [2.0] * 4
    first, second = found.stages[0][:2]
    begun, done = exchanged_run(exchange, found, what, costs, [0.0] * 5, {first: Around(5.0, (), 10.0)})
    assert (begun[first], begun[second], done[first]) == (0.0, 16.0, 16.0)
    assert begun[found.stages[1][0]] == end
