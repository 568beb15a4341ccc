"""FSDP2's collectives beside compute, on links of 1 B/s in a node of two devices and 1/2 B/s between nodes.

A layer has 164,096 elements, the root (embedding, head, final norm) 262,272; all dimensions are even, so nothing is padded.
"""

from __future__ import annotations

import pytest
from physics_jobs import SLIGHTLY, job, machine

from steptime.answer.result import estimate
from steptime.base.recent import Recent
from steptime.fsdp.seconds import CommSeconds, passes, step_seconds
from steptime.job.assembly import Assembly

LAYER, ROOT = 164_096, 262_272


def answer(*, flops=1e30, memory=1e30, dp=2, microbatches=1, performance=None, replicas=1, **fsdp):
    on = machine(flops=flops, memory=memory, link=1.0, outside=0.5, node=2)
    layout = {"dp": dp, "replicas": replicas, "fsdp": {"reduce_dtype": "fp32"} | fsdp}
    return estimate(job("fsdp2", on=on, microbatches=microbatches, performance=performance, **layout))


def seconds(expected: float):
    return pytest.approx(expected, rel=SLIGHTLY)


NO_OVERLAP = {"overlap": {"dp": False}}
# two ranks pass half of a tensor on: a gather of bf16 takes 1 s an element, a reduce-scatter of fp32 2 s
GATHERS, REDUCTIONS = ROOT + 2 * 2 * LAYER, 2 * (ROOT + 2 * LAYER)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # the root is gathered once, each of two layers for forward and again for backward
        ({}, GATHERS + REDUCTIONS),
        ({"reshard_after_forward": False}, ROOT + 2 * LAYER + REDUCTIONS),
        ({"reduce_dtype": "bf16"}, GATHERS + REDUCTIONS / 2),
        ({"microbatches": 3}, 3 * (GATHERS + REDUCTIONS)),
        # no_sync (torch, FSDPModule.set_requires_gradient_sync): the last micro-batch reduces for all; where parameters stay
        # gathered as well, the first one gathers for all
        ({"microbatches": 3, "no_sync": True}, 3 * GATHERS + REDUCTIONS),
        (
            {"microbatches": 3, "no_sync": True, "reshard_after_forward": False, "reshard_after_backward": False},
            ROOT + 2 * LAYER + REDUCTIONS,
        ),
        # two copies in two nodes: what the reduction leaves, half of 4 bytes an element, is all-reduced between them; a ring of
        # two sends it once, at 1/2 B/s: 4 s an element
        ({"dp": 4, "replicas": 2}, GATHERS + REDUCTIONS + 4 * (ROOT + 2 * LAYER)),
    ],
)
def test_collectives_of_a_step(options, expected):
    assert answer(performance=NO_OVERLAP, **options).time.parts_s["dp_comm"] == seconds(expected)


def test_backward_gathers_among_neighbors():
    """Four shards in two nodes of two, resharded to two: a ring of four passes 3/4 of a tensor on at the 1/2 B/s between nodes
    (both devices of a node share its link), backward's ring of two passes 1/2 on at 1 B/s inside: 1 s an element.
    """
    among = {row.name: row for row in answer(dp=4, microbatches=3, reshard_after_forward=2).collectives}
    again, first = among["block parameters, backward"], among["block parameters"]
    assert (again.kind, again.ranks, again.tier, again.bytes) == ("all_gather", 2, "inside", 2 * LAYER)
    assert (first.ranks, first.tier, first.bytes) == (4, "outside", 2 * LAYER)
    assert (again.count_per_step, first.count_per_step) == (2 * 3, 2 * 3)
    assert again.time_s == seconds(LAYER)
    saved = [
        answer(dp=4, performance=NO_OVERLAP, reshard_after_forward=said).time.parts_s["dp_comm"] for said in (True, 2)
    ]
    assert saved[0] - saved[1] == seconds(2 * (first.time_s - LAYER))


def test_forward_copies_what_a_resharded_layer_keeps():
    """On a device of 1 B/s: half of two layers in bf16 is read and written."""
    whole, half = (
        answer(dp=4, memory=1.0, performance=NO_OVERLAP, reshard_after_forward=said).time.parts_s["memory_bound"]
        for said in (True, 2)
    )
    assert half - whole == seconds(2 * 2 * LAYER)


def test_replicas_reduce_what_the_reduction_leaves():
    """Of 4 bytes an element the half that is one of two shards."""
    rows = {row.name: row for row in answer(dp=4, replicas=2, microbatches=3).collectives}
    between = rows["block gradients, replicas"]
    assert (between.kind, between.ranks, between.tier) == ("all_reduce", 2, "outside")
    assert (between.bytes, between.count_per_step) == (LAYER / 2 * 4, 2 * 3)
    assert rows["root gradients, replicas"].bytes == ROOT / 2 * 4
    inside = rows["block gradients"]
    assert (inside.ranks, inside.tier, inside.bytes) == (2, "inside", LAYER * 4)


