"""Seconds and counts of FSDP's groups: an empty root, experts beside their block, ZeRO++'s second partition."""

from __future__ import annotations

import pytest
from physics_jobs import job, machine

from steptime.cost.rates import rates
from steptime.fsdp.calls import Calls, calls_without_pipeline
from steptime.fsdp.groups import Buffers, ParamGroup, buffers, flat_group, group_of, groups, layer_group
from steptime.fsdp.seconds import CommSeconds, price
from steptime.hardware.machine import Machine
from steptime.job.assembly import Assembly
from steptime.model.ops import Param

MOE = {"moe": {"n_experts": 4, "experts_per_token": 1, "expert_inter_sz": 256}}


def priced(assembly: Assembly, of: ParamGroup) -> CommSeconds:
    on = assembly.job.machine
    return price(assembly, tuple(on.tiers), of, rates(on.accelerator, assembly.job.software))


SMALL = [Param("a", (6, 4)), Param("f", (3, 2), group="frozen"), Param("b", (5,))]
"""On four ranks rows are rounded up to 8 of 4, 4 of 2 and 8: 32 + 8 + 8 elements of 24 + 6 + 5."""


def test_figures_of_a_group():
    """The last trained one has 5 elements, one is a matrix; of 48 and 35 elements 8 and 6 are frozen, so a rank trains 10."""
    found = group_of(SMALL, 1, 4)
    assert found == ParamGroup(48, 35, 4, 5, quantized=0.0, turned=0.0, frozen=6, frozen_padded=8, matrices=1)
    assert (found.kind, found.plain, found.experts) == ("dense", False, None)
    assert found.shard == found.trained_shard == 10


def test_matrices_cut_along_columns():
    """The columns of both matrices, 4 and 2 of rows 6 and 3, are whole on 2 ranks; only the vector's 5 elements are padded, to 6:
    36 elements of 35. 30 elements are copied once more; the last trained matrix has 24.
    """
    found = group_of(SMALL, 1, 2, dim=1)
    rows = group_of(SMALL, 1, 2)
    assert (found.padded, found.turned, found.chunked, found.last) == (24 + 6 + 6, 24 + 6, 24, 5)
    assert (rows.padded, rows.turned, rows.chunked) == (24 + 8 + 6, 0, 0)


def test_gradients_of_columns_at_their_reduction():
    """29 bf16 gradients, 58 B, and the last matrix's 24 again, 48 B, which stays beside what replaces them, 15 in fp32."""
    assembly = Assembly(job("fsdp2", dp=2, fsdp={"reduce_dtype": "fp32", "shard_dim": 1}))
    found = buffers(assembly, group_of(SMALL, 1, 2, dim=1))
    assert (found.gradients, found.chunked, found.reducing) == (58, 48, 58 + 48)
    assert found.reduced == 15 * 4 + 48


@pytest.mark.parametrize(
    ("reduced", "reduction", "sums"),
    [
        ("fp32", (160, 40, 40 + 10), 116),  # what is reduced becomes the stored gradient
        ("bf16", (80, 20, 20 + 40 + 10), 58),  # which is a copy in fp32
    ],
)
def test_buffers_of_a_group(reduced, reduction, sums):
    """fp32 shards of 12 go out in bf16, 24 B; gathered 96 B; gradients of 29 elements 58 B, the last one's 10; 40 elements are
    reduced to 10. Sums are of the reduction's dtype. A rank stores 10 gradients in fp32, 40 B.
    """
    assembly = Assembly(job("fsdp2", dp=4, fsdp={"reduce_dtype": reduced}))
    assert buffers(assembly, group_of(SMALL, 1, 4)) == Buffers(
        24, 96, 96, 58, *reduction, 0, last=10, sums=sums, stored=40
    )
    alone = buffers(assembly, group_of(SMALL, 1, 4)._replace(plain=True))
    assert alone == Buffers(0, 0, 0, 58, 0, 0, 0, 0, last=0, sums=58)


def test_gradients_are_stored_in_a_dtype_of_their_own():
    """Reduced in fp32 and stored in bf16 beside parameters in fp32: of 10 on a rank the output's 40 B, a copy's 20, which stays,
    and the last gradient's 10.
    """
    said = {"fsdp": {"reduce_dtype": "fp32"}, "performance": {"main_grad_dtype": "bf16"}}
    found = buffers(Assembly(job("fsdp2", dp=4, **said)), group_of(SMALL, 1, 4))
    assert (found.sent, found.reduced, found.stored) == (24, 40 + 20 + 10, 20)


