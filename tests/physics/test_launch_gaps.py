"""Gaps between the kernels of a layer: on a device where all else is free, 3 seconds a layer and micro-batch."""

from __future__ import annotations

import pytest
from physics_jobs import job, machine

from steptime.answer.result import estimate
from steptime.hardware.machine import Machine
from steptime.job.assembly import Assembly
from steptime.software.efficiency import Efficiency, using
from steptime.timing.part_times import layer_gap_s, part_gap_s, pricing

LAYERS, MICROBATCHES = 2, 4
WHOLE_LAYERS = {"activation_checkpointing_type": "full", "recompute_stops_early": False}


def gap_s(of) -> float:
    return layer_gap_s(of, pricing(of).context)


def parts(performance=None, **said) -> dict[str, float]:
    of = job(
        "torch", on=machine(kernels={"layer_gap_s": 3.0}), performance=performance, microbatches=MICROBATCHES, **said
    )
    return estimate(of).time.parts_s


def test_a_layers_gaps_are_counted_once_a_micro_batch():
    """3 s * 2 layers * 4 micro-batches = 24 s; embedding and head have none."""
    assert parts()["launch"] == pytest.approx(24.0)


def test_a_third_of_the_gaps_is_forwards():
    """A forward run again waits 1 s a layer: of a layer's kernels a third are forward's, two thirds backward's."""
    again = parts(WHOLE_LAYERS)
    assert again["launch"] == pytest.approx(24.0)
    assert again["recompute"] == pytest.approx(1.0 * LAYERS * MICROBATCHES)


def test_forward_and_backward_of_a_pipeline():
    """GPipe on two stages, one layer each: all forwards, then all backwards. (4 + 2 - 1) * (1 + 2) s, of which 3 s are bubble."""
    found = parts(pp=2, schedule="gpipe")
    assert found["launch"] == pytest.approx(12.0)
    assert found["bubble"] == pytest.approx(3.0)


def test_a_part_of_a_layer_run_again_waits_for_its_share_of_the_kernels():
    """Of the 15 ops of an eager layer core attention is one: 1 s / 15.

    Norm, q, k, v, rope, core, projection, residual; norm, gate, up, SiLU, product, down, residual. (A kernel that keeps what it
    makes runs again even where a replay stops early.)
    """
    found = parts({"activation_checkpointing_type": "selective"})
    assert found["recompute"] == pytest.approx(LAYERS * MICROBATCHES / 15)


def test_graphs_leave_half_of_the_gaps():
    """The host no longer holds the device up; pauses between dependent kernels stay (assumed: 0.5)."""
    assert parts({"cuda_graphs": True})["launch"] == pytest.approx(12.0)


@pytest.mark.parametrize("compiled", ["blocks", "all"])
def test_compiled_layers_leave_half_of_the_gaps(compiled):
    """Of about 60 kernels of an eager Llama block about 30 remain (assumed: 0.5)."""
    assert parts({"compile": compiled})["launch"] == pytest.approx(12.0)


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_layers_of_multi_token_prediction_have_a_layers_gaps(layers):
    """They run before the head, which has none of its own; nor has the embedding."""
    assembly = Assembly(job(model={"mtp": layers}))
    assert part_gap_s(3.0, assembly, assembly.head) == pytest.approx(3.0 * layers)
    assert part_gap_s(3.0, assembly, assembly.embedding) == 0.0


@pytest.mark.parametrize(("precision", "times"), [("fp8_current", 1.5), ("mxfp8", 1.5), ("nvfp4", 2.5)])
def test_gaps_grow_with_the_casts_of_a_recipe(precision, times):
    """A gap of 1.5 is a half more for the 4 casts of a projection under current scaling, so three halves for the 12 of NVFP4."""
    of = job("megatron-core", on=Machine.load("gb200-nvl72"), performance={"precision": precision})
    plain = job("megatron-core", on=Machine.load("gb200-nvl72"))
    with using(Efficiency({}, 1.0, 1.5, {})):
        assert gap_s(of) / gap_s(plain) == pytest.approx(times)


