"""Where a step's work around the pipeline lies in time, and what its actions send, on links of 1 B/s: two ranks, `physics_jobs`.

590,464 parameters of the model: a gather of bf16 sends half of 2 B each, a reduce-scatter of fp32 half of 4 B. A layer has
164,096, the root of FSDP 262,272.
"""

from __future__ import annotations

import pytest
from physics_jobs import SLIGHTLY, job, machine

from steptime.answer.result import estimate
from steptime.schedule.orders import shortened
from steptime.timing.timeline import Slice, Timeline

ALL, LAYER, ROOT = 590_464, 164_096, 262_272


def near(expected: float):
    return pytest.approx(expected, rel=SLIGHTLY, abs=1.0)


def timeline(software: str = "megatron-core", *, overlap: bool = False, **said) -> Timeline:
    on = machine(flops=1.0, memory=100.0, link=1.0)
    return Timeline(
        estimate(job(software, on=on, dp=2, performance={"overlap": {"dp": overlap}}, **({"seqlen": 8} | said))).timing
    )


def check(found: Slice, name: str, kind: str, start_s: float, end_s: float) -> None:
    assert (found.name, found.kind) == (name, kind)
    assert (found.start_s, found.end_s) == (near(start_s), near(end_s))


def test_before_and_after_the_pipeline():
    """Parameters are gathered, 590,464 s; then the pipeline runs; gradients are reduced, twice as long; the optimizer runs, then
    the host's own 15 ms.

    Per owned parameter of half of them it moves 30 B for AdamW and 12 B for clipping, and zeroes 4 B for each: at 100 B/s.
    """
    found = timeline(n_param_buckets=1)
    gather, reduction, update, host, *rest = found.around(0)
    end = ALL + found.timing.walk.makespan_s
    update_s = ALL * (42 / 2 + 4) / 100
    check(gather, "all-gather of parameters", "dp_comm", 0.0, ALL)
    check(reduction, "reduce-scatter of gradients", "dp_comm", end, end + 2 * ALL)
    check(update, "optimizer", "optimizer", end + 2 * ALL, end + 2 * ALL + update_s)
    check(host, "host, outside the micro-batches", "launch", update.end_s, update.end_s + 0.015)
    assert [one.kind for one in rest] == ["stragglers"] * len(rest)
    assert found.step_s == near((rest or [host])[-1].end_s)
    assert found.times[0].starts_s[0] == near(ALL)


def test_a_tied_embedding_is_summed_between_the_ends():
    """Of three stages the first and the last hold it: two all-reduce 131,072 fp32 gradients, and half of that is sent twice."""
    said = {"model": {"n_layers": 3, "tie_embeddings": True}, "pp": 3, "microbatches": 3}
    shown = Timeline(estimate(job(on=machine(link=1.0), **said)).timing)
    found = [[one for one in shown.around(stage) if one.kind == "embedding_comm"] for stage in range(3)]
    assert [len(of) for of in found] == [1, 0, 1]
    assert found[0][0].end_s - found[0][0].start_s == near(131_072 * 4)


def test_what_follows_the_pipeline_runs_in_turn():
    """Norms' gradients, the tied embedding, the optimizer: one after the other, and the stage in the middle waits meanwhile."""
    said = {
        "model": {"n_layers": 3, "tie_embeddings": True, "n_q_heads": 2},
        "pp": 3,
        "microbatches": 3,
        "tp": 2,
        "sp": True,
    }
    shown = Timeline(estimate(job(on=machine(link=1.0, memory=1.0), **said)).timing)
    first, middle = ([one for one in shown.around(at) if one.kind != "dp_comm"][:3] for at in (0, 1))
    norms, embedding, update = first
    assert [one.kind for one in (norms, embedding, update)] == ["tp_comm", "embedding_comm", "optimizer"]
    assert (norms.start_s, embedding.start_s, update.start_s) == (shown.end_s, norms.end_s, embedding.end_s)
    assert norms.end_s < embedding.end_s < update.end_s
    assert middle[:2] == [norms, update]


def test_reductions_of_every_micro_batch_are_one_slice():
    """ZeRO-2's four, each of 1,180,928 s."""
    found = timeline(n_param_buckets=1, zero_level=2, microbatches=4)
    [reductions] = [one for one in found.around(0) if "reduce" in one.name]
    end = found.end_s
    check(reductions, "4 x reduce-scatter of gradients", "dp_comm", end, end + 4 * 2 * ALL)


