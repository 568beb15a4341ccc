"""States in which a stage holds the most, by hand: what it keeps of each chunk, whole, when an action runs."""

from __future__ import annotations

from physics_jobs import job, machine

from steptime.answer.result import estimate
from steptime.memory.overhead import overhead
from steptime.schedule.live import states
from steptime.timing.step_parts import pipeline


def test_states_of_two_chunks_whose_backwards_follow_all_forwards():
    """GPipe of three micro-batches: forwards of the first chunk and of the second, then backwards in reverse. A run of forwards
    holds the most at its last, one of backwards at its first; the first chunk's backwards find the second chunk's freed.
    """
    [found] = states("gpipe", 1, 2, 3)
    assert [(state.action.kind, state.action.chunk, state.held, state.whole) for state in found] == [
        ("F", 0, (3, 0), (3, 0)),
        ("F", 1, (3, 3), (3, 3)),
        ("B", 1, (3, 3), (3, 3)),
        ("B", 0, (3, 0), (3, 0)),
    ]


def test_a_single_stage_has_no_bubble():
    """One micro-batch runs after the other; of two stages, each of the same two seconds, one waits while the other computes."""
    assert pipeline(estimate(job(microbatches=3)).timing).bubble_s == 0.0
    on, model = machine(flops=1.0), {"n_layers": 2, "tie_embeddings": False}
    timing = estimate(job(on=on, pp=2, microbatches=3, model=model)).timing
    first, last = timing.chunks[0][0], timing.chunks[1][0]
    assert pipeline(timing).bubble_s == first.forward_s + first.backward_s
    assert last.forward_s > first.forward_s


def test_communicators_of_a_job():
    """A quarter of a GiB for each group that communicates, beside the half of the context: tp, pp, dp and cp together, cp, the
    tied table's; all-to-all inside of rings has two of a sequence.
    """
    for layout, groups in (
        ({}, 0),
        ({"tp": 2, "model": {"n_q_heads": 2}}, 1),
        ({"dp": 2}, 1),
        ({"pp": 2}, 1),
        ({"pp": 2, "model": {"tie_embeddings": True}}, 2),
        ({"cp": 2}, 2),
        ({"cp": 4, "seqlen": 16, "cp_comm_type": "a2a+p2p", "cp_a2a": 2, "model": {"n_q_heads": 4}}, 3),
    ):
        found = overhead(job(**layout))
        assert found == (2**29, groups * 2**28), layout


def test_nothing_is_hidden_on_a_device_alone():
    """It sends nothing: no part of the step's communication is exposed, and none overlaps compute."""
    time = estimate(job(on=machine(flops=1.0, memory=1.0))).time
    assert not any(time.hidden_s.values())
    assert not any(seconds for name, seconds in time.parts_s.items() if name.endswith("_comm"))
