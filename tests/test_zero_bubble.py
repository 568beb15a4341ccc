"""Schedules that run the gradients of the weights apart: orders, walks in time, what they hold."""

from __future__ import annotations

import csv
from itertools import product

import pytest
from drawn_steps import eighths, equal, text
from hypothesis import given
from hypothesis import strategies as st
from test_schedule import CSV

from steptime.schedule import SCHEDULES, Action, Schedule, SplitBytes, in_flight, order, peaks, placement, walk
from steptime.schedule.actions import Place

TORCH_NAMES = {"InterleavedZeroBubble": "zero_bubble", "ZBVZeroBubble": "zbv", "DualPipeV": "dualpipev"}


def rows():
    with CSV.open(newline="") as file:
        found = [row for row in csv.DictReader(file) if row["schedule"] in TORCH_NAMES]
    return [row for row in found if not row["makespan_tf1_tb2"].startswith("ERR")]


@pytest.mark.parametrize("row", rows(), ids=lambda r: "-".join(list(r.values())[:4]))
def test_torch_rows(row):
    """A forward of 1 and two halves of a backward of 1 each, 1/v of that per chunk, replayed from torch's tables."""
    pp, microbatches, vpp = int(row["pp"]), int(row["microbatches"]), int(row["virtual_stages"])
    part = equal(1 / vpp, pp, vpp)
    done = walk(TORCH_NAMES[row["schedule"]], pp, vpp, microbatches, part, part, [0.0] * pp, weight_s=part)
    assert done.makespan_s == float(row["makespan_tf1_tb2"])
    assert max(done.idle_s) == float(row["bubble_time"])


@given(st.sampled_from(tuple(TORCH_NAMES.values())), st.integers(1, 6), st.integers(1, 20))
def test_every_stage_runs_every_action_once_and_in_turn(schedule, pp, more):
    vpp = SCHEDULES[schedule].vpp or 3
    microbatches = more + (2 * pp if schedule == "dualpipev" else 0)
    for actions in order(schedule, pp, vpp, microbatches):
        at = {action: i for i, action in enumerate(actions)}
        assert len(at) == len(actions)
        for m, c in product(range(microbatches), range(vpp)):
            whole = at.pop(Action("B", m, c), None)
            back = at.pop(Action("I", m, c)) if whole is None else whole
            assert at.pop(Action("F", m, c)) < back
            assert whole is not None or back < at.pop(Action("W", m, c))
        assert not at


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (("zbv", 4, 1, 8), "zbv needs vpp=2 (got 1)"),
        (("dualpipev", 4, 2, 7), "dualpipev needs at least 2 * pp = 8 micro-batches (got 7)"),
    ],
)
def test_counts_that_a_schedule_does_not_run(shape, message):
    with pytest.raises(
        ValueError, match="^" + message.replace("(", r"\(").replace(")", r"\)").replace("*", r"\*") + "$"
    ):
        order(*shape)


def v_shaped(pp, vpp):
    """Down the stages, up again, and so on: the first stage holds the first and, of two, the last chunk."""
    return tuple(Place(s if v % 2 == 0 else pp - 1 - s, v) for v in range(vpp) for s in range(pp))


def v_of_one(pp, vpp, microbatches, group):
    """One micro-batch through two stages of two chunks in a V, the weights' gradients where the stage would wait."""
    rows = [
        [("F", 0), ("F", 1), ("I", 1), ("W", 1), ("I", 0), ("W", 0)],
        [("F", 0), ("F", 1), ("I", 1), ("I", 0), ("W", 1), ("W", 0)],
    ]
    return tuple(tuple(Action(kind, 0, chunk) for kind, chunk in row) for row in rows)


@pytest.fixture
def v_of_one_micro_batch(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "v", Schedule(v_of_one, v_shaped, split=True))


