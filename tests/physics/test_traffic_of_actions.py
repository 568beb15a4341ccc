"""What a pipeline's actions send to other stages, and the collectives inside of an action, by hand.

A layer's input is 8 tokens of 128 values in bf16, 2,048 B (`physics_jobs`).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from physics_jobs import SLIGHTLY, job, machine

from steptime.answer.result import estimate
from steptime.fsdp.seconds import ShardedPass, StepSeconds
from steptime.timing.timeline import Timeline, Traffic


def near(expected: float):
    return pytest.approx(expected, rel=SLIGHTLY)


def test_chunks_in_a_loop_over_three_stages():
    """Two chunks on each of three stages, in nodes of two: stages 0 and 1 share a node, links inside are twice as fast. Each of
    the five boundaries between six chunks is crossed once forward and once backward; the third, from stage 2 to stage 0, leads
    from the first chunks to the second ones.
    """
    on = machine(flops=1.0, link=1.0, outside=0.5, node=2)
    layout = {"pp": 3, "vpp": 2, "schedule": "interleaved", "microbatches": 3, "model": {"n_layers": 6}}
    shown = Timeline(estimate(job(on=on, performance={"overlap": {"pp": True}}, **layout)).timing)
    ends = [{span.action: span for span in spans} for spans in shown.actions]
    found = {"F": set(), "B": set()}
    for one in shown.sent():
        assert one.to_action == one.action._replace(chunk=one.to_action.chunk)
        assert one.start_s == ends[one.stage][one.action].end_s
        assert one.used_s == ends[one.to_stage][one.to_action].start_s
        boundary = (one.stage, one.action.chunk), (one.to_stage, one.to_action.chunk)
        found[one.action.kind].add((*boundary, round(one.end_s - one.start_s, -1)))
    down = {
        ((0, 0), (1, 0), 2050.0), ((1, 0), (2, 0), 4100.0), ((2, 0), (0, 1), 4100.0),
        ((0, 1), (1, 1), 2050.0), ((1, 1), (2, 1), 4100.0),
    }  # fmt: skip
    assert found == {"F": down, "B": {(to, at, seconds) for at, to, seconds in down}}
    assert len(list(shown.sent())) == 3 * 2 * 5


def test_a_pair_sends_both_outputs_when_both_have_run():
    """DualPipeV over two stages, chunks in a V: 0, 1, 1, 0. Per micro-batch the first and third boundary are crossed both ways.

    Stage 1, of four micro-batches: F0 F0' F1 F1' (chunks 0 and 1), then the pair F2 B0' and the pair F2' B0 and so on
    (DeepSeek-AI 2024, figure 5; schedules.py, ScheduleDualPipeV): F2' is sent to stage 0 when B0 is done, and F1' by itself.
    """
    layout = {"pp": 2, "vpp": 2, "schedule": "dualpipev", "microbatches": 4, "model": {"n_layers": 4}}
    layout["fsdp"] = {"reshard_after_forward": False}
    on = machine(flops=1.0, link=1.0)
    shown = Timeline(estimate(job("fsdp2", on=on, dp=2, performance={"overlap": {"pp": True}}, **layout)).timing)
    sent = {(one.stage, one.action): one for one in shown.sent()}
    ways = [((0, 0, "F"), (1, 0)), ((1, 1, "F"), (0, 1)), ((0, 1, "B"), (1, 1)), ((1, 0, "B"), (0, 0))]
    assert len(sent) == 4 * len(ways)
    for (stage, action), one in sent.items():
        to = dict(ways)[stage, action.chunk, "F" if action.kind == "F" else "B"]
        assert (one.to_stage, one.to_action.chunk) == to
        assert one.end_s - one.start_s == near(2_048 * shown.stretch)
    order = [span.action for span in shown.actions[1]]
    ends = {span.action: span.end_s for span in shown.actions[1]}
    alone, paired = (next(a for a in order if (a.kind, a.microbatch, a.chunk) == ("F", n, 1)) for n in (1, 2))
    partner = order[order.index(paired) + 1]
    assert partner[:3] == ("B", 0, 0)
    assert sent[1, paired].start_s == ends[partner] > ends[paired]
    assert sent[1, alone].start_s == ends[alone]


def test_collectives_of_a_forward_and_of_a_backward():
    """Two layers on tp 2 with sp, all exposed at 1,024 B/s; a gather or a reduce-scatter of two ranks passes half of 2,048 B.

    Forward: four in a layer, one behind the embedding, one before the head, and three all-reduces of the loss's sums, one fp32
    number a token: 2 * 1/2 of 32 B. Backward: four gradients and two inputs gathered again in a layer, one at the embedding, the
    head's input again and its gradient.
    """
    layout = {"tp": 2, "model": {"n_q_heads": 2}, "performance": {"overlap": {"tp": False}}}
    shown = Timeline(estimate(job(on=machine(link=1_024.0), **layout)).timing)  # a second for most of them
    for way, calls, seconds in (("F", 8 + 2 + 3, 10 + 3 * 32 / 1_024), ("B", 12 + 1 + 2, 15)):
        [found] = shown.traffic(0, 0, way)
        assert (found.axis, found.calls) == ("tp", calls)
        assert found.busy_s == pytest.approx(seconds, rel=5e-3)
        assert found.exposed_s == pytest.approx(seconds, rel=5e-3)


def test_calls_of_a_ring():
    """Of 8 tokens on 4 ranks each sends its 2 tokens' keys and values, 2 * 2 * 128 in bf16 = 1,024 B, on three times in a layer's
    forward. In backward four times: three times those, three times their gradients (AttnFuncWithCPAndKVP2P).
    """
    shown = Timeline(estimate(job(on=machine(link=1.0), model={"n_q_heads": 4}, cp=4)).timing)
    ([there], [back]) = (shown.traffic(0, 0, way) for way in "FB")
    assert (there.calls, there.busy_s) == (2 * 3, near(2 * 3 * 1_024))
    assert (back.calls, back.busy_s) == (2 * 4, near(2 * (3 + 3) * 1_024))


def test_collectives_of_the_chunks_of_a_pipeline():
    """Forward of one layer each in two chunks of three stages: four; the first adds the embedding's, the last the head's and the
    three sums of its loss.
    """
    layout = {"tp": 2, "pp": 3, "vpp": 2, "schedule": "interleaved", "microbatches": 3}
    shown = Timeline(estimate(job(on=machine(link=1.0), model={"n_q_heads": 2, "n_layers": 6}, **layout)).timing)
    found = [[sum(of.calls for of in shown.traffic(stage, at, "F")) for at in (0, 1)] for stage in range(3)]
    assert found == [[5, 4], [4, 4], [4, 8]]


@pytest.mark.parametrize(("exposed_s", "forward_s", "backward_s"), [(48.0, 2.0, 6.0), (480.0, 5.0, 15.0), (0.0, 0, 0)])
def test_each_chunk_shows_its_share_of_fsdps_network(exposed_s, forward_s, backward_s):
    """Three micro-batches, two chunks on a stage: 48 s are 16 s a micro-batch, 8 s a chunk, of which forward's 10 s of network
    have a quarter, and backward's 30 s the rest; no more than all of it, which is half of either in each chunk.
    """
    of = StepSeconds(ShardedPass(4.0, 10.0, 1.0), ShardedPass(6.0, 30.0, 2.0), exposed_s, {})
    layout = SimpleNamespace(microbatches=3, parallelism=SimpleNamespace(vpp=2))
    shown = Timeline(SimpleNamespace(fsdp=of, job=layout, fsdp_exposed_s=exposed_s))
    assert list(shown.sharded("F")) == [Traffic("dp", 2.0, 5.0, forward_s)]
    assert list(shown.sharded("B")) == [Traffic("dp", 3.0, 15.0, backward_s)]


def test_fsdp_that_sends_nothing_shows_nothing():
    """On one rank there is no network: 4 calls of no seconds."""
    of = StepSeconds(ShardedPass(4.0, 0.0, 1.0), ShardedPass(6.0, 0.0, 2.0), 0.0, {})
    layout = SimpleNamespace(microbatches=3, parallelism=SimpleNamespace(vpp=2))
    shown = Timeline(SimpleNamespace(fsdp=of, job=layout, fsdp_exposed_s=0.0))
    assert list(shown.sharded("F")) == [Traffic("dp", 2.0, 0.0, 0.0)]


def test_one_rank_copies_and_sends_nothing():
    """FSDP of a single rank copies parameters and gradients for seconds, which are no communication."""
    timing = estimate(job("fsdp2", on=machine(memory=1.0), fsdp={"reduce_dtype": "fp32"})).timing
    assert timing.fsdp_exposed_s > 1.0
    for direction in ("F", "B"):
        [found] = Timeline(timing).sharded(direction)
        assert (found.busy_s, found.exposed_s) == (0.0, 0.0)