@pytest.mark.parametrize(
    ("prefetch", "shown"),
    [
        # forward: the root, and the first layer beside an embedding that takes no time; the second beside the first layer.
        # backward: the last layer's gather beside the head, the first one's beside the last layer; reductions beside the layers
        # before, but the first layer's and the root's are left at the end
        (1, (ROOT + LAYER) + (2 * LAYER + 2 * ROOT)),
        # each layer waits for its own gather, in backward behind the reduction of the layer after it on the same network
        (0, (ROOT + 2 * LAYER) + (LAYER + (2 * LAYER + LAYER) + 2 * LAYER + 2 * ROOT)),
    ],
)
def test_where_compute_is_long_only_the_ends_show(prefetch, shown):
    """A layer's forward, 16 * 163,840 + 16,384 = 2,637,824 FLOPs, takes 80 s an element; the other parts are as slow.

    Two ranks share a node, where collectives take processors: 15 % of what hides comes back as slower compute.
    """
    time = answer(flops=2_637_824 / (80 * LAYER), prefetch=prefetch).time
    hides = GATHERS + REDUCTIONS - shown
    assert time.parts_s["dp_comm"] == seconds(shown + 0.15 * hides)
    assert time.hidden_s.get("dp_comm", 0.0) == pytest.approx(0.85 * hides, rel=SLIGHTLY, abs=10)


def test_copies_between_flat_buffers_and_parameters():
    """On a device of 1 B/s: gathered bf16 read and written out, 4 bytes an element (a layer's twice); gradients read in bf16 and
    written as fp32 to be reduced, 6 bytes. They are memory-bound work, as are all other kernels of the step.
    """
    sharded = answer(memory=1.0, performance=NO_OVERLAP).time.parts_s["memory_bound"]
    plain = estimate(job("fsdp2", on=machine(memory=1.0), zero_level=3)).time.parts_s["memory_bound"]
    assert plain == seconds(sharded)  # one rank copies as many
    other = answer(memory=1.0, performance=NO_OVERLAP, reshard_after_forward=False, reduce_dtype="bf16")
    assert sharded - other.time.parts_s["memory_bound"] == seconds(4 * 2 * LAYER + 2 * (ROOT + 2 * LAYER))


def test_version_1_casts_its_flat_gradient():
    """Reduced in bf16 the flat gradient, 2 bytes an element, is the reduction's input. For fp32 it is read once more and written
    as 4: the flat one is written and read, 4 bytes, and the input is 2 wider.
    """
    wide, narrow = (
        answer(memory=1.0, performance=NO_OVERLAP, version=1, reduce_dtype=dtype).time.parts_s["memory_bound"]
        for dtype in ("fp32", "bf16")
    )
    assert wide - narrow == seconds((4 + 2) * (ROOT + 2 * LAYER))


@pytest.mark.parametrize(
    ("options", "each"),
    [
        # each of three micro-batches reads bf16 and writes fp32, 2 + 4; only shards add up
        ({}, 3 * 6),
        # not reduced: a cast, 2 + 4; a sum, 2 + 4 + 4; a sum and a copy of it, 10 + 8
        ({"no_sync": True}, 6 + 10 + 18),
        ({"reduce_dtype": "bf16"}, 3 * 4),
        # autograd adds the second and the third, 3 * 2 each, and the last is copied, 2 + 2
        ({"reduce_dtype": "bf16", "no_sync": True}, 2 * 6 + 4),
        # version 1 also writes and reads its flat gradient, but where it is what is reduced
        ({"version": 1}, 3 * (2 + 4 + 4)),
        ({"version": 1, "no_sync": True}, 2 * 4 + 10 + 2 * 6),
        ({"version": 1, "reduce_dtype": "bf16"}, 3 * 4),
        ({"version": 1, "reduce_dtype": "bf16", "no_sync": True}, 3 * 4 + 2 * 6),
    ],
)
def test_copies_and_sums_of_gradients(options, each):
    """On a device of 1 B/s, beside three micro-batches that reduce in bf16: 12 bytes an element."""
    usual, found = (
        answer(memory=1.0, performance=NO_OVERLAP, microbatches=3, **{"reduce_dtype": "fp32", "version": 2} | of)
        for of in ({"reduce_dtype": "bf16", "version": options.get("version", 2)}, options)
    )
    beyond = found.time.parts_s["memory_bound"] - usual.time.parts_s["memory_bound"]
    assert beyond == pytest.approx((each - 12) * (ROOT + 2 * LAYER), rel=SLIGHTLY, abs=100)


def test_layers_of_two_widths_have_groups_of_two_sizes():
    """Two layers with an MLP of 512, one of 256, two of 512: 98,304 elements more in four of five."""
    layers = [{"repeat": 2, "inter_sz": 512}, {"repeat": 1}, {"repeat": 2, "inter_sz": 512}]
    on, layout = machine(link=1.0), {"dp": 2, "fsdp": {"reduce_dtype": "fp32"}, "performance": NO_OVERLAP}
    found = estimate(job("fsdp2", on=on, model={"n_layers": 5, "layers": layers}, **layout))
    every = 5 * LAYER + 4 * 98_304
    assert found.time.parts_s["dp_comm"] == seconds(ROOT + 2 * every + 2 * (ROOT + every))
    held = sum(row.bytes * row.count_per_step for row in found.collectives if row.kind == "all_gather")
    assert held == 2 * (ROOT + 2 * every)