def test_copies_of_a_group_with_turned_parameters():
    """10 of 48 elements are cut along dimension 1: 20 B are moved twice more, there and back. Else 96 B of parameters are
    read and written, and 70 B of gradients read and 192 B of fp32 written for the reduction.
    """
    assembly = Assembly(job("fsdp2", on=machine(memory=1.0), dp=4, fsdp={"reduce_dtype": "fp32"}))
    found = priced(assembly, ParamGroup(48, 35, 4, 5, turned=10.0, matrices=1))
    assert (found.copy_s, found.compute_s) == (2 * 96 + 2 * 20, 70 + 192 + 2 * 20)


def test_an_empty_root_takes_no_time():
    """Of a stage in the middle of a pipeline."""
    assembly = Assembly(job("fsdp2", on=machine(link=1.0, memory=1.0), dp=2, fsdp={}))
    assert priced(assembly, ParamGroup(0, 0, 2, 0)) == (0.0,) * 8


def test_experts_are_gathered_and_reduced_beside_their_block():
    """On links and memory of 1 B/s the experts' group adds its own gather, copies and reduction to those of the block."""
    on = machine(link=1.0, memory=1.0)
    assembly = Assembly(job("fsdp2", on=on, model=MOE, dp=4, ep=2, fsdp={"reduce_dtype": "fp32"}))
    both = groups(assembly, assembly.chunks[0]).layers[0]
    assert both.experts is not None
    block, experts = priced(assembly, both._replace(experts=None)), priced(assembly, both.experts)
    assert min(experts[:4]) > 0
    assert priced(assembly, both) == CommSeconds(*(a + b for a, b in zip(block, experts, strict=True)))


@pytest.mark.parametrize(("tp", "elements"), [(1, 512), (2, 256)])
def test_experts_of_a_flat_parameter(tp, elements):
    """4 experts of 8 x 16, cut over tp, which FSDP 1 spreads no further."""
    plan = job("fsdp2", model=MOE | {"n_q_heads": 2}, dp=2, tp=tp, sp=tp > 1, fsdp={"version": 1})
    found = flat_group(Assembly(plan), [Param("w", (4, 8, 16), group="expert", n_experts=4, top_k=1)], tp)
    assert found.elements == elements


@pytest.mark.parametrize(("microbatches", "again"), [(1, 0.0), (3, 2.0)])
def test_gathers_of_a_second_partition(microbatches, again):
    """Of three micro-batches the first gathers among all; the root twice among neighbors, a layer in each backward too: 5."""
    plan = job(
        "deepspeed", dp=8, microbatches=microbatches, zero_level=3, zero_plus_plus={"hpz_partition_size": 4},
        on=machine(node=4),
    )  # fmt: skip
    root, layer = calls_without_pipeline(Assembly(plan)).values()
    assert root == Calls(1.0, float(microbatches), again)
    assert layer == Calls(2.0, 2.0 * microbatches, 2 * (2.0 * microbatches - 1))


@pytest.mark.parametrize(
    ("software", "dp", "ranks", "plain"),
    [("automodel", 2, 1, True), ("automodel", 4, 2, False), ("fsdp2", 2, 1, False)],
)
def test_experts_that_no_other_rank_has(software, dp, ranks, plain):
    """On ep 2: of two devices each has its own experts, of four two share them. NeMo AutoModel leaves a lone device's unwrapped
    (nemo_automodel/components/moe/parallelizer.py, apply_fsdp); torchtitan wraps them all the same.
    """
    assembly = Assembly(job(software, model=MOE, dp=dp, ep=2, microbatches=2))
    experts = layer_group(assembly, assembly.kinds[0]).experts
    assert experts is not None
    assert (experts.ranks, experts.plain) == (ranks, plain)


def test_shards_that_wait_on_the_host():
    """12 of 48 elements in fp32, 48 B, come up before the gather at 2 B/s; gradients of 10 go down after the reduction, 40 B.
    Networks take no time.
    """
    figures = {"memory_bytes": 1e15, "memory_bytes_per_s": 1.0, "core_bytes_per_s": 1.0}
    on = Machine(**machine(host_bytes_per_s=2.0).model_dump(exclude={"host"}), host=figures)
    plan = job("fsdp2", on=on, dp=4, fsdp={"reduce_dtype": "fp32"}, performance={"cpu_offload": {"params": True}})
    found = priced(Assembly(plan), group_of(SMALL, 1, 4))
    assert (found.gather_s, found.reduce_s) == (pytest.approx(24.0, abs=1e-3), pytest.approx(20.0, abs=1e-3))
