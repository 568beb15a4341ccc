"""Every rate that a job takes from its device, on a made-up device under a profile that makes everything twice as slow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from physics_jobs import job, machine
from rates import RATES

from steptime.cost.comm import _in_phases
from steptime.cost.compute import gemm_traffic, parameter_gradients, shape_efficiency
from steptime.cost.host import launch_host_s
from steptime.cost.rates import Rates, added_rates, head_64, rates
from steptime.fsdp.ends import GatheredEnds, ends_of
from steptime.fsdp.groups import Buffers, buffers, group_of, groups
from steptime.job.assembly import Assembly
from steptime.job.mesh import Group
from steptime.model.ops import Gemm, Param
from steptime.software.performance import Software
from steptime.software.precision import RECIPES


def profile(name: str, **timing: Any) -> Software:
    """Constants measured on the device itself, so that no share of another one's counts; all twice as slow."""
    software = job(name).software
    said = {"measured": True, "compute_factor": 2.0, "move_rate": 1.0, "gemm_kernel_s": 3.0, "move_kernel_s": 5.0}
    return software.model_copy(update={"timing": replace(software.timing, **(said | timing))})


def found(name: str = "torch", **figures: Any) -> Rates:
    said: dict[str, Any] = {"sustained_flops": {"bf16": 600.0}, "sm_count": 4, "memory_efficiency": 0.5}
    said |= {"flops": 1_000.0, "memory": 80.0, "torch_gemm_share": 0.75} | figures
    return added_rates(machine(**said).accelerator, profile(name))


def test_what_is_slowed_and_by_how_much():
    """Products also by torch's share of a tuned rate; attention runs at a share of the peak, here all of it."""
    torch, megatron = found(), found("megatron-core")
    assert (torch.gemm_flops, megatron.gemm_flops) == pytest.approx((600 / 2 * 0.75, 600 / 2))
    assert (torch.recipe_flops, megatron.recipe_flops) == pytest.approx((600 / 2 * 0.75, 600 / 2))
    assert (torch.attention_forward_flops, torch.attention_backward_flops) == (500.0, 500.0)
    assert (torch.bytes_per_s, torch.slowness) == (80 * 0.5 / 2, 2.0)
    assert (torch.gemm_kernel_s, torch.move_kernel_s) == (6.0, 10.0)
    assert torch.plain_share == 1.0
    assert found(peak_flops={"bf16": 1_000.0, "fp32": 150.0}).plain_share == 0.25


def test_kernels_that_do_not_use_tensor_cores_run_by_processor():
    """4 processors, half as fast: 0.68 and 0.65 TFLOP/s of scans and chunks, 21 GB/s of convolutions where memory is faster, 2.6
    and 16 billion elements a second each.
    """
    rate = found(memory=1e30)
    assert (rate.scan_flops, rate.chunk_flops) == pytest.approx((4 * 0.68e12 / 2, 4 * 0.65e12 / 2))
    assert rate.conv_bytes_per_s == pytest.approx(4 * 21e9 / 2)
    assert (rate.elements_per_s, rate.drawn_per_s) == pytest.approx((4 * 2.6e9 / 2, 4 * 1.6e10 / 2))
    assert found().conv_bytes_per_s == 20.0


def test_a_device_without_a_number_of_processors():
    """Shares of its peak, 1,000 FLOP/s over two: 0.091 and 0.06; nothing is limited by element."""
    rate = found(sm_count=None)
    assert (rate.scan_flops, rate.chunk_flops) == pytest.approx((45.5, 30.0))
    assert rate.conv_bytes_per_s == 20.0
    assert (rate.elements_per_s, rate.drawn_per_s) == (float("inf"), float("inf"))


def test_experts_in_low_precision_are_slowed_like_products():
    """By rows torch reaches a quarter of the dense rate, or the share of a measured profile: all of it."""
    on = machine(peak_flops={"bf16": 100.0, "fp8": 800.0}, sustained_flops={"fp8": 800.0}, compute_capability=9.0)
    software = profile("torchtitan")
    software = software.model_copy(update={"moe": software.moe.model_copy(update={"grouped_precision": "fp8_rowwise"})})
    device = on.accelerator.model_copy(update={"torch_gemm_share": 0.75})
    assert added_rates(device, software).experts_flops == pytest.approx(800 / 2 * 0.75)


@pytest.mark.parametrize(
    ("name", "microbatches", "moved"),
    [
        ("torch", 1, 0.0),  # the first micro-batch's gradient becomes the gradient
        ("torch", 4, 3 / 4 * (2 + 2 * 4)),  # later ones are read in bf16, the sum in fp32 read and written
        ("megatron-core", 4, 0.0),  # products add into the main gradient
    ],
)
def test_bytes_that_adding_gradients_moves(name, microbatches, moved):
    plan = job(name, performance={"main_grad_dtype": "fp32"})
    assert rates(plan.machine.accelerator, plan.software, microbatches).accumulate_bytes == moved


def test_a_products_traffic():
    """Seven products of 2 x 5 by 5 x 3 in bf16; a weight's gradient in fp32, which is read as well where products add to it."""
    plain = Gemm("a", m=2.0, n=3.0, k=5.0, count=7.0, params=(Param("w", (5, 3)),))
    left, right, out = 2 * 7 * 10, 2 * 7 * 15, 2 * 7 * 6
    assert gemm_traffic(plain, RATES) == (
        (left, right, out),
        (out, right, left),
        (left, out, 7 * 15 * 4 * 2),
    )