@pytest.mark.parametrize(("modules", "seconds"), [(["attn"], 7 + 17 / 2), (["mlp"], 17 + 7 / 2), (["moe"], 24.0)])
def test_graphs_of_some_modules_halve_their_gaps_alone(modules, seconds):
    """Of a layer's 24 launches, 24 s in all, 17 stand before the MLP's norm (`KERNELS`), 7 after it; it has no experts."""
    assert parts({"cuda_graphs": modules})["launch"] == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        # every layer by itself: 13 of its 15 ops
        ({"n_layers": 1}, 4 * 13 / 15),
        # groups of two: the first of each hands its output to the second, so all of it runs
        ({"n_layers": 2}, 2 * (1 + 13 / 15)),
        ({"n_layers": 3}, (2 + 13 / 15) + 13 / 15),
        ({"n_layers": 4}, 3 + 13 / 15),
        # the first three layers, one by one; the fourth is kept
        ({"n_layers": 3, "method": "block"}, 3 * 13 / 15),
        ({"n_layers": 0, "method": "block"}, 0),
    ],
)
def test_a_replay_stops_when_the_last_saved_tensor_is_back(said, seconds):
    """torch/utils/checkpoint.py, _StopRecomputationError: the product's output is down's input, the last that backward reads, so
    neither down nor the residual behind it runs again. A layer's forward has 1 s of gaps, spread over its ops.
    """
    performance = {"recompute": {"granularity": "full", "method": "uniform"} | said}
    of = job("torch", on=machine(kernels={"layer_gap_s": 3.0}), performance=performance, model={"n_layers": 4})
    assert estimate(of).time.parts_s.get("recompute", 0.0) == pytest.approx(seconds)


KERNELS = 2 * (24 + 29) + (1 + 1) + (5 + 6)
"""An eager layer launches 7 products, attention, 2 norms, rope's 10, SiLU, product and 2 residuals: 24. Backward has two for each
product, none for a residual: 29. The embedding has one either way. The head's norm, product, cast, log_softmax, nll: 5, and 6.
"""


@pytest.mark.parametrize(("flops", "waits"), [(1e30, KERNELS * 0.001), (1.0, 0.0)])
def test_a_device_waits_for_a_host_that_is_late_with_a_whole_part(flops, waits):
    """A launch takes 1 ms. A device that computes in no time waits for all; one on which each part takes longer, for none."""
    of = job("torch", on=machine(flops=flops, memory=flops, kernels={"host_kernel_s": 0.001}))
    assert estimate(of).time.parts_s.get("launch", 0.0) == pytest.approx(waits)


def test_a_device_does_not_wait_for_launches_from_graphs():
    """Attention's part is 4 products, the kernel, a norm, rope's 10 and a residual, 17 of 24 launches forward; 4 * 2 + 1 + 1 +
    10, 20 of 29, backward. Of each layer 7 and 9 are left to the host.
    """
    on = machine(flops=1e30, memory=1e30, kernels={"host_kernel_s": 0.001})
    of = job("torch", on=on, performance={"cuda_graphs": ["attn"]})
    assert estimate(of).time.parts_s["launch"] == pytest.approx((KERNELS - 2 * (17 + 20)) * 0.001)


def test_a_replay_waits_for_the_host_as_long_as_its_own_launches_take():
    """Of a layer's 24 kernels all but down and the residual behind it run again: 22 ms for each of two layers.

    A share of what forward waited would be 13/15 of 24 ms, and more the faster the device.
    """
    on = machine(flops=1e30, memory=1e30, kernels={"host_kernel_s": 0.001})
    found = estimate(job("torch", on=on, performance={"activation_checkpointing_type": "full"}))
    assert found.time.parts_s["recompute"] == pytest.approx(2 * 22 * 0.001)


@pytest.mark.parametrize(("modules", "launches"), [(["attn"], 5), (["mlp"], 17), (["attn", "mlp"], 0)])
def test_a_replay_leaves_to_the_host_what_no_graph_launches(modules, launches):
    """Of the 22 kernels that run again 17 stand before the MLP's norm, 5 after it: norm, gate, up and two of the activation."""
    on = machine(flops=1e30, memory=1e30, kernels={"host_kernel_s": 0.001})
    performance = {"activation_checkpointing_type": "full", "cuda_graphs": modules}
    found = estimate(job("torch", on=on, performance=performance))
    assert found.time.parts_s.get("recompute", 0.0) == pytest.approx(2 * launches * 0.001)


