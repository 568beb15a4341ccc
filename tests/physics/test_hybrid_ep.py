"""What HybridEP sends besides the rows: which token goes where, of all ranks, and the scores of all experts of a node."""

from __future__ import annotations

import pytest
from physics_jobs import SLIGHTLY, job, machine

from steptime.cost.exchange import score_bytes
from steptime.hardware.machine import Machine
from steptime.job.assembly import Assembly
from steptime.job.mesh import Group
from steptime.model.ops import Comm
from steptime.model.router_choice import Routing
from steptime.timing.part_times import part_times, pricing

MOE = {"n_experts": 8, "expert_inter_sz": 64, "experts_per_token": 2}


def flex(backend: str, software: str = "megatron-core") -> Assembly:
    """8 tokens a rank to 2 of 8 experts on ep 2."""
    how = {"moe": {"dispatcher": "flex", "flex_backend": backend}}
    return Assembly(job(software, model={"moe": MOE, "n_q_heads": 2}, performance=how, dp=2, ep=2, microbatches=2))


@pytest.mark.parametrize("software", ["megatron-core", "fsdp2"])
def test_maps_of_all_ranks_and_scores(software):
    """A byte for each of 8 experts of 8 tokens of 2 ranks, 128. A token has experts on 2 (1 - C(4, 2) / C(8, 2)) = 11/7 ranks, so
    88/7 rows arrive: 4 B of each for every expert of the node. Neither with DeepEP."""
    ops = {op.name: op for op in flex("hybridep", software).kinds[0].ops if isinstance(op, Comm)}
    assert (ops["moe.map"].kind, ops["moe.map"].backward, ops["moe.map"].bytes) == ("all_gather", None, 128)
    assert ops["moe.dispatch"].score_bytes == pytest.approx(4 * 88 / 7)
    assert ops["moe.combine"].score_bytes == 0
    plain = {op.name: op for op in flex("deepep", software).kinds[0].ops if isinstance(op, Comm)}
    assert "moe.map" not in plain
    assert plain["moe.dispatch"].score_bytes == 0


@pytest.mark.parametrize(("machine", "experts"), [("gb200-nvl72", 512), ("dgx-b200", 64)])
def test_scores_of_the_experts_of_a_node(machine, experts):
    """512 experts over 64 ranks: all of them where one domain has 72 devices, 8 devices' 64 where it has 8."""
    op = Comm("moe.dispatch", score_bytes=4000.0, routing=Routing(512, 22))
    tiers = tuple(Machine.load(machine).tiers)
    assert score_bytes(op, Group("ep_etp", 64.0, 1.0), tiers) == 4000.0 * experts


def test_scores_take_the_exchange_longer():
    """Dispatch forward, and in backward the gradients of its scores: 8 experts of one node, 32 B a row beside rows of 256 B. The
    part of the time that grows with bytes is 9/8 of DeepEP's."""
    times = []
    for backend in ("deepep", "hybridep"):
        assembly = flex(backend)
        works = part_times(assembly, pricing(assembly.job)).of[assembly.kinds[0]]
        calls = {call.name: call.cost.bandwidth_s for work in works[:2] for call in work.calls}
        times.append(
            [calls["moe.dispatch"], calls["moe.dispatch.grad"], calls["moe.combine"], calls["moe.combine.grad"]]
        )
    assert [new / old for old, new in zip(*times, strict=True)] == pytest.approx([1.125, 1.125, 1.0, 1.0])


@pytest.mark.parametrize(("etp", "node", "seconds"), [(1, 1, 1 / 2 / 0.25), (2, 2, 1 / 4 / 0.25), (2, 8, 3 / 4)])
def test_rows_leave_a_node_once_for_all_of_its_ranks(etp, node, seconds):
    """A token's row arrives on 11/7 of two ranks of experts, and on each of their `etp` devices.

    Apart, half of what arrives comes from the other node, at 1/4 B/s. Where etp's two ranks are a node, 11/7 * 1/2 rows of a
    token enter it for the 11/7 * 2 that arrive: a quarter. In one node, at 1 B/s, what the three other ranks send.
    """
    on = machine(link=1.0, outside=0.25, node=node)
    how = {"moe": {"dispatcher": "flex", "flex_backend": "deepep"}}
    layout = {"dp": 2, "tp": etp, "ep": 2, "etp": etp, "microbatches": 2}
    assembly = Assembly(job(on=on, model={"moe": MOE, "n_q_heads": 2}, performance=how, **layout))
    work = part_times(assembly, pricing(assembly.job)).of[assembly.kinds[0]].forward
    [cost] = [call.cost for call in work.calls if call.name == "moe.dispatch"]
    tokens = 8 / etp
    assert cost.bandwidth_s == pytest.approx(tokens * 11 / 7 * etp * 256 * seconds, rel=SLIGHTLY)
    assert cost.tier == ("inside" if node == 8 else "outside")


def test_scores_that_arrive_have_one_number_for_each_local_expert():
    """88/7 rows arrive, each with fp32 scores of the rank's 4 experts: 4 * 4 * 88/7 = 1,408/7 B, in HybridEP's own buffer."""
    [get] = [op for op in flex("hybridep").kinds[0].ops if op.name == "moe.dispatch"]
    [scores] = [t for t in get.outputs if t.name == "moe.arrived.probs"]
    assert (scores.bytes, scores.outside) == (pytest.approx(1_408 / 7), "both")


@pytest.mark.parametrize(("limited", "ranks"), [({}, 11 / 7), ({"n_groups": 4, "node_limit": 1}, 1)])
@pytest.mark.parametrize("software", ["megatron-core", "fsdp2"])
def test_rows_that_arrive_and_return(software, limited, ranks):
    """Of 8 tokens of 256 B, 11/7 copies each, as above; one where both experts are of the same group, which one rank has. One
    summed row of each token returns.
    """
    how = {"moe": {"dispatcher": "flex", "flex_backend": "deepep"}}
    model = {"moe": MOE | limited, "n_q_heads": 2}
    found = Assembly(job(software, model=model, performance=how, dp=2, ep=2, microbatches=2)).kinds[0].ops
    ops = {op.name: op for op in found}
    assert ops["moe.dispatch"].outputs[0].bytes == pytest.approx(8 * ranks * 256)
    assert ops["moe.combine"].outputs[0].bytes == 8 * 256