@pytest.mark.usefixtures("v_of_one_micro_batch")
def test_a_v_with_split_backward_by_hand():
    """Forward 1, input gradients 2, weight gradients 3, a send 0.5 down and 0.25 for gradients; drawn on paper.

    Depth order: 0a, 1a, 1b, 0b. Between 1a and 1b nothing is sent: one stage holds both.
    """
    assert placement("v", 2, 2) == ((0, 0), (1, 0), (1, 1), (0, 1))
    times = [equal(t, 2, 2) for t in (1.0, 2.0)]
    done = walk("v", 2, 2, 1, *times, [0.5, 0.5], [0.25, 0.25], weight_s=equal(3.0, 2, 2))
    first, second = [
        [(text([a]), start, end) for a, start, end in stage] for stage in (times.spans for times in done.times())
    ]
    # 0a 0-1; 1a arrives 1.5, 1b follows at once; 0b arrives 3.5 + 0.5; I of 1b arrives 7 + 0.25; I of 0a 11.25 + 0.25
    assert second[:3] == [("F0a", 1.5, 2.5), ("F0b", 2.5, 3.5), ("I0b", 7.25, 9.25)]
    assert second[3:] == [("I0a", 9.25, 11.25), ("W0b", 11.25, 14.25), ("W0a", 14.25, 17.25)]
    assert first[:3] == [("F0a", 0.0, 1.0), ("F0b", 4.0, 5.0), ("I0b", 5.0, 7.0)]
    assert first[3:] == [("W0b", 7.0, 10.0), ("I0a", 11.5, 13.5), ("W0a", 13.5, 16.5)]
    assert done.makespan_s == 17.25
    assert done.busy_s == [12.0, 12.0]
    assert done.last_backward_end == [[16.5, 10.0], [17.25, 14.25]]  # gradients are complete once W has run


@given(pp=st.integers(1, 6), more=st.integers(0, 30), f=eighths, b=eighths, w=eighths)
def test_zero_bubble_h1_leaves_the_bubble_of_its_paper(pp, more, f, b, w):
    """(p - 1)(F + B - W) where W <= B and W <= F (Qi et al. 2024, table 1), and 1F1B's (p - 1)(F + B + W) with the same work."""
    w = min(f, b, w)
    m = 2 * pp + more
    times = equal(f, pp, 1), equal(b, pp, 1), [0.0] * pp
    h1 = walk("zero_bubble", pp, 1, m, *times, weight_s=equal(w, pp, 1))
    plain = walk("1f1b", pp, 1, m, *times, weight_s=equal(w, pp, 1))
    assert h1.makespan_s - m * (f + b + w) == (pp - 1) * (f + b - w)
    assert plain.makespan_s - m * (f + b + w) == (pp - 1) * (f + b + w)


def test_what_a_split_backward_holds_by_hand():
    """H1 on two stages, three micro-batches of 10 bytes, 4 of them held until W; 1 more in I, 2 in W.

    Stage 0: F0 F1 I0 W0 F2 I1 W1 I2 W2: two micro-batches when I0 starts, 20 + 1.
    Stage 1: F0 I0 F1 I1 W0 F2 I2 W1 W2: at I1 one whole and one half, 10 + 4 + 1; at W0 two halves only.
    """
    assert text(order("zero_bubble", 2, 1, 3)[1]) == "F0a I0a F1a I1a W0a F2a I2a W1a W2a"
    table = [equal(t, 2, 1) for t in (10.0, 0.0, 9.0)]
    found = peaks(
        "zero_bubble",
        2,
        1,
        3,
        *table,
        halves=SplitBytes(equal(4.0, 2, 1), equal(1.0, 2, 1), equal(2.0, 2, 1)),
    )
    assert [(p.bytes, p.saved_bytes, text([p.action])) for p in found] == [(21.0, 20.0, "I0a"), (15.0, 14.0, "I1a")]
    assert in_flight("zero_bubble", 2, 1, 3) == [2.0, 2.0]


def test_a_split_schedule_needs_the_weights_own_figures():
    times = equal(1.0, 2, 1), equal(1.0, 2, 1)
    with pytest.raises(ValueError, match="zero_bubble runs the weight gradients separately: weight_s is required"):
        walk("zero_bubble", 2, 1, 4, *times, [0.0])
    with pytest.raises(ValueError, match="zero_bubble runs the weight gradients separately: their bytes are required"):
        peaks("zero_bubble", 2, 1, 4, *times, times[0])