@pytest.mark.parametrize(
    ("again", "graphs", "launches"),
    [("mlp", ["attn"], 4), ("mlp", ["mlp"], 0), ("core_attn", ["mlp"], 1), ("core_attn", ["attn"], 0)],
)
def test_a_module_run_again_leaves_to_the_host_what_no_graph_launches(again, graphs, launches):
    """Of the MLP gate, up and two kernels of the activation, of attention its own: in each of two layers."""
    on = machine(flops=1e30, memory=1e30, kernels={"host_kernel_s": 0.001})
    performance = {"recompute": {"granularity": "selective", "modules": [again]}, "cuda_graphs": graphs}
    found = estimate(job("torch", on=on, performance=performance))
    assert found.time.parts_s.get("recompute", 0.0) == pytest.approx(2 * launches * 0.001, abs=1e-9)


@pytest.mark.parametrize(
    ("software", "pace", "microbatches", "host_s", "gap_s"),
    [
        ("megatron-core", 1.0, 1, 0.015, 0.0005),
        ("megatron-core", 2.0, 4, 0.030, 0.0005),
        ("nemo", 1.0, 4, 0.0, 0.0005),
        ("torch", 2.0, 1, 0.0, 0.0),
    ],
)
def test_the_host_takes_time_of_its_own_once_a_step(software, pace, microbatches, host_s, gap_s):
    """On a device that waits for no launch: gaps of two layers in every micro-batch, and the host's 15 ms at its pace."""
    on = machine(flops=1.0, memory=1.0).model_copy(update={"host_factor": pace})
    found = estimate(job(software, on=on, microbatches=microbatches))
    assert found.time.parts_s.get("launch", 0.0) == pytest.approx(2 * microbatches * gap_s + host_s)
    assert found.timing.after_s == pytest.approx(found.timing.optimizer.device_s + host_s)


MOE = {"n_experts": 8, "experts_per_token": 2, "expert_inter_sz": 64}


def test_a_layer_with_experts_launches_more_kernels():
    """15 kernels of a dense layer share 3 s. In place of its MLP's three, experts: router 1, top-k 8, counts, permute, two
    all-to-alls, sort, activation, unsort, combine, unpermute 1 each, and two products of four experts a device that go to four
    streams, 1 + 3 / 4 each: 21.5. 3 s * (15 - 3 + 21.5) / 15 = 6.7 s.
    """
    assembly = Assembly(job(dp=2, ep=2, microbatches=2, model={"moe": MOE}))
    (layer,) = assembly.kinds
    assert part_gap_s(3.0, assembly, layer) == pytest.approx(6.7)


def test_the_gaps_of_experts_do_not_depend_on_attention():
    """Norms of q and k are a kernel more, which adds no gap to a dense layer, and none to one with experts."""
    assembly = Assembly(job(dp=2, ep=2, microbatches=2, model={"moe": MOE, "qk_norm": True}))
    (layer,) = assembly.kinds
    assert part_gap_s(3.0, assembly, layer) == pytest.approx(6.7)


def test_graphs_halve_the_gaps_of_what_they_launch():
    """Of the 21.5 kernels of experts the router and top-k, 9, are in graphs, and of the others the norm before them, one of
    eight: 3 s * (12 * 7.5 / 8 + 12.5 + 4.5) / 15 = 5.65 s.
    """
    graphs = {"cuda_graphs": ["moe_router"]}
    assembly = Assembly(job(dp=2, ep=2, microbatches=2, model={"moe": MOE}, performance=graphs))
    (layer,) = assembly.kinds
    assert part_gap_s(3.0, assembly, layer) == pytest.approx(5.65)


def test_a_layer_of_experts_alone_has_the_gaps_of_its_own_kernels():
    """Half of a dense layer is 7.5 kernels, without its MLP 4.5; the experts of Nemotron's pattern add what they do elsewhere:
    3 s * (4.5 + 21.5) / 15 = 5.2 s.
    """
    assembly = Assembly(job(dp=2, ep=2, microbatches=2, model={"moe": MOE, "hybrid_pattern": "*E"}))
    layer = next(part for part in assembly.kinds if part.kind == "experts")
    assert part_gap_s(3.0, assembly, layer) == pytest.approx(5.2)
