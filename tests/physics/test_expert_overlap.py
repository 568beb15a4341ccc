"""Exchanges of experts beside another micro-batch's compute, worked out by hand.

The order is that of megatron/core/models/common/model_chunk_schedule_plan.py, TransformerLayerSchedulePlan.run: combine backward
beside attention forward; dispatch forward beside the experts' backward; dispatch backward beside their forward; combine forward
beside attention backward.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from physics_jobs import job, machine

from steptime.answer.result import estimate
from steptime.cost.compute import NOTHING, Pass
from steptime.cost.neighbors import Neighbors, neighbor, overlapping_compute, with_gaps
from steptime.cost.part_seconds import add_backward, forward_work
from steptime.cost.work import Work
from steptime.model.ops import Attention, Comm, Gemm, Move, Op, Param
from steptime.software.settings import MoeSettings
from steptime.timing.part_times import pricing

LAYER: list[Op] = [
    Gemm("qkv"),
    Comm("dispatch", kind="all_to_all", backward="all_to_all", axis="ep"),
    Comm("dispatch.probs", kind="all_to_all", backward="all_to_all", axis="ep"),
    Gemm("experts", role="moe", params=(Param("experts.weight", (8, 8), group="expert", n_experts=4),)),
    Comm("combine", kind="all_to_all", backward="all_to_all", axis="ep"),
    Gemm("after"),
]


def takes(seconds: float) -> Pass:
    return NOTHING._replace(time_s=seconds)


FORWARD = [takes(1.0), NOTHING, NOTHING, takes(4.0), NOTHING, takes(2.0)]
BACKWARD = [
    (takes(1.5), takes(1.0)),
    (NOTHING, NOTHING),
    (NOTHING, NOTHING),
    (takes(4.5), takes(3.5)),
    (NOTHING, NOTHING),
    (takes(2.5), takes(2.0)),
]
COSTS = {1: 6.0, 2: 2.0, 4: 3.0}
"""Rows take 6 s to the experts, their probabilities 2 s, and the rows 3 s back."""


def test_each_exchange_runs_beside_the_other_directions_compute():
    """Dispatch: forward beside the experts' backward, 4.5 + 3.5 = 8 s, of which rows have 6/8 and probabilities 2/8; backward
    beside their forward, 4 s. Combine: forward beside what is left of the backward, 1.5 + 1 + 2.5 + 2 = 7 s; backward beside
    1 + 2 = 3 s.
    """
    found = overlapping_compute(LAYER, FORWARD, BACKWARD, COSTS, MoeSettings())
    assert found.forward == pytest.approx({1: 6.0, 2: 2.0, 4: 7.0})
    assert found.backward == pytest.approx({1: 3.0, 2: 1.0, 4: 3.0})


def test_delayed_weight_gradients_run_beside_the_exchange_in_backward():
    """Of the experts' 3.5 s, 8 - 4.5 = 3.5 s are taken by the dispatch in forward: none is left. Of the others' 3 s, the combine
    in forward takes none (3 s fit under 1.5 + 2.5 = 4 s): the combine in backward has 3 + 3 = 6 s.
    """
    found = overlapping_compute(LAYER, FORWARD, BACKWARD, COSTS, MoeSettings(delay_wgrad_compute=True))
    assert found.forward == pytest.approx({1: 6.0, 2: 2.0, 4: 7.0})
    assert found.backward == pytest.approx({1: 3.0, 2: 1.0, 4: 6.0})


def test_an_exchange_goes_on_while_the_compute_beside_it_pauses():
    """Gaps of 18 s: forward 6 s over 3 kernels, 2 s each, backward 12 s over 6 (a gradient of the input and one of the weight for
    each product), 2 s each. The dispatch in forward is beside 4.5 + 3.5 + 2 * 2 = 12 s, in backward beside 4 + 2 = 6 s; the
    combine in forward beside 7 + 4 * 2 = 15 s, in backward beside 3 + 2 * 2 = 7 s.
    """
    one = [done._replace(kernels=float(done.time_s > 0)) for done in FORWARD]
    both = [(a._replace(kernels=float(a.time_s > 0)), b._replace(kernels=float(b.time_s > 0))) for a, b in BACKWARD]
    found = overlapping_compute(LAYER, *with_gaps(one, both, 18.0), COSTS, MoeSettings())
    assert found.forward == pytest.approx({1: 9.0, 2: 3.0, 4: 15.0})
    assert found.backward == pytest.approx({1: 4.5, 2: 1.5, 4: 7.0})


MOE = {"moe": {"n_experts": 4, "expert_inter_sz": 256, "experts_per_token": 2}}


def exchange_s(microbatches: int, overlap: bool, **parallelism: int) -> tuple[float, float]:
    """Exposed and hidden seconds of the exchanges on a machine that computes slowly, over slow links."""
    layout = {"dp": 4, "ep": 4} | parallelism
    of = job(
        on=machine(flops=1e8, link=1e6),
        model=MOE | {"n_layers": 4},
        performance={"overlap": {"ep": overlap}},
        microbatches=microbatches,
        seqlen=512,
        **layout,
    )
    time = estimate(of).time
    return time.parts_s["ep_comm"], time.hidden_s.get("ep_comm", 0.0)


@pytest.mark.parametrize(
    ("microbatches", "parallelism", "woven"), [(4, {}, 3 / 4), (8, {"pp": 2, "vpp": 2}, 6 / 8), (1, {}, 0.0)]
)
def test_the_first_micro_batches_run_forward_alone(microbatches, parallelism, woven):
    """Without a pipeline one of m micro-batches has no other beside it (combined_1f1b.py: the first forward, the last backward);
    with p stages p of them. Compute takes longer than each exchange: the rest is hidden but for 15 %, which comes back as slower
    compute.
    """
    whole, none = exchange_s(microbatches, False, **parallelism)
    exposed, hidden = exchange_s(microbatches, True, **parallelism)
    assert none == 0.0
    carried = hidden / (0.85 * woven) if woven else 0.0
    assert exposed + hidden == pytest.approx(whole)
    assert carried == pytest.approx(whole if woven else 0.0, rel=0.02)


def test_each_direction_hides_what_runs_beside_it():
    """On a link of 1 B/s inside a node, 8,000 bytes take more than the 5 s of compute beside them forward, the 3 s backward: 85 %
    of these hide in all micro-batches, or in three of four.
    """
    moe = {"n_experts": 4, "experts_per_token": 1, "expert_inter_sz": 256}
    plan = job(
        on=machine(link=1.0), model={"moe": moe}, dp=2, ep=2, performance={"overlap": {"ep": True}}, microbatches=4
    )
    ops = [replace(op, bytes=8_000.0) if isinstance(op, Comm) else op for op in LAYER]
    for woven in (1.0, 0.75):
        context = replace(pricing(plan).context, woven=woven)
        beside, back = Neighbors({1: 5.0}, {1: 3.0}), Work()
        [there] = forward_work(ops, FORWARD, context, [1], beside).calls
        add_backward(back, ops, 1, BACKWARD, context, beside)
        assert there.hidden_s == pytest.approx(0.85 * 5.0 * woven)
        assert back.calls[0].hidden_s == pytest.approx(0.85 * 3.0 * woven)
        assert back.calls[0].name == "dispatch.grad"


def test_shared_experts_run_beside_exchanges_in_both_directions():
    """Up, 4 s, beside the dispatch, down, 3 s, beside the combine; backward the gradients of both operands of the same products,
    4.5 + 3.5 and 2.5 + 2 s (token_dispatcher.py, MoEAlltoAllTokenDispatcher).
    """
    up, down = (Gemm(name, role="shared_experts") for name in ("up", "down"))
    ops, none = [LAYER[1], up, LAYER[3], down, LAYER[4]], (NOTHING, NOTHING)
    ahead = [NOTHING, takes(4.0), takes(9.0), takes(3.0), NOTHING]
    back = [none, (takes(4.5), takes(3.5)), (takes(9.0), takes(9.0)), (takes(2.5), takes(2.0)), none]
    found = overlapping_compute(ops, ahead, back, {0: 6.0, 4: 3.0}, MoeSettings(shared_expert_overlap=True))
    assert found == Neighbors({0: 4.0, 4: 3.0}, {0: 8.0, 4: 4.5})


def test_a_single_exchange_each_way():
    """Without probabilities: the dispatch has all of the experts' 8 s in forward and 4 s in backward (as above)."""
    ops = [LAYER[0], LAYER[1], *LAYER[3:]]
    forward, backward = ([of[0], of[1], *of[3:]] for of in (FORWARD, BACKWARD))
    found = overlapping_compute(ops, forward, backward, {1: 6.0, 3: 3.0}, MoeSettings())  # type: ignore[arg-type]
    assert found == ({1: 8.0, 3: 7.0}, {1: 4.0, 3: 3.0})


