"""Terms that a whole job hides behind larger ones, each by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from physics_jobs import job, machine

from steptime.answer.result import estimate
from steptime.cost.compute import NOTHING
from steptime.cost.nodes import run_by_host
from steptime.cost.work import Work
from steptime.fsdp.groups import buffers, groups
from steptime.job.assembly import Assembly
from steptime.job.local_params import Pieces
from steptime.memory.allocator_blocks import LargeBlocks, shards
from steptime.memory.block_rests import MIB, whole_blocks
from steptime.model.ops import Casting, Gemm, Move, Op, Param
from steptime.software.precision import RECIPES
from steptime.timing.looped_update import launches_s
from steptime.timing.part_times import launches, more_launches


def test_a_kernel_that_does_not_run():
    """It has no work and takes no time, and adds nothing to a part's."""
    work = Work()
    work.add(Move("a"), NOTHING)
    assert work == Work()
    assert NOTHING == (0.0,) * 6


@pytest.mark.parametrize(("graphs", "runs"), [(True, False), (["attn"], True), (False, True)])
def test_cuda_graphs_of_all_ops_leave_the_host_no_node(graphs, runs):
    plan = job("torch", performance={"step_graph": "simplified", "cuda_graphs": graphs})
    timing = replace(plan.software.timing, node_s=1e-6)
    assert run_by_host(timing) is runs
    assert not run_by_host(replace(timing, node_s=0.0))
    assert not run_by_host(replace(timing, step_graph="none"))


@pytest.mark.parametrize(("of_experts", "kernels"), [(True, 1 + 7 / 4 + 2), (False, 1 + 7 / 4)])
def test_launches_of_grouped_products_and_of_their_casts(of_experts, kernels):
    """Eight experts over four streams, and torchao's two kernels that quantize the rows first."""
    recipe = RECIPES["fp8_rowwise"]._replace(of_experts=of_experts)
    op = Gemm("up", count=8.0, grouped=True, recipe=recipe, forward_cast=Casting(kernels=2.0))
    assert launches(op) == kernels


@pytest.mark.parametrize(
    ("layers", "dense", "graphed"),
    # a layer has 15 launches, of which the MLP's 3 are left out, and once more where a part is half of one
    [(1.0, 15, 12), (2.0, 30, 24), (0.5, 7.5, 4.5)],
)
def test_gaps_of_experts_beside_those_of_dense_layers(layers, dense, graphed):
    """Two kernels of a norm and four of experts."""
    ops: list[Op] = [Move("norm", kernels=2.0, role="norm"), Move("experts.act", kernels=4.0, role="moe_act")]
    assert more_launches(ops, False, layers) == pytest.approx((graphed + 4) / dense)
    assert more_launches(ops, True, layers) == pytest.approx((graphed + 4) / dense / 2)


def test_parts_that_take_no_time_are_not_listed():
    """Products and attention always are: a stack of MLPs alone has no attention."""
    on = machine(flops=1.0, kernels={"layer_gap_s": 1.0})
    plain = estimate(job("torch", on=on)).time.parts_s
    assert plain.keys() == {"gemm", "attention", "memory_bound", "launch", "optimizer"}
    mlps = job(on=on, model={"n_layers": 2, "hybrid_pattern": "--"})
    found = estimate(mlps).time.parts_s
    assert found["attention"] == 0.0
    assert "tp_comm" not in found
    assert found["gemm"] > 0.0


def test_where_blocks_begin_and_end():
    """Of 1 MiB or less a tensor is of the other pool (kSmallSize). A rest of more than that is cut off, one of 1 MiB is not.

    From 10 MiB on a block is a multiple of 2 MiB, below it has 20 MiB (kMinLargeAlloc, kLargeBuffer).
    """
    assert LargeBlocks().allocate(MIB) is None
    blocks = LargeBlocks()
    assert blocks.allocate(11.0 * MIB) == (0.0, 12.0 * MIB, 11.0 * MIB)
    assert blocks.rest == MIB
    blocks = LargeBlocks()
    assert blocks.allocate(10.5 * MIB) == (0.0, 10.5 * MIB, 10.5 * MIB)  # 1.5 MiB of 12 are cut off
    assert blocks.allocate(1.5 * MIB) == (10.5 * MIB, 1.5 * MIB, 1.5 * MIB)
    blocks = LargeBlocks()
    assert blocks.allocate(9.5 * MIB) == (0.0, 9.5 * MIB, 9.5 * MIB)
    assert blocks.allocate(10.5 * MIB) == (9.5 * MIB, 10.5 * MIB, 10.5 * MIB)


