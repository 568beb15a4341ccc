"""A network that a calibration slows: links take longer by the factor, and so does each hop; nothing else changes."""

from __future__ import annotations

from math import inf

from steptime.cost.pace import slower_tiers
from steptime.hardware.machine import Tier

NODE = Tier(name="node", size=8, bytes_per_s=100e9, latency_s=2e-6, efficiency=0.8, link_bytes_per_s=20e9)
FABRIC = Tier(name="fabric", size=inf, bytes_per_s=10e9, latency_s=10e-6, efficiency=0.9)


def test_links_and_hops_by_the_factor():
    """Twice as long: 50 and 10 GB/s and 4 us in a node, 5 GB/s and 20 us between nodes."""
    node, fabric = slower_tiers((NODE, FABRIC), 2.0)
    assert (node.bytes_per_s, node.link_bytes_per_s, node.latency_s) == (50e9, 10e9, 4e-6)
    assert (fabric.bytes_per_s, fabric.link_bytes_per_s, fabric.latency_s) == (5e9, None, 20e-6)
    for slow, usual in ((node, NODE), (fabric, FABRIC)):
        assert (slow.name, slow.size, slow.efficiency) == (usual.name, usual.size, usual.efficiency)


def test_a_factor_of_one_changes_nothing():
    assert slower_tiers((NODE, FABRIC), 1.0) == (NODE, FABRIC)
