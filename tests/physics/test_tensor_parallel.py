"""Tensor-parallel collectives of two ranks on a link of 1 B/s: half of each tensor's bytes, in seconds.

8 tokens of 128 values: A = 2,048 bytes, so a gather or a reduce-scatter takes 1,024 s. With sequence parallelism a layer has, for
attention and for the MLP each, a gather and a reduce-scatter forward, and in backward the gather of the output's gradient, that
of the input once more, for wgrad, and the reduce-scatter of the input's gradient.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from physics_jobs import job, machine

from steptime.answer.result import estimate
from steptime.cost.async_tp import sum_s, waits_for_a_sum
from steptime.cost.compute import NOTHING
from steptime.cost.part_seconds import add_backward, forward_work
from steptime.cost.work import Work
from steptime.model.ops import Comm, Gemm, Param
from steptime.timing.part_times import pricing

ONE = 1_024
LAYERS, HEAD, EMBEDDING, LOSS = 2 * 10 * ONE, 3 * ONE, 2 * ONE, 3 * 32
"""The head gathers its input, and again, and reduce-scatters its gradient. The embedding's rows are reduce-scattered, their
gradient gathered. The loss sums three fp32 values a token: 32 bytes, each half sent twice."""
NORMS = (2 * 256 + 128) * 4
"""All-reduce of the norms' gradients after backward."""
EVERYTHING = LAYERS + HEAD + EMBEDDING + LOSS + NORMS


def tp_comm(*, flops=1e30, software="megatron-core", overlap=False, **said) -> float:
    layout = {"model": {"n_q_heads": 2}, "tp": 2, "performance": {"overlap": {"tp": overlap}}} | said
    return estimate(job(software, on=machine(flops=flops, link=1.0), **layout)).time.parts_s["tp_comm"]


def by_hand(expected: float):
    return pytest.approx(expected, rel=5e-3)  # small messages: 8.4 us before each first hop, and the ramp


def test_beside_no_compute_all_of_it_shows():
    assert tp_comm() == by_hand(EVERYTHING)


def test_megatron_hides_what_enters_a_projections_backward():
    """LinearWithGradAccumulationAndAsyncCommunication gathers the input beside dgrad and reduces its gradient beside wgrad, both
    long here; NVLink's kernels take 15 % of the processors meanwhile. Two in each half of a layer, and the head's two.
    """
    assert tp_comm(flops=1e-3) == by_hand(EVERYTHING - 0.85 * (2 * 4 * ONE + 2 * ONE))


def test_a_short_product_hides_as_much_as_it_lasts():
    """dgrad of 8 rows: qkv 2 * 8 * 128 * 192 = 393,216 FLOPs, gate and up 524,288, the head 1,048,576; wgrad at 95 % of the rate.

    At 2,097,152 FLOP/s that is 0.1875, 0.25 and 0.5 s, all shorter than a gather.
    """
    beside = (2 * (393_216 + 524_288) + 1_048_576) / 2_097_152 * (1 + 1 / 0.95)
    slow, free = tp_comm(flops=2_097_152.0, microbatches=64), tp_comm(microbatches=64)
    assert free - slow == pytest.approx(0.85 * beside * 64, rel=1e-6)


def test_overlap_cuts_collectives_and_products_in_pieces():
    """Where the profile overlaps forward too, one of two pieces of each collective beside a projection hides under a piece of it.

    Of a layer forward 4; backward 6, of which Megatron's 4 hide whole. Of the head the gather forward; its backward hides whole.
    """
    pieces = 0.5 * (2 * (4 + 2) + 1) * ONE
    whole = (2 * 4 + 2) * ONE
    assert tp_comm(flops=1e-3, overlap=True) == by_hand(EVERYTHING - 0.85 * (pieces + whole))


def test_a_share_hides_that_share():
    """A quarter of every collective among the layers and at the ends; what backward hides whole it hides anyway."""
    shared = 0.25 * (2 * (4 + 2) * ONE + ONE + EMBEDDING + LOSS)
    assert tp_comm(flops=1e-3, overlap=0.25) == by_hand(EVERYTHING - shared - 0.85 * (2 * 4 + 2) * ONE)


def test_without_sequence_parallelism_activations_are_all_reduced():
    """A ring of two sends A for an all-reduce of A: two a layer forward, two backward; head back, embedding forward one each."""
    assert tp_comm(sp=False) == by_hand(2 * 4 * 2_048 + 2 * 2_048 + LOSS)


def test_torch_keeps_what_it_has_gathered():
    """No second gather: eight a layer, two of the head; its loss gathers nothing of a split vocabulary but the three sums."""
    shown = 2 * 8 * ONE + 2 * ONE + EMBEDDING + LOSS + NORMS / 2
    found = tp_comm(software="torch", sp=True)
    assert found == by_hand(shown)