def test_gaps_of_a_part_with_one_kernel():
    """Of 3 s forward has 1 and backward 2: all of it follows the one kernel of each. A part without kernels has no gaps."""
    one, none = NOTHING._replace(time_s=5.0, kernels=1.0), NOTHING
    [forward], [(dgrad, wgrad)] = with_gaps([one], [(one, none)], 3.0)
    assert (forward.time_s, dgrad.time_s, wgrad.time_s) == (6.0, 7.0, 0.0)
    assert with_gaps([none], [(none, none)], 3.0) == ([none], [(none, none)])


ENTER, LEAVE = (Comm(kind="all_gather", name=region, region=region) for region in ("enter", "leave"))
PRODUCT, MOVE, CORE = Gemm("product"), Move("move"), Attention("core")
RING = Comm("ring", kind="send_recv", axis="cp_p2p")


@pytest.mark.parametrize(
    ("ops", "at", "beside"),
    [
        ([PRODUCT, ENTER, PRODUCT], 1, 2),
        ([PRODUCT, ENTER, MOVE, PRODUCT, PRODUCT], 1, 3),
        ([PRODUCT, ENTER], 1, None),
        ([PRODUCT, LEAVE, PRODUCT], 1, 0),
        ([PRODUCT, MOVE, LEAVE, PRODUCT], 2, 0),
        ([PRODUCT, PRODUCT, MOVE, LEAVE], 3, 1),
        ([LEAVE, PRODUCT], 0, None),
        ([PRODUCT, RING, CORE, PRODUCT], 1, 2),
        ([PRODUCT, CORE, RING], 2, 1),
        ([PRODUCT, RING], 1, None),
        ([PRODUCT, Comm("sum", kind="all_reduce"), PRODUCT], 1, None),
        ([PRODUCT, PRODUCT], 0, None),
    ],
)
def test_what_a_collective_runs_beside(ops, at, beside):
    """The projection after what is gathered for it, or before what reduces its output; attention beside its ring."""
    assert neighbor(ops, at) == beside
