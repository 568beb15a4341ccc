"""DeepEP's kernels: what they receive inside one NVLink domain by their multiprocessors, against published timings.

4,096 tokens of 7,168 in bf16 on each of 8 ranks, top 8 of 64 experts (deepseek-ai/DeepEP@94a9f8f docs/README_Hybrid-EP.md): a
token has experts on 8 * (1 - C(56, 8) / C(64, 8)) = 5.432 of them, so a rank receives 4,096 * 5.432 rows of 14,336 B, 319.0 MB.
"""

from __future__ import annotations

from math import inf

import pytest
from physics_jobs import SLIGHTLY, job, machine

from steptime.cost.exchange import exchange, kernel_rate
from steptime.hardware.machine import Machine
from steptime.job.assembly import Assembly
from steptime.job.mesh import Group
from steptime.model.router_choice import Routing
from steptime.software.performance import load_software
from steptime.timing.part_times import part_times, pricing


def rate(name: str = "megatron-core", capability: float = 10.0, count: float = 148, **moe):
    software = load_software(name)
    settings = software.moe.model_copy(update=moe)
    return kernel_rate(software.model_copy(update={"moe": settings, "compute_capability": capability}), count)


def seconds(node: str, received: float, limit: float) -> float:
    return exchange(received, Routing(64, 8), Group("ep", 8.0, 1), tuple(Machine.load(node).tiers), 5.432, limit).time_s


@pytest.mark.parametrize(
    ("sms", "dispatch", "combine"), [(16, 348, 302), (24, 494, 420), (28, 560, 477), (32, 619, 524)]
)
def test_b200_by_its_multiprocessors(sms, dispatch, combine):
    """The mean of 319.0 MB at both published rates, GB/s. 24: 645.7 and 759.5 us; 77 us + 319.0 MB / (24 * 21.2 GB/s) = 704."""
    published = (319.0e6 / dispatch + 319.0e6 / combine) / 2e9
    assert seconds("dgx-b200", 319.0e6, rate(deepep_sms=sms)) == pytest.approx(published, rel=0.035)


def test_more_of_them_than_fill_the_links():
    """48: 7/8 of 319.0 MB over links of 0.76 * 900 GB/s, as with any number; published 646 and 586 GB/s are 7 % slower."""
    found = seconds("dgx-b200", 319.0e6, rate(deepep_sms=48))
    assert found == pytest.approx(77e-6 + 7 / 8 * 319.0e6 / 684e9)
    assert found == pytest.approx((319.0e6 / 646e9 + 319.0e6 / 586e9) / 2, rel=0.07)


def test_h100_on_20():
    """330.4 MB, top 8 of 32 experts, in 1.0045 ms and back in 1.1552 (tile-ai/tilescale pull request 40, 10 channels)."""
    assert seconds("dgx-h100", 330.4e6, rate(capability=9.0)) == pytest.approx((1.0045e-3 + 1.1552e-3) / 2, rel=0.005)


def test_what_is_limited():
    """20 unless another number is said, no more than the device has. Not HybridEP, not DeepEP 2, which takes as many as it needs,
    and not on devices without published timings."""
    assert (rate(), rate(capability=9.0), rate(deepep_sms=24, count=8)) == (20 * 21.2e9, 20 * 16.5e9, 8 * 21.2e9)
    assert rate("torchtitan@0.2") == rate("torchtitan", deepep_sms=20) == 20 * 21.2e9
    assert {rate(flex_backend="hybridep"), rate("torchtitan"), rate(capability=8.0), rate(capability=0.0)} == {inf}


@pytest.mark.parametrize(("node", "per_s"), [(8, 4 * 21.2e9), (1, 2e12)])
def test_experts_in_one_node_and_in_several(node, per_s):
    """Two ranks of experts, 8 tokens of 256 B each, of which 11/7 * 8 arrive. In one node 4 multiprocessors are slower than its
    links of 1 TB/s; apart other kernels run, and half of what arrives comes over the 1 TB/s between nodes."""
    on = machine(link=1e12, node=node, compute_capability=10.0, sm_count=148)
    how = {"moe": {"dispatcher": "flex", "deepep_sms": 4}}
    moe = {"n_experts": 8, "expert_inter_sz": 64, "experts_per_token": 2}
    assembly = Assembly(job(on=on, model={"moe": moe, "n_q_heads": 2}, performance=how, dp=2, ep=2))
    [cost] = [
        call.cost
        for call in part_times(assembly, pricing(assembly.job)).of[assembly.kinds[0]].forward.calls
        if call.name == "moe.dispatch"
    ]
    assert cost.bandwidth_s == pytest.approx(8 * 11 / 7 * 256 / per_s, rel=SLIGHTLY)
