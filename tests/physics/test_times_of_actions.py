"""Start and end of the actions of a step, shifted and stretched, and what is added before and after them."""

from __future__ import annotations

import pytest
from physics_jobs import SLIGHTLY, job, machine

from steptime.answer.result import estimate
from steptime.schedule import walk
from steptime.timing.timeline import Timeline

WALKED = walk("1f1b", 2, 1, 2, [[2.0], [3.0]], [[5.0], [7.0]], [1.0, 0.0])
"""Stage 0 runs F0 F1 B0 B1, stage 1 F0 B0 F1 B1; a send takes 1 s. Stage 1: 3 to 6, 6 to 13, 13 to 16, 16 to 23."""


@pytest.mark.parametrize(("at_s", "stretch"), [(0.0, 1.0), (10.0, 1.5)])
def test_starts_and_ends(at_s, stretch):
    """Stage 0: 0 to 2, 2 to 4, B0 once stage 1's is there at 14, to 19, B1 at 24, to 29."""
    expected = [[(0, 2), (2, 4), (14, 19), (24, 29)], [(3, 6), (6, 13), (13, 16), (16, 23)]]
    for times, row in zip(WALKED.times(at_s, stretch), expected, strict=True):
        spans = [(at_s + stretch * start, at_s + stretch * end) for start, end in row]
        assert [(start, end) for _, start, end in times.spans] == spans
        assert [times.end_s(at) for at in range(4)] == [end for _, end in spans]
        assert times.starts_s == [start for start, _ in spans]


def test_ends_of_chunks_and_stages():
    """Busy 2 * 7 and 2 * 10 of 29 s."""
    assert (WALKED.makespan_s, WALKED.busy_s, WALKED.idle_s) == (29.0, [14.0, 20.0], [15.0, 9.0])
    assert WALKED.idle_fraction == 24 / 58
    assert (WALKED.first_forward_start, WALKED.last_backward_start) == ([[0.0], [3.0]], [[24.0], [16.0]])
    assert WALKED.last_backward_end == [[29.0], [23.0]]


def test_ends_of_a_long_step():
    """64 micro-batches keep stage 1 busy from 3 s on, 10 s each: its last backward starts at 636 s, stage 0's at 643 + 1 s."""
    found = walk("1f1b", 2, 1, 64, [[2.0], [3.0]], [[5.0], [7.0]], [1.0, 0.0])
    assert found.makespan_s == 649.0
    assert (found.last_backward_start, found.last_backward_end) == ([[644.0], [636.0]], [[649.0], [643.0]])
    assert found.first_forward_start == [[0.0], [3.0]]


def test_a_send_that_blocks_holds_its_stage():
    """Stage 0's forwards end at 3 and 6 with their sends; stage 1: F0 3 to 6, B0 to 13 and its send to 14, F1 to 17, B1 to 24,
    its send to 25; stage 0: B0 14 to 19, B1 25 to 30.
    """
    found = walk("1f1b", 2, 1, 2, [[2.0], [3.0]], [[5.0], [7.0]], [1.0, 0.0], blocking=True)
    assert (found.makespan_s, found.times()[0].end_s(-1)) == (30.0, 30.0)
    assert [start for _, start, _ in found.times()[1].spans] == [3.0, 6.0, 14.0, 17.0]


def test_exposed_communication_stretches_every_action():
    """FSDP's one gather and reduction on links of 1 B/s beside compute of 1 FLOP/s: every action takes as much longer as all."""
    on = machine(flops=1.0, link=1.0, node=2)
    timing = estimate(job("fsdp2", on=on, dp=2, microbatches=2, fsdp={"reduce_dtype": "fp32"})).timing
    shown = Timeline(timing)
    span, exposed = timing.walk.makespan_s, timing.fsdp_exposed_s
    assert exposed > 0
    assert shown.stretch == pytest.approx(1 + exposed / span)
    assert shown.start_s == 0.0
    assert shown.end_s == pytest.approx(span + exposed)
    assert shown.actions[0][-1].end_s == pytest.approx(shown.end_s, rel=SLIGHTLY)
