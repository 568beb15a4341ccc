"""The network of a job: tiers of its machine, and the link between data centers."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

from steptime.hardware.machine import Tier
from steptime.job.mesh import Group, members_per_domain

if TYPE_CHECKING:
    from steptime.hardware.machine import Machine
    from steptime.job.sections import CrossDc


def network(machine: Machine, cross_dc: CrossDc | None = None, devices: float | None = None) -> tuple[Tier, ...]:
    """The tiers of a machine, and the one between data centers, shared equally by the devices of a center.

    Args:
        machine: gives the tiers inside a center.
        cross_dc: the link between two centers: its rate is the total of all devices of one center, used in full, because no
            measured efficiency is known (listed in the assumptions).
        devices: all devices of the job; needed with `cross_dc`.

    Raises:
        ValueError: cross_dc without devices.
    """
    if cross_dc is None:
        return tuple(machine.tiers)
    if devices is None:
        raise ValueError("cross_dc: the number of devices is required to divide the bandwidth between data centers")
    per_center = devices / cross_dc.n_dcs
    inside = [tier for tier in machine.tiers if tier.size < per_center]
    outermost = machine.tiers[len(inside)] if len(inside) < len(machine.tiers) else None
    if outermost is not None:
        inside.append(outermost.model_copy(update={"size": per_center}))
    between = Tier(
        name="cross-dc",
        size=inf,
        bytes_per_s=cross_dc.interconnect_bandwidth_gbps * 1e9 / 8.0 / per_center,
        latency_s=cross_dc.interconnect_latency_s,
        efficiency=1.0,
        nics_per_node=None,
        link_bytes_per_s=None,
        in_network_efficiency=None,
        hierarchical=True,
    )
    return (*inside, between)


def one_link(group: Group, tiers: Sequence[Tier]) -> tuple[Tier, ...]:
    """The tiers as seen by a collective over `group` that crosses nodes over one link instead of the links of all its ranks."""
    members = members_per_domain(group, tiers[0].size)
    outer = (tier.model_copy(update={"bytes_per_s": tier.bytes_per_s / members}) for tier in tiers[1:])
    return (tiers[0], *outer)
