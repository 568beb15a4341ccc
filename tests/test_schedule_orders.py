"""Pipeline schedules: the order of actions, what is in flight, and the peaks."""

from __future__ import annotations

from itertools import product

import pytest
from drawn_steps import equal, long_steps, shapes, text, timed
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime.schedule import (
    SCHEDULES,
    Action,
    Schedule,
    default_group,
    in_flight,
    order,
    peaks,
    walk,
)
from steptime.schedule.actions import looped


def test_orders_by_hand():
    assert [text(stage) for stage in order("gpipe", 2, 1, 2)] == ["F0a F1a B0a B1a"] * 2
    assert [text(stage) for stage in order("gpipe", 2, 2, 2)] == ["F0a F1a F0b F1b B1b B0b B1a B0a"] * 2
    assert [text(stage) for stage in order("1f1b", 2, 1, 3)] == ["F0a F1a B0a F2a B1a B2a", "F0a B0a F1a B1a F2a B2a"]
    # Narayanan et al. 2021, figure 4, bottom: the first device runs four forwards of its first chunk before its second
    assert text(order("interleaved", 4, 2, 8)[0][:11]) == "F0a F1a F2a F3a F0b F1b F2b F3b F4a F5a F6a"


@given(shapes())
def test_every_stage_runs_every_action_once_and_forward_first(shape):
    _, pp, vpp, microbatches = shape
    for actions in order(*shape):
        assert sorted(actions) == sorted(Action(k, m, c) for k, m, c in product("FB", range(microbatches), range(vpp)))
        at = {action: i for i, action in enumerate(actions)}
        assert all(at["F", m, c] < at["B", m, c] for m, c in product(range(microbatches), range(vpp)))
    assert len(order(*shape)) == pp


@given(st.integers(1, 6), st.integers(1, 12))
def test_one_chunk_per_stage_is_plain_1f1b(pp, microbatches):
    assert order("interleaved", pp, 1, microbatches) == order("1f1b", pp, 1, microbatches)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            ("zigzag", 2, 1, 2),
            "unknown pipeline schedule 'zigzag': one of gpipe, 1f1b, interleaved, zero_bubble, zbv, dualpipev",
        ),
        (("1f1b", 0, 1, 2), "pp=0"),
        (("gpipe", 2, 0, 2), "vpp=0"),
        (("1f1b", 2, 1, 0), "microbatches=0"),
        (("interleaved", 2, 2, 4, 0), "group=0"),
    ],
)
def test_bad_shapes_are_refused_in_one_line(shape, message):
    with pytest.raises(ValueError, match=message) as error:
        order(*shape)
    assert "\n" not in str(error.value)


@given(st.integers(1, 9), st.integers(1, 40))
def test_the_default_group_is_what_the_frameworks_run(pp, microbatches):
    group = default_group(pp, microbatches)
    assert group >= min(pp, microbatches)
    assert microbatches % group == 0 or microbatches % group >= pp
    if microbatches % pp == 0:
        assert group == pp
    rounds = max(1, microbatches // pp)
    if microbatches % rounds == 0:
        assert group == microbatches // rounds


def test_a_group_below_pp_deadlocks_and_says_so():
    with pytest.raises(ValueError, match="interleaved deadlocks: pp=4, vpp=2, microbatches=8, group=2"):
        walk("interleaved", 4, 2, 8, equal(1.0, 4, 2), equal(2.0, 4, 2), [0.0] * 4, group=2)


def test_a_new_schedule_is_one_row(monkeypatch):
    """One micro-batch at a time through the whole pipeline: nothing else has to know of it."""

    def one_by_one(pp, vpp, microbatches, group):
        return (tuple(Action(kind, m, 0) for m in range(microbatches) for kind in "FB"),) * pp

    monkeypatch.setitem(SCHEDULES, "one by one", Schedule(one_by_one, looped))
    done = walk("one by one", 3, 1, 4, equal(1.0, 3, 1), equal(2.0, 3, 1), [0.0] * 3)
    assert done.makespan_s == 4 * 3 * 3.0
    assert in_flight("one by one", 3, 1, 4) == [1.0, 1.0, 1.0]


# --- memory


def replay(actions, weights, fwd_extra, bwd_extra):
    """Peak of one stage by stepping through all its actions."""
    held, worst = 0.0, (-1.0, 0.0)
    for action in actions:
        held += weights[action.chunk] * (action.kind == "F")
        extra = (fwd_extra if action.kind == "F" else bwd_extra)[action.chunk]
        worst = max(worst, (held + extra, held))
        held -= weights[action.chunk] * (action.kind == "B")
    return worst


@settings(deadline=None)
@given(timed().map(lambda case: (case[0], None, *case[1:])) | long_steps())
def test_peaks_equal_a_replay_of_every_action(case):
    """The cases' tables serve as bytes here: weights, and one table of extras used both ways."""
    shape, group, weights, extra, *_ = case
    extra_back = extra[::-1]
    found = peaks(*shape, weights, extra, extra_back, group)
    for stage, (peak, actions) in enumerate(zip(found, order(*shape, group), strict=True)):
        total, _ = replay(actions, weights[stage], extra[stage], extra_back[stage])
        assert peak.bytes == total
        at = actions.index(peak.action)
        live = [sum(a.kind == "F" and a.chunk == c for a in actions[: at + 1]) for c in range(shape[2])]
        gone = [sum(a.kind == "B" and a.chunk == c for a in actions[:at]) for c in range(shape[2])]
        saved = sum(w * (f - b) for w, f, b in zip(weights[stage], live, gone, strict=True))
        own = (extra if peak.action.kind == "F" else extra_back)[stage][peak.action.chunk]
        assert (peak.saved_bytes, peak.bytes) == (saved, saved + own)


def test_peaks_by_hand():
    """1F1B on four stages: 10 bytes a micro-batch, 3 more in a forward, 5 more in a backward."""
    found = peaks("1f1b", 4, 1, 8, equal(10.0, 4, 1), equal(3.0, 4, 1), equal(5.0, 4, 1))
    assert [(p.bytes, p.saved_bytes) for p in found] == [(45.0, 40.0), (35.0, 30.0), (25.0, 20.0), (15.0, 10.0)]
    assert {p.action for p in found} == {Action("B", 0, 0)}


@given(st.integers(1, 8), st.integers(1, 20))
def test_in_flight_of_one_chunk(pp, microbatches):
    assert in_flight("gpipe", pp, 1, microbatches) == [microbatches] * pp
    assert in_flight("1f1b", pp, 1, microbatches) == [min(pp - stage, microbatches) for stage in range(pp)]


@given(st.integers(2, 8), st.integers(2, 4), st.integers(1, 30))
def test_in_flight_of_interleaved_chunks(pp, vpp, microbatches):
    """Megatron's warm-up, 2(p-r-1) + (v-1)group, and the forward that follows it, never more than there are."""
    group = default_group(pp, microbatches)
    expected = [min(microbatches * vpp, 2 * (pp - stage - 1) + (vpp - 1) * group + 1) / vpp for stage in range(pp)]
    assert in_flight("interleaved", pp, vpp, microbatches) == expected
    if microbatches % pp == 0:
        assert expected[0] == pytest.approx(min(microbatches, pp + (pp - 1) / vpp), rel=1e-15)
