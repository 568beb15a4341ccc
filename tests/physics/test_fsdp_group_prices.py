"""Seconds and counts of FSDP's groups: an empty root, experts beside their block, ZeRO++'s second partition."""

from __future__ import annotations

import pytest
from physics_jobs import job, machine

from steptime.cost.rates import rates
from steptime.fsdp.calls import Calls, calls_without_pipeline
from steptime.fsdp.groups import ParamGroup, flat_group, groups
from steptime.fsdp.seconds import CommSeconds, price
from steptime.job.assembly import Assembly
from steptime.model.ops import Param

MOE = {"moe": {"n_experts": 4, "experts_per_token": 1, "expert_inter_sz": 256}}


def priced(assembly: Assembly, of: ParamGroup) -> CommSeconds:
    on = assembly.job.machine
    return price(assembly, tuple(on.tiers), of, rates(on.accelerator, assembly.job.software))


def test_an_empty_root_takes_no_time():
    """Of a stage in the middle of a pipeline."""
    assembly = Assembly(job("fsdp2", on=machine(link=1.0, memory=1.0), dp=2, fsdp={}))
    assert priced(assembly, ParamGroup(0, 0, 2, 0)) == CommSeconds(0.0, 0.0, 0.0, 0.0, 0.0)


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