def test_kernels_that_pass_rows_in_turn_slow_down_like_others():
    op = Gemm("a", m=2.0, n=3.0, k=5.0, params=(Param("w", (5, 3)),), recipe=RECIPES["mxfp8"], in_turn_s=0.5)
    slow, fast = (parameter_gradients(op, RATES._replace(slowness=times)) for times in (3.0, 1.0))
    assert slow - fast == pytest.approx(0.5 * 2)


def test_tiles_of_128_by_256():
    """On one SM a product of a tile takes one wave, one of a row or a column more two; of 1.5 waves the second is half empty."""
    assert [shape_efficiency(m, n, 1.0, 3, 2.0, 0.0) for m, n in ((128, 256), (129, 256), (128, 257))] == [
        1 - 0.25 + 0.25 * 1.5 / 2,
        1.0,
        1.0,
    ]


@pytest.mark.parametrize(
    ("name", "performance", "tp", "seconds"),
    [
        ("torch", {"compile": "none"}, 1, 10.0),
        ("torch", {"compile": "none"}, 2, 25.0),
        ("torch", {"compile": "blocks"}, 1, 4.7),
        ("torch", {"compile": "blocks"}, 2, 4.7),
        ("torch", {"cuda_graphs": True, "compile": "none"}, 1, 0.0),
        ("megatron-core", {}, 2, 10.0),
    ],
)
def test_a_launch_of_ten_seconds(name, performance, tp, seconds):
    """DTensors take 2.5 times as long, compiled code 0.47 of it."""
    software = job(name, performance=performance).software
    slow = software.model_copy(update={"timing": replace(software.timing, host_kernel_s=10.0)})
    assert launch_host_s(slow, tp) == pytest.approx(seconds)


def test_attention_at_a_head_size_of_64():
    """Where a device states no rate of FlashAttention-2 its best kernel is that, at 0.87; others of NVIDIA have their own."""
    software = job("torch", performance={"attention_kernel": "best"}).software
    nvidia = {"compute_capability": 9.0, "fa2_forward_efficiency": 0.5}
    own, none = machine(**nvidia).accelerator, machine().accelerator
    assert head_64(none, software) == (0.87, 0.87)
    assert head_64(own, software) == (0.725, 0.836)
    assert head_64(own.model_copy(update={"compute_capability": None}), software) == (0.87, 0.87)
    assert head_64(own.model_copy(update={"microscaling": True}), software) == (0.667, 0.836)


def test_phases_of_a_collective_inside_one_domain():
    """Two ranks of a node of two: nothing crosses the outer tier, so the collective is named after the inner one."""
    tiers = machine(link=1.0, node=2).tiers
    steps = ("reduce_scatter", "all_gather"), "all_reduce"
    assert _in_phases(steps, 8.0, Group("dp", 2.0, 1.0), tiers).tier == "inside"
    assert _in_phases(steps, 8.0, Group("dp", 4.0, 1.0), tiers).tier == "outside"


FIRST = Buffers(1.0, 20.0, 300.0, 4e3, 5e4, 6e5, 7e6, 8e7, 0.0, 0.0)


@pytest.mark.parametrize(
    ("apart", "regathered", "ends"),
    [(True, True, (9.0, 20.0, 300.0)), (True, False, (9.0, 0.0, 0.0)), (False, False, (0.0, 0.0, 0.0))],
)
def test_gathered_ends(apart, regathered, ends):
    """What stays beside the head; the embedding's flat buffer and parameters in its own backward."""
    of = GatheredEnds(FIRST, FIRST, 9.0, separate=apart, regathered=regathered)
    assert (of.gathered_during_head, of.regathered_bytes, of.regathered_unsharded) == ends


@pytest.mark.parametrize(
    ("said", "between", "apart", "regathered"),
    [
        ({"ends": "root"}, 2 * (2 * 131_072 + 128), False, False),
        ({"ends": "apart"}, 0, True, True),
        ({"ends": "apart", "reshard_after_forward": False}, 2 * 131_072, True, False),
        ({"ends": "head"}, 2 * 131_072, True, False),
        ({"wrap": "parameter"}, 0, True, False),
    ],
)
def test_what_stays_between_the_ends(said, between, apart, regathered):
    """In bf16: embedding, head and norm in one root; or the embedding alone, where it is not freed after its forward."""
    assembly = Assembly(job("fsdp2", dp=2, fsdp=said))
    of = ends_of(assembly, buffers(assembly, groups(assembly, assembly.chunks[0]).root))
    assert (of.between, of.separate, of.regathered) == (between, apart, regathered)
    assert of.traced is (said.get("wrap") == "parameter")


def test_parameters_cut_along_their_second_dimension():
    """Of 6 x 4 over 4 ranks along dimension 1 each has 6; along dimension 0 two rows of 4, so 8 are padded. Tensor parallelism
    halves the split dimension first.
    """
    whole, split = Param("w", (6, 4)), Param("w", (6, 8), split_dim=1)
    assert [group_of([whole], 1, 4, dim=dim).padded for dim in (0, 1)] == [32, 24]
    assert [group_of([split], 2, 4, dim=dim).padded for dim in (0, 1)] == [32, 24]