def test_a_device_alone_updates_at_once():
    """Nothing is reduced between the pipeline's end and the update, which slow memory makes long."""
    shown = Timeline(estimate(job(on=machine(memory=1.0))).timing)
    update, host = (one for one in shown.around(0) if one.kind != "dp_comm")
    assert (update.start_s, update.end_s) == (shown.end_s, near(shown.end_s + shown.timing.optimizer.device_s))
    assert (host.start_s, host.end_s) == (update.end_s, near(shown.end_s + shown.timing.optimizer_s))


def test_reductions_of_every_micro_batch_that_overlap_lie_in_a_row():
    """ZeRO-2's: one slice for all four, whose exposed part ends when the last is done, not one for each bucket."""
    found = timeline(overlap=True, n_param_buckets=1, zero_level=2, microbatches=4)
    [reductions] = [one for one in found.around(0) if "reduce" in one.name]
    assert reductions.name == "4 x reduce-scatter of gradients"
    assert reductions.end_s == pytest.approx(found.end_s + found.timing.dp.reduce_exposed_s)


def test_what_overlaps_lies_where_it_runs():
    """One bucket: gathered before the first forward, reduced when the last backward is done."""
    found = timeline(overlap=True, n_param_buckets=1)
    gather, reduction, *_ = found.around(0)
    check(gather, "all-gather of parameters", "dp_comm", 0.0, ALL)
    check(reduction, "reduce-scatter of gradients", "dp_comm", found.end_s, found.end_s + 2 * ALL)


HEAD, MIDDLE, EMBEDDING = 1_048_576, 147_712, 1_065_088
"""Buckets of one layer and a vocabulary of 8192, in backward order (`test_data_parallel`)."""
FORWARD_FLOPS = 16 * (163_840 + HEAD) + 16_384


def test_gathers_that_overlap_lie_where_they_end():
    """A forward of 1,500,000 s is spread over three buckets. The embedding's comes first; the middle's follows it; the head's is
    sent when forward, 1,065,088 s late, reaches the middle's after its first 500,000 s.
    """
    on = machine(flops=FORWARD_FLOPS / 1_500_000, link=1.0)
    said = {"dp": 2, "bucket_size_mb": 0.5, "model": {"n_layers": 1, "vocab_sz": 8192}}
    first, second, third, *_ = Timeline(estimate(job(on=on, **said)).timing).around(0)
    check(first, "all-gather of parameters", "dp_comm", 0.0, EMBEDDING)
    check(second, "all-gather of parameters", "dp_comm", EMBEDDING, EMBEDDING + MIDDLE)
    check(third, "all-gather of parameters", "dp_comm", EMBEDDING + 500_000, EMBEDDING + 500_000 + HEAD)


def test_broadcasts_overlap_nothing_and_reductions_do():
    """InternEvo's two buckets, the head's and the rest. Every bf16 byte of a broadcast passes the link once: 2 s an element, all
    before the pipeline. Half of the bf16 gradients leaves a rank: 1 s an element, the last bucket's after backward.
    """
    on = machine(flops=FORWARD_FLOPS / 1_500_000, link=1.0)
    said = {"dp": 2, "bucket_size_mb": 0.5, "zero_level": 1, "model": {"n_layers": 1, "vocab_sz": 8192}}
    shown = Timeline(estimate(job("internevo", on=on, **said)).timing)
    head, rest, early, late, *_ = shown.around(0)
    both = HEAD + MIDDLE + EMBEDDING
    check(head, "broadcast of parameters", "dp_comm", 0.0, 2 * HEAD)
    check(rest, "broadcast of parameters", "dp_comm", 2 * HEAD, 2 * both)
    assert shown.start_s == near(2 * both)
    assert early.end_s - early.start_s == near(HEAD)
    assert early.end_s < shown.end_s
    check(late, "reduce-scatter of gradients", "dp_comm", shown.end_s, shown.end_s + MIDDLE + EMBEDDING)


def test_what_fsdp_sends_in_each_direction():
    """Forward gathers root and two layers; backward gathers the layers again and reduces all three, 2 s an element."""
    found = timeline("fsdp2", microbatches=2, fsdp={"reduce_dtype": "fp32"})
    [there], [back] = found.traffic(0, 0, "F"), found.traffic(0, 0, "B")
    assert (there.axis, there.calls, there.busy_s) == ("dp", 3.0, near(ROOT + 2 * LAYER))
    assert (back.axis, back.calls, back.busy_s) == ("dp", 5.0, near(2 * LAYER + 2 * (ROOT + 2 * LAYER)))
    shown = found.timing.fsdp_exposed_s / 2
    assert there.exposed_s + back.exposed_s <= shown * (1 + SLIGHTLY)
    assert there.exposed_s / back.exposed_s == pytest.approx(there.busy_s / back.busy_s)