def test_plans_that_differ_in_fsdp_alone_share_no_seconds(monkeypatch):
    """One after the other, and back, they take as long as each where nothing is known yet. On a device of 1 B/s."""
    layouts = ({"zero_level": 3}, {"fsdp": {}}, {"fsdp": {"reduce_dtype": "bf16"}})
    plans = [
        job(software, on=machine(memory=1.0), microbatches=3, **layout)
        for software in ("fsdp2", "automodel")
        for layout in layouts
    ]

    def alone(plan):
        monkeypatch.setattr("steptime.job.parts.PARTS", Recent(1))
        monkeypatch.setattr("steptime.timing.step_time.PART_TIMES", Recent(1))
        return estimate(plan).step_s

    expected = [alone(plan) for plan in plans]
    monkeypatch.undo()
    assert [estimate(plan).step_s for plan in (*plans, *plans[::-1])] == [*expected, *expected[::-1]]


def test_layers_run_again_hide_more():
    """Full recomputation runs each layer's forward again but for the last product, which backward needs no output of
    (torch/utils/checkpoint.py, early stop): 2,637,824 FLOPs less 16 * 32,768 are 2,113,536. So much more of the first layer's
    gather hides beside the last layer, and of the last layer's reduction beside the first; 15 % of it come back.
    """
    plain, again = (
        answer(flops=2_637.824, performance={"activation_checkpointing_type": kind}).time.hidden_s["dp_comm"]
        for kind in ("none", "full")
    )
    assert again - plain == pytest.approx(0.85 * 2 * 2_113_536 / 2_637.824, rel=SLIGHTLY)


ROOT_S, LAYER_S = CommSeconds(5.0, 1.0, 0.0, 0.5, 0.7), CommSeconds(2.0, 1.0, 0.0, 0.25, 0.3)
BACK_S = CommSeconds(2.0, 2.0, 4.0, 0.25)
THERE_S = [CommSeconds(0.0, 1.0, 0.0, 0.0, 0.7), CommSeconds(0.0, 1.0, 0.0, 0.0, 0.3)]
NEAR_S = [CommSeconds(0.7, 1.0, 0.0, 0.5, 0.7), CommSeconds(0.3, 1.0, 0.0, 0.25, 0.3)]
FORWARD_S, QUIET_S = [ROOT_S, LAYER_S], [CommSeconds(2.0, 2.0, 0.0, 0.25)]


@pytest.mark.parametrize(
    ("software", "layout", "expected"),
    [
        ("fsdp2", {"fsdp": {}}, [(3, FORWARD_S, [BACK_S])]),
        (
            "fsdp2",
            {"fsdp": {"no_sync": True}},
            [(1, FORWARD_S, QUIET_S), (1, FORWARD_S, QUIET_S), (1, FORWARD_S, [BACK_S])],
        ),
        (
            "fsdp2",
            {"fsdp": {"no_sync": True, "reshard_after_forward": False, "reshard_after_backward": False}},
            [(1, FORWARD_S, QUIET_S), (1, THERE_S, QUIET_S), (1, THERE_S, [BACK_S])],
        ),
        # Megatron-FSDP gathers its units anew, the rest once a step
        (
            "megatron-core",
            {"zero_level": 3},
            [(1, FORWARD_S, [BACK_S]), (2, [ROOT_S._replace(gather_s=0.0, copy_s=0.0), LAYER_S], [BACK_S])],
        ),
        (
            "deepspeed",
            {"zero_level": 3, "zero_plus_plus": {"hpz_partition_size": 2}},
            [(1, FORWARD_S, [BACK_S]), (2, NEAR_S, [BACK_S])],
        ),
    ],
    ids=["usual", "no_sync", "gathered", "units", "second partition"],
)
def test_collectives_of_three_micro_batches(software, layout, expected):
    """How many run with which: gathers of the first, of those in the middle, and reductions of the last."""
    assembly = Assembly(job(software, dp=4, microbatches=3, on=machine(node=2), **layout))
    assert passes(assembly, (FORWARD_S, [BACK_S])) == [(times, (ahead, back)) for times, ahead, back in expected]


def test_a_micro_batch_of_a_step_is_the_mean_of_all():
    """Of three the root is gathered in the first: forward (2 + 1 + 1) / 3 calls, 2 + 5 / 3 s, copies 0.25 + 0.5 / 3 s. In
    backward a gather, 2 s, and a reduction, 4 s, with copies of 0.25 s.
    """
    assembly = Assembly(job("megatron-core", dp=4, microbatches=3, on=machine(node=2), zero_level=3))
    found = step_seconds(assembly, tuple(assembly.job.machine.tiers), (FORWARD_S, [BACK_S]))
    assert tuple(found.forward) == pytest.approx((4 / 3, 2 + 5 / 3, 0.25 + 0.5 / 3))
    assert tuple(found.backward) == pytest.approx((2, 6, 0.25))
    assert found.copies_s == pytest.approx(0.5 + 0.5 / 3)
