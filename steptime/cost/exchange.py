"""Seconds of an exchange that sends a row once to each domain that wants it (DeepEP, HybridEP; deepseek-ai/DeepEP README)."""

from __future__ import annotations

from collections.abc import Sequence

from steptime.base.num import Num, is_column, maximum, minimum, where
from steptime.cost.comm import FREE, CommCost
from steptime.hardware.machine import Tier
from steptime.job.mesh import Group, members_per_domain
from steptime.model.ops import Routing

EXCHANGE_S = 77e-6
"""Least time of a call, however little it sends: dispatch of 128 tokens over 8 ranks of H800 (DeepEP README, low latency)."""


def exchange(bytes_: Num, routing: Routing, group: Group, tiers: Sequence[Tier], copies: Num) -> CommCost:
    """One call over a group of which a rank receives `bytes_`, `copies` rows for each token of it.

    Over the innermost tier pass the rows of the other ranks there; over an outer one a copy for each other domain that any expert
    of the token lies in, at most as many as the routing is limited to. Tiers stream at once, and the slowest sets the pace.
    """
    if not is_column(group.ranks) and group.ranks <= 1:
        return FREE
    pace: Num = 0.0
    below: Num = 1.0
    name: Num = ""
    for tier in tiers:
        members = group.ranks if tier is tiers[-1] else members_per_domain(group, tier.size)
        crossed = members > below
        domains = group.ranks / below
        wanted = minimum(routing.distinct(maximum(domains, 1.0)), routing.limit)
        over = where(below > 1, wanted * (domains - 1.0) / maximum(domains, 1.0) / copies, (members - 1.0) / members)
        pace = maximum(pace, where(crossed, over / (tier.bytes_per_s * tier.efficiency), 0.0))
        name = where(crossed, tier.name, name)
        below = members
    bandwidth = bytes_ * pace
    found = CommCost(EXCHANGE_S, bandwidth, name, EXCHANGE_S + bandwidth, "exchange")
    if not is_column(group.ranks):
        return found
    return CommCost(*(where(group.ranks > 1, field, free) for field, free in zip(found, FREE, strict=True)))
