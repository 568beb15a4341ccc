"""Latency, bandwidth and the ramp between them, by hand.

Eight ranks of 100 GB/s and 2 us a hop in a node, 10 GB/s and 10 us between nodes. What a ring or tree costs before its first hop
is 8.4 us, a reduction in the switch 25 us, a send 4.5 us (NCCL tuning.cc). The ramp is 0.6 times the geometric mean of the
bandwidth's seconds and of the latency that a tree over the same tiers would have.
"""

from __future__ import annotations

from math import inf, sqrt
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from steptime.cost.comm import CommCost, collective
from steptime.cost.exchange import exchange, score_bytes
from steptime.cost.part_seconds import Context
from steptime.hardware.machine import Tier
from steptime.job.mesh import Group
from steptime.model.ops import Comm
from steptime.model.router_choice import Routing

NODE = Tier(name="node", size=8, bytes_per_s=100e9, latency_s=2e-6, efficiency=1.0)
FABRIC = Tier(name="fabric", size=inf, bytes_per_s=10e9, latency_s=10e-6, efficiency=1.0)


@pytest.mark.parametrize(
    ("kind", "ranks", "stride", "latency_s", "bandwidth_s", "tree_s"),
    [
        # 7 hops in a node; 7/8 of 8 MB; a chain of 7 is the node's tree too
        ("all_gather", 8, 1, 8.4e-6 + 7 * 2e-6, 7 / 8 * 8e6 / 100e9, 8.4e-6 + 7 * 2e-6),
        # two nodes: 15 hops of which 1 between them; eight NICs together; tree: 7 hops inside, 1 level outside
        ("reduce_scatter", 16, 1, 8.4e-6 + 14 * 2e-6 + 10e-6, 15 / 16 * 8e6 / 80e9, 8.4e-6 + 7 * 2e-6 + 10e-6),
        # four nodes: 28 hops inside, 3 between; two levels of a tree
        ("all_gather", 32, 1, 8.4e-6 + 28 * 2e-6 + 3 * 10e-6, 31 / 32 * 8e6 / 80e9, 8.4e-6 + 7 * 2e-6 + 2 * 10e-6),
        # one rank in each of 16 nodes: 15 hops on a NIC of its own; four levels
        ("all_gather", 16, 8, 8.4e-6 + 15 * 10e-6, 15 / 16 * 8e6 / 10e9, 8.4e-6 + 4 * 10e-6),
        # half of the ranks of a node: four in each of two
        ("all_gather", 8, 2, 8.4e-6 + 6 * 2e-6 + 10e-6, 7 / 8 * 8e6 / 40e9, 8.4e-6 + 3 * 2e-6 + 10e-6),
        # to all at once, 1 us each: every rank sends 8 of its 16 pieces to the other node, by its own NIC at 0.9 of a ring's rate
        ("all_to_all", 16, 1, 8.4e-6 + 10e-6 + 15 * 1e-6, 8 / 16 * 8e6 / 9e9, 8.4e-6 + 7 * 2e-6 + 10e-6),
        # inside a node all but its own, at 0.9 of 100 GB/s
        ("all_to_all", 8, 1, 8.4e-6 + 2e-6 + 7 * 1e-6, 7 / 8 * 8e6 / 90e9, 8.4e-6 + 7 * 2e-6),
        # every byte passes every link once
        ("broadcast", 8, 1, 8.4e-6 + 7 * 2e-6, 8e6 / 100e9, 8.4e-6 + 7 * 2e-6),
        # one hop over the outermost tier between the two; its ramp has the level of a tree over two
        ("send_recv", 2, 1, 4.5e-6 + 2e-6, 8e6 / 100e9, 4.5e-6 + 2e-6),
        ("send_recv", 2, 8, 4.5e-6 + 10e-6, 8e6 / 10e9, 4.5e-6 + 10e-6),
    ],
)
def test_one_pass(kind, ranks, stride, latency_s, bandwidth_s, tree_s):
    cost = collective(kind, 8e6, Group("dp", ranks, stride), (NODE, FABRIC))
    assert cost.latency_s == pytest.approx(latency_s)
    assert cost.bandwidth_s == pytest.approx(bandwidth_s)
    assert cost.time_s == pytest.approx(latency_s + bandwidth_s + 0.6 * sqrt(tree_s * bandwidth_s))


