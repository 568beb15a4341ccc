"""States in which a stage holds the most, by hand: what it keeps of each chunk, whole, when an action runs."""

from __future__ import annotations

import pytest
from physics_jobs import job, machine

from steptime.answer.result import estimate
from steptime.job.assembly import Assembly
from steptime.memory.buffers import (
    at_peak,
    batches,
    common_buffers,
    deferred_wgrad_bytes,
    earlier_logits_bytes,
    grow_only,
    of_pipeline,
    one_buffer,
    step_change,
    workspaces,
)
from steptime.memory.overhead import overhead
from steptime.schedule import SplitBytes, order, peaks
from steptime.schedule.live import states
from steptime.timing.step_parts import pipeline


def test_states_of_two_chunks_whose_backwards_follow_all_forwards():
    """GPipe of three micro-batches: forwards of the first chunk and of the second, then backwards in reverse. A run of forwards
    holds the most at its last, one of backwards at its first; the first chunk's backwards find the second chunk's freed.
    """
    [found] = states("gpipe", 1, 2, 3)
    assert [(state.action.kind, state.action.chunk, state.in_flight, state.whole) for state in found] == [
        ("F", 0, (3, 0), (3, 0)),
        ("F", 1, (3, 3), (3, 3)),
        ("B", 1, (3, 3), (3, 3)),
        ("B", 0, (3, 0), (3, 0)),
    ]


def test_peaks_of_halves():
    """ZB-H1 on two stages, two micro-batches, each of 10 B saved, of which its I leaves 4; an F adds 1 B, an I 3, a W 2.

    Stage 0, F0 F1 I0 W0 I1 W1: both in full at I0, 20 + 3. Stage 1, F0 I0 F1 I1 W0 W1: at I1 one in full and half of the other,
    10 + 4 + 3.
    """
    halves = SplitBytes([[4.0], [4.0]], [[3.0], [3.0]], [[2.0], [2.0]])
    found = peaks("zero_bubble", 2, 1, 2, [[10.0]] * 2, [[1.0]] * 2, [[0.0]] * 2, halves=halves)
    assert [(peak.bytes, peak.saved_bytes, peak.action[:2]) for peak in found] == [
        (23, 20, ("I", 0)),
        (17, 14, ("I", 1)),
    ]
    early = SplitBytes(
        [[9.0], [9.0]], [[0.0], [0.0]], [[8.0], [8.0]]
    )  # W0 beside two halves: 18 + 8, for 10 + 9 before
    last = peaks("zero_bubble", 2, 1, 2, [[10.0]] * 2, [[0.0]] * 2, [[0.0]] * 2, halves=early)[1]
    assert (last.bytes, last.saved_bytes, last.action[:2]) == (26, 18, ("W", 0))


@pytest.mark.parametrize(
    ("software", "layout", "expected"),
    [
        # a buffer for the input of every micro-batch, and one for the gradient of its output
        ("torch", {}, [(3,), (6,), (3,)]),
        # of two chunks on each stage, the last of the model and the first lack one
        ("torch", {"vpp": 2, "schedule": "interleaved"}, [(9,), (12,), (9,)]),
        # the last input and its gradient; the gradient sent last, and a receive
        ("megatron-core", {}, [(), (2, 2), (2, 2)]),
        # of each chunk; one more under way
        ("megatron-core", {"vpp": 2, "schedule": "interleaved"}, [(2, 3), (4, 3), (4, 3)]),
    ],
)
def test_tensors_that_pass_between_stages(software, layout, expected):
    """In units of 2,048 B, 8 tokens of 128 values in bf16. Three stages, three micro-batches (buffers.py names the sources)."""
    assembly = Assembly(job(software, pp=3, microbatches=3, model={"n_layers": 6}, **layout))
    found = [tuple(one.bytes / 2_048 for one in of_pipeline(assembly, chunks)) for chunks in assembly.stages]
    assert found == expected
    assert not of_pipeline(Assembly(job(software)), Assembly(job(software)).stages[0])


@pytest.mark.parametrize(
    ("software", "expected"), [("torch", [(True, True)]), ("megatron-core", [(True, False), (False, True)])]
)
def test_when_they_are_held(software, expected):
    """torch's buffers always. Of Megatron's last stage the last input and its gradient between steps, since at a step's peak
    they are those of its micro-batches; what is under way at the peak alone.
    """
    assembly = Assembly(job(software, pp=3, microbatches=3, model={"n_layers": 6}))
    assert [(one.stays, one.at_peak) for one in of_pipeline(assembly, assembly.stages[2])] == expected


def test_a_single_stage_has_no_bubble():
    """One micro-batch runs after the other; of two stages, each of the same two seconds, one waits while the other computes."""
    assert pipeline(estimate(job(microbatches=3)).timing).bubble_s == 0.0
    on, model = machine(flops=1.0), {"n_layers": 2, "tie_embeddings": False}
    timing = estimate(job(on=on, pp=2, microbatches=3, model=model)).timing
    first, last = timing.chunks[0][0], timing.chunks[1][0]
    assert pipeline(timing).bubble_s == pytest.approx(first.forward_s + first.backward_s, rel=1e-15)
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
        assert found == (2**29, groups * 2**28, 0.0), layout


def test_nothing_is_hidden_on_a_device_alone():
    """It sends nothing: no part of the step's communication is exposed, and none overlaps compute."""
    time = estimate(job(on=machine(flops=1.0, memory=1.0))).time
    assert not any(time.hidden_s.values())
    assert not any(seconds for name, seconds in time.parts_s.items() if name.endswith("_comm"))


