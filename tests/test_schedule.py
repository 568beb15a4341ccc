"""Pipeline schedules: walks in time and the closed form."""

from __future__ import annotations

import csv
from graphlib import TopologicalSorter
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from drawn_steps import eighths, equal, long_steps, text, timed
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from steptime.schedule import (
    Action,
    bubble_fraction,
    in_flight,
    order,
    walk,
)
from steptime.schedule.orders import first_backward, shortened

CSV = Path(__file__).parent / "data" / "pipeline_schedules.csv"
TORCH_NAMES = {"GPipe": "gpipe", "1F1B": "1f1b", "Interleaved1F1B": "interleaved", "LoopedBFS": "gpipe"}


def rows():
    with CSV.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["schedule"] in TORCH_NAMES]


# --- time


@pytest.mark.parametrize("row", rows(), ids=lambda r: "-".join(list(r.values())[:4]))
def test_torch_rows(row):
    pp, microbatches, vpp = int(row["pp"]), int(row["microbatches"]), int(row["virtual_stages"])
    shape = TORCH_NAMES[row["schedule"]], pp, vpp, microbatches
    done = walk(*shape, equal(1 / vpp, pp, vpp), equal(2 / vpp, pp, vpp), [0.0] * pp)
    assert done.makespan_s == float(row["makespan_tf1_tb2"])
    assert max(done.idle_s) == float(row["bubble_time"])
    assert round(done.idle_fraction, 4) == float(row["bubble_over_makespan"])
    assert round(bubble_fraction(pp, vpp, microbatches), 4) == float(row["closed_(p-1)/(vm+p-1)"])
    assert max(in_flight(*shape)) == float(row["peak_inflight_microbatches_worst_rank"])


def spans_of(done):
    return [times.spans for times in done.times()]


def test_unequal_stages_and_sends_by_hand():
    """Stage 1 twice as slow as stage 0, two micro-batches, 1F1B: drawn on paper."""
    done = walk("1f1b", 2, 1, 2, [[1.0], [2.0]], [[2.0], [4.0]], [0.5, 0.0], [0.25, 0.0])
    # stage 0: F0 0-1, F1 1-2, then B0 and B1;  stage 1: F0 arrives at 1.5
    first, second = [[(text([a]), start, end) for a, start, end in stage] for stage in spans_of(done)]
    assert second == [("F0a", 1.5, 3.5), ("B0a", 3.5, 7.5), ("F1a", 7.5, 9.5), ("B1a", 9.5, 13.5)]
    assert first == [("F0a", 0.0, 1.0), ("F1a", 1.0, 2.0), ("B0a", 7.75, 9.75), ("B1a", 13.75, 15.75)]
    assert done.makespan_s == 15.75
    assert done.busy_s == [6.0, 12.0]
    assert done.idle_s == [9.75, 3.75]
    assert done.first_forward_start == [[0.0], [1.5]]
    assert (done.last_backward_start, done.last_backward_end) == ([[13.75], [9.5]], [[15.75], [13.5]])


def test_a_blocking_send_holds_its_sender():
    free = walk("1f1b", 2, 1, 2, [[1.0], [1.0]], [[1.0], [1.0]], [0.5])
    held = walk("1f1b", 2, 1, 2, [[1.0], [1.0]], [[1.0], [1.0]], [0.5], blocking=True)
    # stage 0 starts its second forward at once, or when the first one's output is away
    assert [span.start_s for span in spans_of(free)[0][:2]] == [0.0, 1.0]
    assert [span.start_s for span in spans_of(held)[0][:2]] == [0.0, 1.5]
    # stage 1 has sent the gradient of micro-batch 0 before it starts micro-batch 1; nothing follows B1 but its own send
    assert [span.start_s for span in spans_of(held)[1]] == [1.5, 2.5, 4.0, 5.0]
    assert [spans[-1].end_s for spans in spans_of(held)] == [7.5, 6.0]
    assert held.makespan_s == 7.5
    assert held.busy_s == free.busy_s == [4.0, 4.0]