def test_torch_cuts_only_what_stands_beside_a_single_product():
    """Asynchronous TP: without overlap a layer has 4 collectives forward and 4 backward, the head a gather and a reduce-scatter.

    Products are long: each hides whole, and copy engines slow no product; but not the reduce-scatters of the gradients of query,
    key and value, and of gate and up, which are summed first: 6 a layer hide. The head's are both beside its one product.
    """
    alone = tp_comm(software="fsdp2", flops=1e-3)
    hidden = alone - tp_comm(software="fsdp2", flops=1e-3, overlap=True)
    assert alone == by_hand(2 * 8 * ONE + 2 * ONE + EMBEDDING + LOSS + NORMS / 2)  # gradients in bf16
    assert hidden == by_hand((2 * 6 + 2) * ONE)


def test_torch_sums_the_pieces_of_a_reduction():
    """A device that moves 16 B/s: of each reduction that hides 2,048 bytes are read and 1,024 written, 192 s more. A layer has 2
    forward; the head's gradient is one more. For each all-gather that hides a rank copies its own 1,024 bytes, read and written
    in 128 s: 2 forward and 2 backward in a layer, and one of the head.
    """
    on = machine(flops=1e-3, link=1.0, memory=16.0)
    layout = {"model": {"n_q_heads": 2}, "tp": 2}
    shown = [
        estimate(job("fsdp2", on=on, performance={"overlap": {"tp": overlap}}, **layout)).time.parts_s["tp_comm"]
        for overlap in (False, True)
    ]
    assert shown[0] - shown[1] == by_hand((2 * 6 + 2) * ONE - (2 * 2 + 1) * 192 - (2 * 4 + 1) * 128)


def test_nothing_hides_a_reduction_that_follows_a_sum():
    """The gradients of query, key and value, and of gate and up, are summed before they are reduced: two calls a layer. The
    others hide whole (micro_pipeline_tp.py, _find_producer_matmul).
    """
    layout = {"model": {"n_q_heads": 2}, "tp": 2, "performance": {"overlap": {"tp": True}}}
    timing = estimate(job("fsdp2", on=machine(flops=1e-3, link=1.0), **layout)).timing
    calls = [call for call in timing.parts.layer.backward.calls if call.kind == "reduce_scatter"]
    assert len(calls) == 2
    assert [call.hidden_s for call in calls] == [0.0, 0.0]
    others = [call for call in timing.parts.layer.backward.calls if call.kind == "all_gather"]
    assert [call.hidden_s for call in others] == [call.cost.time_s for call in others]


def test_products_that_share_what_is_gathered():
    """Up to the collective that leaves the region: of the four products query and key read it, cut by their rows; the
    projection's columns are cut. What follows the next collective reads something else.
    """
    rows, columns = Param("w", (8, 8), split_dim=0), Param("o", (8, 8), split_dim=1)
    there, back = Comm("gather", region="enter", axis="tp"), Comm("scatter", region="leave", axis="tp")
    inside = Comm("sum of scores", axis="tp")
    query, key, out, up = (
        Gemm(name, params=(of,)) for name, of in (("q", rows), ("k", rows), ("o", columns), ("up", rows))
    )
    assert waits_for_a_sum([there, query, inside, key, out, back], 0)
    assert not waits_for_a_sum([there, query, out, back, there, up], 0)
    assert not waits_for_a_sum([query, there, up, back], 1)
    assert sum_s(8.0, 2, 4.0) == 3.0  # 8 B read and 4 written


def test_dtensor_copies_a_collective_of_several_sequences():
    """NCCL joins along the batch, torch along the sequence: 8 B are read and written at 1 B/s by a kernel of 0.5 s, in both
    passes (_functional_collectives.py). One sequence needs no copy unless pieces are joined along another dimension.
    """
    on = machine(memory=1.0, kernels={"move_kernel_s": 0.5})
    op = Comm("gather", kind="all_gather", backward="reduce_scatter", axis="tp", bytes=8.0)
    for batch, joined, seconds in ((2, False, 16.5), (1, False, 0.0), (1, True, 16.5)):
        context = pricing(job("torch", on=on, model={"n_q_heads": 2}, tp=2, sp=True, batch=batch)).context
        back, ops = Work(), [replace(op, joined=joined)]
        add_backward(back, ops, 0, [(NOTHING, NOTHING)], context)
        assert back.memory_s == forward_work(ops, [NOTHING], context, [0]).memory_s == seconds
        assert back.calls[0].kind == "reduce_scatter"


@pytest.mark.parametrize(("axis", "how"), [("tp", "blocks"), ("ep", "none")])
def test_collectives_that_nothing_copies(axis, how):
    """Compiled kernels read them in order; other axes carry no sequence."""
    on = machine(memory=1.0, kernels={"move_kernel_s": 0.5})
    said = {"batch": 2, "performance": {"compile": how}}
    context = pricing(job("torch", on=on, model={"n_q_heads": 2}, tp=2, sp=True, **said)).context
    op = Comm("gather", kind="all_gather", backward="reduce_scatter", axis=axis, bytes=8.0, joined=True)
    assert context.reorder_s(op, "all_gather", 8.0) == 0.0