def test_what_the_optimizer_step_holds_instead():
    """It lacks 1 B that a micro-batch holds for itself, and has 20 B that come with it; 300 B are there all the time."""
    found = [
        *one_buffer("a", 1.0, "s"),
        *one_buffer("b", 20.0, "s", stays=True, at_peak=False),
        *one_buffer("c", 300.0, "s", stays=True),
        *one_buffer("d", 0.0, "s"),
    ]
    assert found[0] == ("a", 1.0, False, True, "s", False)
    assert (at_peak(found), step_change(found), len(found)) == (301.0, 19.0, 3)


def test_the_first_micro_batches_hold_the_most():
    """1F1B of 64 on two stages: stage 0 holds two from F1 on, first in B0; stage 1 one, F0, B0. Later ones hold no more."""
    found = [[(*state.action[:2], state.in_flight) for state in stage] for stage in states("1f1b", 2, 1, 64)]
    assert found == [[("F", 1, (2,)), ("B", 0, (2,))], [("F", 0, (1,)), ("B", 0, (1,))]]


def test_of_equal_moments_the_first_is_named():
    """Two micro-batches of 10 B are held in F1 and in B0, neither of which needs more."""
    nothing = [[0.0], [0.0]]
    found = peaks("1f1b", 2, 1, 4, [[10.0], [10.0]], nothing, nothing)
    assert [(peak.bytes, *peak.action[:2]) for peak in found] == [(20.0, "F", 1), (10.0, "F", 0)]


@pytest.mark.parametrize(("microbatches", "bytes_"), [(1, 0), (2, 20_480), (3, 43_008), (4, 45_056)])
def test_operands_that_wait_for_the_heads_gradient(microbatches, bytes_):
    """Of up to two earlier micro-batches: logits, 8 * 1024 in bf16, the head's input, and the stage's with its gradient, 2,048 B
    each: 22,528 B. While all wait the last one's gradient is the one sent last, counted elsewhere: 2,048 B less.
    """
    layout = {"pp": 2, "microbatches": microbatches, "performance": {"deferred_head_wgrads": 2}}
    assembly = Assembly(job("megatron-core", **layout))
    assert [deferred_wgrad_bytes(assembly, chunks) for chunks in assembly.stages] == [0, bytes_]


def test_micro_batches_that_stay():
    """Three of two sequences of 8 tokens: index, label and position in 8 B each, a weight in 4: 28 B a token. No mask is made."""
    assembly = Assembly(
        job("megatron-core", microbatches=3, batch=2, performance={"batches_stay": True, "attention_mask": False})
    )
    [found] = batches(assembly, assembly.chunks)
    assert (found.bytes, found.stays) == (3 * 28 * 16, True)


def test_workspaces_stay():
    """On Hopper each of TransformerEngine's has 32 MiB (module/base.py:77): two of its own, three of grouped products."""
    moe = {"n_experts": 4, "experts_per_token": 1, "expert_inter_sz": 256}
    said = {"grouped_workspaces": 3, "te_workspaces": 2, "moe": {"grouped_gemm": True}}
    found = workspaces(job(on=machine(compute_capability=9.0), model={"moe": moe}, performance=said))
    assert [one.bytes / 2**20 for one in found[1:]] == [64, 96]
    assert all(one.stays and one.at_peak for one in found)


def test_what_megatron_keeps_from_step_to_step():
    """tp 2 with sp, experts overlapped: the buffer of gathers, 8 tokens of 128 in bf16; dummy gradients; routing maps. Graphs
    of two layers' routers, each with its rank's half of the input and the gradient of it, are freed before the peak.
    """
    moe, overlap = {"n_experts": 4, "experts_per_token": 1, "expert_inter_sz": 256}, {"overlap": {"ep": True}}
    layout = {"model": {"moe": moe, "n_q_heads": 2}, "tp": 2, "ep": 2, "dp": 2, "microbatches": 2}
    assembly = Assembly(job(performance=overlap, **layout))
    found = [common_buffers(assembly)[-1], *grow_only(assembly, 0)]
    assert [(one.stays, one.at_peak) for one in found] == [(True, True)] * 3 + [(True, False)]
    assert (found[0].bytes, found[-1].bytes) == (2_048, 2 * 2 * 1_024)


@pytest.mark.parametrize(
    ("schedule", "pp", "vpp"), [("zero_bubble", 2, 1), ("zero_bubble", 4, 1), ("1f1b", 4, 1), ("interleaved", 2, 2)]
)
def test_states_of_a_long_step_are_those_of_the_whole_one(schedule, pp, vpp):
    """Of 16 micro-batches, counted one action after the other, a forward's own included: what a chunk holds until its last
    backward, and in full until its first. Shortened to one repeat, a step names the same micro-batches.
    """
    for stage, row in zip(states(schedule, pp, vpp, 16), order(schedule, pp, vpp, 16), strict=True):
        for state in stage:
            at = row.index(state.action)
            done = row[: at + 1] if state.action.kind == "F" else row[:at]

            def count(kinds: str, chunk: int, done=done) -> int:
                return sum(one.kind in kinds and one.chunk == chunk for one in done)

            assert state.in_flight == tuple(count("F", chunk) - count("BW", chunk) for chunk in range(vpp)), state
            assert state.whole == tuple(count("F", chunk) - count("BI", chunk) for chunk in range(vpp)), state


@pytest.mark.parametrize(("microbatches", "bytes_"), [(1, 0), (2, 8 * 1_024 * 2)])
def test_logits_of_the_micro_batch_before(microbatches, bytes_):
    """litgpt's loop holds them until the next forward replaces them: 8 * 1,024 in bf16, where there was one before."""
    assembly = Assembly(job("litgpt-ddp", microbatches=microbatches, performance={"param_dtype": "bf16"}))
    assert earlier_logits_bytes(assembly, assembly.stages[0]) == bytes_