def test_the_wrap_around_boundary_is_sent_over_once_per_extra_chunk():
    none = walk("interleaved", 2, 2, 1, equal(1.0, 2, 2), equal(2.0, 2, 2), [0.0, 0.0])
    wrap = walk("interleaved", 2, 2, 1, equal(1.0, 2, 2), equal(2.0, 2, 2), [0.0, 0.5], [0.0, 0.25])
    assert (none.makespan_s, wrap.makespan_s) == (12.0, 12.75)
    alone = walk("interleaved", 1, 2, 3, equal(1.0, 1, 2), equal(2.0, 1, 2), [9.0])
    assert alone.makespan_s == 18.0


@pytest.mark.parametrize(
    ("forward", "send", "message"),
    [
        (equal(1.0, 2, 1), [0.0, 0.0], r"must be \[2\]\[2\]"),
        (equal(1.0, 3, 2), [0.0, 0.0], r"must be \[2\]\[2\]"),
        ([[1.0, 1.0], [1.0]], [0.0, 0.0], r"must be \[2\]\[2\]"),
        (equal(1.0, 2, 2), [0.0], "one for each of 2 boundaries, not 1"),
        (equal(1.0, 2, 2), [0.0] * 4, "one for each of 2 boundaries, not 4"),
    ],
)
def test_lists_of_the_wrong_length(forward, send, message):
    with pytest.raises(ValueError, match=message):
        walk("interleaved", 2, 2, 4, forward, equal(2.0, 2, 2), send)


def sent(shape, stage, action, send_s, send_back_s):
    """Seconds of the send that follows an action, 0 where nothing is sent."""
    _, pp, vpp, _ = shape
    model_chunk = action.chunk * pp + stage
    if pp == 1 or model_chunk == (pp * vpp - 1 if action.kind == "F" else 0):
        return 0.0
    return send_s[stage] if action.kind == "F" else send_back_s[(stage - 1) % pp]