def test_an_all_reduce_makes_its_hops_twice():
    """A ring of 16 in two nodes reduces and then gathers: 2 * (14 * 2 + 1 * 10) us, and of the ramp 2 * (7 * 2 + 10) us."""
    cost = collective("all_reduce", 16e9, Group("dp", 16, 1), (NODE, FABRIC))
    bandwidth_s = 2 * 15 / 16 * 16e9 / 80e9
    assert cost.algorithm == "ring"
    assert cost.latency_s == pytest.approx(84.4e-6)
    assert cost.time_s == pytest.approx(84.4e-6 + bandwidth_s + 0.6 * sqrt(56.4e-6 * bandwidth_s))


def test_a_tree_sends_all_up_and_all_down():
    """1 KB: 8.4 us and 2 * (7 * 2 + 10) us of hops, which are the ramp's too; 2 * 1 KB at 0.92 of a ring's 80 GB/s."""
    cost = collective("all_reduce", 1e3, Group("dp", 16, 1), (NODE, FABRIC))
    bandwidth_s = 2 * 1e3 / (0.92 * 80e9)
    assert cost.algorithm == "tree"
    assert cost.time_s == pytest.approx(56.4e-6 + bandwidth_s + 0.6 * sqrt(56.4e-6 * bandwidth_s))


def test_a_switch_that_adds_takes_one_hop_up_and_one_down():
    """Eight ranks send 9/8 of 8 GB at the switch's 0.8 of the wire; hops 2 * 2 us; the ramp's chain of 7, twice."""
    switch = NODE.model_copy(update={"in_network_reduction": True, "in_network_efficiency": 0.8})
    cost = collective("all_reduce", 8e9, Group("dp", 8, 1), (switch, FABRIC))
    bandwidth_s = 9 / 8 * 8e9 / 80e9
    assert cost.algorithm == "in-network"
    assert cost.latency_s == pytest.approx(25e-6 + 4e-6)
    assert cost.time_s == pytest.approx(29e-6 + bandwidth_s + 0.6 * sqrt((25e-6 + 28e-6) * bandwidth_s))


def test_a_pair_without_a_switch_has_one_link():
    """Links of 10 GB/s to each of 7 peers: two ranks have one between them, four 3, and eight 7, no more than the wire's 60."""
    mesh = NODE.model_copy(update={"link_bytes_per_s": 10e9, "bytes_per_s": 60e9})
    for ranks, links in ((2, 1), (4, 3), (8, 6)):
        cost = collective("all_gather", 8e9, Group("dp", ranks, 1), (mesh, FABRIC))
        assert cost.bandwidth_s == pytest.approx((ranks - 1) / ranks * 8e9 / (links * 10e9))


def test_a_hop_between_centers_adds_no_ramp():
    """Two centers of 8 devices: the 5 ms of the link between them are waited for once, and are no part of the ramp."""
    far = Tier(name="far", size=inf, bytes_per_s=100e9, latency_s=5e-3, efficiency=1.0, hierarchical=True)
    cost = collective("all_gather", 8e9, Group("dp", 16, 1, centers=2.0), (NODE, far))
    bandwidth_s = 15 / 16 * 8e9 / 100e9
    assert cost.latency_s == pytest.approx(8.4e-6 + 14 * 2e-6 + 5e-3)
    assert cost.time_s == pytest.approx(cost.latency_s + bandwidth_s + 0.6 * sqrt((8.4e-6 + 14e-6) * bandwidth_s))


def test_phases_inside_and_across_centers():
    """Two centers of a node of 8, whose link is slow: each gathers its 8 ranks' 8 MB; then each rank and its twin exchange an
    eighth over the link, half of it each way, in one hop of 5 ms.
    """
    center = FABRIC.model_copy(update={"size": 16})
    far = Tier(name="far", size=inf, bytes_per_s=1e6, latency_s=5e-3, efficiency=1.0, hierarchical=True)
    cost = collective("all_gather", 8e6, Group("dp", 16, 1, centers=2.0), (NODE, center, far))
    inside, across = 7 / 8 * 8e6 / 100e9, 1 / 2 * 8e6 / 8 / 1e6
    assert (cost.tier, cost.algorithm) == ("far", "hierarchical")
    assert cost.bandwidth_s == pytest.approx(inside + across, rel=1e-9)
    assert cost.latency_s == pytest.approx(8.4e-6 + 7 * 2e-6 + 8.4e-6 + 5e-3)