def test_a_rank_has_its_share_of_every_bucket():
    """Two buckets of 128 elements, each of a tensor of 100, on two ranks: the last has 64 to 100 of both."""
    assert shards([Pieces(100, 1), Pieces(100, 1)], [128.0, 128.0], 2.0) == [36.0, 36.0]


@pytest.mark.parametrize(
    ("software", "said", "whole"),
    [
        ("megatron-core", {}, True),
        ("megatron-core", {"expandable_segments": True}, False),
        ("torch", {}, False),
    ],
)
def test_states_in_whole_blocks(software, said, whole):
    """Megatron's flat buffers; not of a device without a compute capability, which is not NVIDIA's."""
    plan = job(software, on=machine(compute_capability=9.0), performance=said)
    assert whole_blocks(plan.software) is whole
    assert not whole_blocks(job(software, performance=said).software)


@pytest.mark.parametrize(
    ("software", "said", "seconds"),
    [
        # 8 kernels of each of 21 tensors: two layers have 9 each, the ends 3
        ("torch", {}, 8 * 21),
        ("torch", {"tp": 2, "model": {"n_q_heads": 2}}, 8 * 21 * 2.5),
        ("torch", {"dp": 2, "zero_level": 1}, 8 * 21 / 2),  # a rank owns every second tensor
        ("fsdp2", {"dp": 2, "fsdp": {}}, 8 * 21 * 2.5),
        ("fsdp2", {"dp": 2, "fsdp": {"reshard_after_forward": False}}, 8 * 21 * 2.5),
        ("fsdp2", {"dp": 2, "fsdp": {}, "performance": {"optimizer": "sgd"}}, 0.0),
        ("fsdp2", {"dp": 2, "fsdp": {}, "performance": {"optimizer_impl": "fused"}}, 0.0),
        ("fsdp2", {"dp": 2, "fsdp": {}, "performance": {"cpu_offload": {"optimizer": 1.0, "params": True}}}, 0.0),
    ],
)
def test_what_the_host_launches_in_an_update_of_each_tensor(software, said, seconds):
    """1 s a launch, 2.5 s on DTensors; offloaded the update runs on the host itself."""
    host = {"memory_bytes": 1e15, "memory_bytes_per_s": 1e12, "core_bytes_per_s": 1e12}
    on = machine(kernels={"host_kernel_s": 1.0}, host_bytes_per_s=1e12)
    on = type(on)(**on.model_dump(exclude={"host"}), host=host)
    performance = {"optimizer_impl": "for_loop"} | said.get("performance", {})
    plan = job(software, on=on, **(said | {"performance": performance}))
    assembly = Assembly(plan)
    assert launches_s(plan, assembly.chunk_params(assembly.chunks[0])) == seconds


@pytest.mark.parametrize(("version", "reduce", "bytes_"), [(1, "fp32", 2), (1, "bf16", 2), (2, "fp32", 4)])
def test_sums_of_gradients_that_are_not_reduced_yet(version, reduce, bytes_):
    """A layer's 164,096: version 1 adds to its flat gradient in bf16, version 2 in the dtype of the reduction."""
    said: dict[str, Any] = {"version": version, "reduce_dtype": reduce, "no_sync": True}
    assembly = Assembly(job("fsdp2", dp=2, microbatches=2, fsdp=said))
    found = groups(assembly, assembly.chunks[0])
    assert buffers(assembly, found.layers[0]).sums == bytes_ * 164_096


def test_a_parameter_of_experts_is_one_of_a_few():
    """`Param.n_experts` alone makes a product one whose rows a router chooses."""
    assert not Gemm("w", params=(Param("w", (4, 4)),)).routed
    assert Gemm("w", params=(Param("w", (4, 4), n_experts=2),)).routed