def starts_by_definition(shape, forward_s, backward_s, send_s, send_back_s, blocking, group=None):
    """Start of every action from the precedence rules alone, sorted by the standard library."""
    _, pp, vpp, _ = shape
    cost = {"F": forward_s, "B": backward_s}
    sends = {"F": send_s, "B": send_back_s}
    waits = {}
    for stage, row in enumerate(order(*shape, group)):
        for before, action in zip((None, *row), row, strict=False):
            own = 0.0 if before is None else sent(shape, stage, before, *sends.values()) * blocking
            waits[stage, action] = {} if before is None else {(stage, before): own}
            model_chunk = action.chunk * pp + stage + (-1 if action.kind == "F" else 1)
            if 0 <= model_chunk < pp * vpp:
                source = model_chunk % pp, action._replace(chunk=model_chunk // pp)
                waits[stage, action][source] = sent(shape, *source, *sends.values())
    start = {}
    for node in TopologicalSorter(waits).static_order():
        ends = [start[s, a] + cost[a.kind][s][a.chunk] + extra for (s, a), extra in waits[node].items()]
        start[node] = max(ends, default=0.0)
    return start


@given(timed(), st.booleans())
def test_every_action_starts_as_soon_as_the_rules_allow(case, blocking):
    shape, forward_s, backward_s, send_s, send_back_s = case
    expected = starts_by_definition(shape, forward_s, backward_s, send_s, send_back_s, blocking)
    done = walk(*shape, forward_s, backward_s, send_s, send_back_s, blocking=blocking)
    cost = {"F": forward_s, "B": backward_s}
    for stage, spans in enumerate(spans_of(done)):
        for action, start, end in spans:
            assert start == expected[stage, action]
            assert end == start + cost[action.kind][stage][action.chunk]
    assert done.makespan_s == max(span.end_s for spans in spans_of(done) for span in spans)


TWO_PACES = ("interleaved", 2, 2, 12), None, [[1.0, 0.0], [8.0, 1.0]], [[8.0, 8.0], [1.0, 0.0]], [0.0] * 2, [0.0] * 2
"""The actions of its repeats come 33 s after those of the repeat before, or 34 s: it has to be walked in full."""


@settings(deadline=None, max_examples=60)
@given(long_steps(), st.booleans())
@example(TWO_PACES, False)
def test_a_step_whose_middle_repeats_comes_out_as_if_walked_in_full(case, blocking):
    """To the last bit: makespan, idle time and every time that is asked of a chunk, against starts from the rules alone."""
    shape, group, forward_s, backward_s, send_s, send_back_s = case
    _, pp, vpp, microbatches = shape
    start = starts_by_definition(shape, forward_s, backward_s, send_s, send_back_s, blocking, group)
    done = walk(*shape, forward_s, backward_s, send_s, send_back_s, blocking=blocking, group=group)
    cost = {"F": forward_s, "B": backward_s}
    end = {(s, a): at + cost[a.kind][s][a.chunk] for (s, a), at in start.items()}
    held = {(s, a): at + sent(shape, s, a, send_s, send_back_s) * blocking for (s, a), at in end.items()}
    assert done.makespan_s == max(held.values())
    ends = [max(at for (s, _), at in end.items() if s == stage) for stage in range(pp)]
    assert [spans[-1].end_s for spans in spans_of(done)] == ends
    busy = [microbatches * (sum(forward_s[stage]) + sum(backward_s[stage])) for stage in range(pp)]
    assert done.busy_s == busy
    assert done.idle_s == [done.makespan_s - seconds for seconds in busy]
    for stage, chunk in product(range(pp), range(vpp)):
        last = max(range(microbatches), key=lambda m: start[stage, Action("B", m, chunk)])
        assert done.last_backward_start[stage][chunk] == start[stage, Action("B", last, chunk)]
        assert done.last_backward_end[stage][chunk] == end[stage, Action("B", last, chunk)]
        first = min(start[stage, Action("F", m, chunk)] for m in range(microbatches))
        assert done.first_forward_start[stage][chunk] == first


@settings(deadline=None)
@given(long_steps())
def test_the_middle_of_a_long_step_repeats(case):
    """Whatever the times: taking a period out of the middle leaves every stage's other actions as they are, and in order."""
    (schedule, pp, vpp, microbatches), group, *_ = case
    short, period, fewer = shortened(schedule, pp, vpp, microbatches, group, 1)
    assume(fewer)
    for long, less in zip(
        order(schedule, pp, vpp, microbatches, group), order(schedule, pp, vpp, short, period), strict=True
    ):
        at = first_backward(less) - 1
        length = 2 * vpp * period
        later = [a._replace(microbatch=a.microbatch + fewer * period) for a in less[at:]]
        assert long[:at] == less[:at]
        assert list(long[at + fewer * length :]) == later
        for i in range(at, at + fewer * length):
            assert long[i + length] == long[i]._replace(microbatch=long[i].microbatch + period)


def test_equal_stages_are_walked_through_three_repeats_only():
    """64 stages, 512 micro-batches: (m + p - 1)(1 + 2), from a graph of 66 micro-batches."""
    done = walk("1f1b", 64, 1, 512, equal(1.0, 64, 1), equal(2.0, 64, 1), [0.0] * 64)
    assert done.makespan_s == (512 + 63) * 3.0
    assert len(done._run.free) == 2 * 64 * 66 + 1
    assert sum(map(len, spans_of(done))) == 2 * 64 * 512


@given(timed())
def test_the_summary_agrees_with_the_spans(case):
    shape, *times = case
    done = walk(*shape, *times)
    for stage, spans in enumerate(spans_of(done)):
        assert done.busy_s[stage] == sum(span.end_s - span.start_s for span in spans)
        assert done.idle_s[stage] == done.makespan_s - done.busy_s[stage] >= 0
        for chunk in range(shape[2]):
            forwards = [span for span in spans if span.action.chunk == chunk and span.action.kind == "F"]
            backwards = [span for span in spans if span.action.chunk == chunk and span.action.kind == "B"]
            assert done.first_forward_start[stage][chunk] == min(span.start_s for span in forwards)
            assert done.last_backward_start[stage][chunk] == max(span.start_s for span in backwards)
            assert done.last_backward_end[stage][chunk] == max(span.end_s for span in backwards)


@given(timed())
def test_lower_bounds_of_the_makespan(case):
    """No stage's own work and no micro-batch's own path, sends included, can take longer than the whole."""
    shape, forward_s, backward_s, send_s, send_back_s = case
    _, pp, vpp, _ = shape
    done = walk(*shape, forward_s, backward_s, send_s, send_back_s)
    boundaries = [b % pp for b in range(pp * vpp - 1)] if pp > 1 else []
    path = sum(map(sum, forward_s)) + sum(map(sum, backward_s)) + sum(send_s[b] + send_back_s[b] for b in boundaries)
    assert done.makespan_s >= max(*done.busy_s, path)


@given(timed())
def test_twice_as_slow_takes_twice_as_long(case):
    shape, forward_s, backward_s, send_s, send_back_s = case
    double = [[2 * t for t in row] for row in forward_s], [[2 * t for t in row] for row in backward_s]
    once = walk(*shape, forward_s, backward_s, send_s, send_back_s)
    twice = walk(*shape, *double, [2 * t for t in send_s], [2 * t for t in send_back_s])
    assert twice.makespan_s == 2 * once.makespan_s
    assert twice.idle_fraction == once.idle_fraction


@given(timed(), st.integers(0, 4))
def test_a_slower_chunk_never_helps(case, stage):
    shape, forward_s, *rest = case
    assume(stage < shape[1])
    slower = [[t + (1.0 if r == stage else 0.0) for t in row] for r, row in enumerate(forward_s)]
    assert walk(*shape, slower, *rest).makespan_s >= walk(*shape, forward_s, *rest).makespan_s


# --- closed form


@given(
    st.sampled_from(("gpipe", "1f1b", "interleaved")),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 20),
    eighths,
    eighths,
)
def test_closed_form_is_the_walk_of_equal_chunks(schedule, pp, vpp, microbatches, forward, backward):
    assume(forward + backward > 0)
    assume(vpp == 1 or microbatches >= pp)
    done = walk(schedule, pp, vpp, microbatches, equal(forward, pp, vpp), equal(backward, pp, vpp), [0.0] * pp)
    assert done.makespan_s == (vpp * microbatches + pp - 1) * (forward + backward)
    assert done.idle_fraction == pytest.approx(bubble_fraction(pp, vpp, microbatches), rel=1e-15)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 12))