def test_an_exchange_sends_a_row_once_to_each_node():
    """One expert a rank, top 1. Two ranks of a node send half of 8 MB at 100 GB/s, eight 7/8 of it. Sixteen in two nodes: a token
    wants one node, in half of all cases the other: half of 8 MB at 10 GB/s; inside 7/8 as before, which is less. One rank: none.
    A call takes 77 us however little it sends (dispatch of 128 tokens over 8 ranks of H800, DeepEP README).
    """
    wanted = {
        1: 0.0,
        2: 77e-6 + 1 / 2 * 8e6 / 100e9,
        8: 77e-6 + 7 / 8 * 8e6 / 100e9,
        16: 77e-6 + 1 / 2 * 8e6 / 10e9,
    }
    ranks = np.array([*wanted], dtype=float)
    tiers = (NODE, FABRIC)
    in_a_column = exchange(8e6, Routing(16, 1), Group("ep", ranks, 1), tiers, 1.0).time_s
    one_by_one = [exchange(8e6, Routing(16, 1), Group("ep", float(n), 1), tiers, 1.0).time_s for n in ranks]
    assert in_a_column == pytest.approx([*wanted.values()])
    assert one_by_one == pytest.approx([*wanted.values()])


def test_an_exchange_sends_a_copy_to_each_node_that_holds_an_expert():
    """Top 2 of 16 experts, one a rank, in two nodes: a token wants 2 * (1 - C(8, 2) / C(16, 2)) = 23 / 15 nodes, half of them
    the other one. Of the two rows that a rank receives for each of its tokens 23 / 60 come from there: 8 MB at 10 GB/s.
    """
    found = exchange(8e6, Routing(16, 2), Group("ep", 16.0, 1), (NODE, FABRIC), 2.0)
    assert found.time_s == pytest.approx(77e-6 + 23 / 60 * 8e6 / 10e9)
    assert (found.tier, found.latency_s) == ("fabric", 77e-6)


def test_an_exchange_of_its_own_rate():
    """Eight ranks whose exchange reaches 0.4 of 100 GB/s: 7/8 of 8 MB in 175 us; a ring keeps its own rate, 70 us."""
    slow = NODE.model_copy(update={"exchange_efficiency": 0.4})
    assert exchange(8e6, Routing(8, 1), Group("ep", 8.0, 1), (slow,), 1.0).time_s == pytest.approx(77e-6 + 175e-6)
    assert collective("all_gather", 8e6, Group("tp", 8.0, 1), (slow,)).bandwidth_s == pytest.approx(70e-6)


def test_a_switch_whose_share_is_unknown_reduces_at_that_of_a_ring():
    """Half of 100 GB/s: each of 8 ranks sends its 8 GB, and an eighth of the sum, which the switch makes, again."""
    switch = NODE.model_copy(update={"in_network_reduction": True, "efficiency": 0.5})
    found = collective("all_reduce", 8e9, Group("dp", 8, 1), (switch, FABRIC))
    assert (found.algorithm, found.bandwidth_s) == ("in-network", pytest.approx(9 / 8 * 8e9 / 50e9))


def test_only_what_is_routed_has_scores():
    """Each rank of 8 sends 4 B of each of 16 experts in its node; an exchange of all tokens alike, none."""
    routed = Comm("e", kind="all_to_all", axis="ep", score_bytes=4.0, routing=Routing(16, 2))
    assert score_bytes(routed, Group("ep", 8, 1), (NODE, FABRIC)) == 4 * 16
    assert score_bytes(routed, Group("ep", 16, 1), (NODE, FABRIC)) == 4 * 16 / 2
    assert score_bytes(Comm("a", kind="all_to_all", score_bytes=4.0), Group("ep", 8, 1), (NODE, FABRIC)) == 0


@pytest.mark.parametrize(("neighbor_s", "hidden"), [(8.0, 3 * 2.0), (40.0, 3 * 5.0)])
def test_attention_hides_the_turns_of_a_ring(neighbor_s, hidden):
    """Three turns of 5 s, each beside a quarter of the attention kernel: 2 s of 8, or all 5 beside 10; 2 % slower by the NIC."""
    said: Any = SimpleNamespace(
        software=SimpleNamespace(overlap=SimpleNamespace(cp=True)),
        groups={"cp": Group("cp", 4, 8)},
        tiers=(NODE, FABRIC),
    )
    op = Comm("ring", kind="send", axis="cp", count=3.0, attention_share=0.25)
    found = Context.hidden(said, op, CommCost(0.0, 5.0, "fabric", 5.0, "ring"), neighbor_s)
    assert found == pytest.approx(hidden * 0.98)