def test_a_backward_repeats_the_collectives_of_layers_that_run_again():
    """Two layers under tp 2 with sp: a gather and a reduce-scatter of attention and of the MLP each, 8 in all, run again."""
    layout = {"tp": 2, "sp": True, "model": {"n_q_heads": 2}, "n_param_buckets": 1}
    calls = {}
    for recompute in ("none", "full"):
        on, performance = machine(flops=1.0, link=1.0), {"activation_checkpointing_type": recompute}
        shown = Timeline(estimate(job(on=on, dp=2, performance=performance, **layout)).timing)
        calls[recompute] = [sum(of.calls for of in shown.traffic(0, 0, way) if of.axis == "tp") for way in ("F", "B")]
    assert calls["full"][0] == calls["none"][0]
    assert calls["full"][1] == calls["none"][1] + 8


def test_sends_of_two_stages():
    """2,048 B at 1 B/s between two stages, of each of two micro-batches: outputs down, gradients up, each from the end of its
    action on; the receiver runs once it has come.
    """
    on = machine(flops=1.0, link=1.0)
    shown = Timeline(estimate(job(on=on, pp=2, microbatches=2, performance={"overlap": {"pp": True}})).timing)
    ends = [{span.action: span for span in spans} for spans in shown.actions]
    found = list(shown.sent())
    assert [(one.stage, one.action.kind, one.action.microbatch, one.to_stage) for one in found] == [
        (0, "F", 0, 1), (0, "F", 1, 1), (1, "B", 0, 0), (1, "B", 1, 0),
    ]  # fmt: skip
    for one in found:
        assert one.to_action == one.action
        assert one.start_s == ends[one.stage][one.action].end_s
        assert one.end_s - one.start_s == near(2_048)
        assert one.used_s == ends[one.to_stage][one.to_action].start_s >= one.end_s * (1 - 1e-9)


@pytest.mark.parametrize(
    ("schedule", "vpp", "expected"),
    [
        ("1f1b", 1, (4, 1, 60)),  # three forwards ahead, then one pair, 60 pairs less
        ("interleaved", 2, (12, 4, 13)),  # a warm-up of 2 * 3 + 4 = 10 entries of 8: two groups of 4, then one
        ("zero_bubble", 1, (9, 1, 55)),  # 2 * 4, then one
        ("gpipe", 1, (64, None, 0)),
        ("zbv", 2, (64, None, 0)),
    ],
)
def test_a_long_step_is_shortened_to_one_repeat(schedule, vpp, expected):
    """64 micro-batches on four stages."""
    assert shortened(schedule, 4, vpp, 64, None, 1) == expected


def test_micro_batches_beyond_full_groups_stay():
    """66 in groups of 4 leave 2: one repeat beyond two groups, and these, are 14. Two stages have 2 * 1 + 2 = 4 entries of 4
    ahead: one group of 2, then one.
    """
    assert shortened("interleaved", 2, 2, 64, None, 1) == (4, 2, 30)
    assert shortened("interleaved", 4, 2, 66, 4, 1) == (14, 4, 13)
    assert shortened("interleaved", 4, 2, 12, 4, 1) == (12, 4, 0)
    assert shortened("interleaved", 4, 2, 64, 2, 1) == (64, 2, 0)  # groups smaller than the stages do not repeat
    for pp, vpp, count, group in (
        (4, 2, 64, 0),
        (0, 2, 64, 4),
        (4, 0, 64, 4),
        (4, 2, 0, 4),
    ):  # `order` raises for these
        assert shortened("interleaved", pp, vpp, count, group, 1) == (count, group, 0)


def test_whole_parameters_are_reduced_and_not_gathered():
    """Without ZeRO, two ranks: 590,464 main gradients of 4 B are summed in a ring, 2 * 1/2 of them over 1 B/s."""
    shown = Timeline(
        estimate(job(on=machine(link=1.0), dp=2, zero_level=0, performance={"overlap": {"dp": False}})).timing
    )
    slices = [one for one in shown.around(0) if one.name != "optimizer"]
    assert sum(one.end_s - one.start_s for one in slices) == pytest.approx(4 * 590_464, rel=1e-3)