def test_more_chunks_never_lengthen_the_bubble(pp, vpp, more):
    """The same model cut finer: 60 units of forward per stage, equal chunks, free sends, at least pp micro-batches."""
    bubbles = [
        max(walk("interleaved", pp, v, pp + more, equal(60 / v, pp, v), equal(120 / v, pp, v), [0.0] * pp).idle_s)
        for v in (vpp, vpp + 1)
    ]
    assert bubbles[1] <= bubbles[0]


def test_closed_form_is_a_bound_below_pp_microbatches_and_in_short_groups():
    """Chunks of 1 + 2 on four stages with two chunks each: three micro-batches, then six in groups of four and two."""
    done = walk("interleaved", 4, 2, 3, equal(1.0, 4, 2), equal(2.0, 4, 2), [0.0] * 4)
    assert (done.makespan_s, (2 * 3 + 3) * 3.0) == (30.0, 27.0)
    done = walk("interleaved", 4, 2, 6, equal(1.0, 4, 2), equal(2.0, 4, 2), [0.0] * 4, group=4)
    assert (done.makespan_s, (2 * 6 + 3) * 3.0) == (55.0, 45.0)


def test_closed_form_takes_columns():
    pp, vpp, m = np.array([1.0, 4.0, 8.0]), np.array([1.0, 1.0, 2.0]), np.array([8.0, 4.0, 16.0])
    column = bubble_fraction(pp, vpp, m)
    assert column.tolist() == [bubble_fraction(*row) for row in zip(pp.tolist(), vpp.tolist(), m.tolist(), strict=True)]
    assert column[0] == 0.0
