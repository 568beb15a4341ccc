"""Seconds of an exchange that sends a row once to each domain that needs it (DeepEP, HybridEP; deepseek-ai/DeepEP README)."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from steptime.base.num import Num, is_column, maximum, where
from steptime.cost.comm import FREE, CommCost
from steptime.hardware.machine import Tier
from steptime.job.mesh import Group, members_per_domain
from steptime.model.ops import Comm
from steptime.model.router_choice import Routing

EXCHANGE_S = 77e-6
"""Minimum time of a call, even for few bytes: dispatch of 128 tokens over 8 ranks of H800 (DeepEP README, low latency)."""


class Passage(NamedTuple):
    """What an exchange sends over one tier."""

    tier: Tier
    crossed: Num
    """Whether any row passes over it."""
    domains: Num
    """Domains that it joins, of the tiers below."""
    wanted: Num
    """Domains that hold any expert of a token."""
    share: Num
    """Of the bytes that a rank receives, those over this tier."""

    @property
    def efficiency(self) -> float:
        """Share of the wire rate that an exchange reaches."""
        return self.tier.exchange_efficiency or self.tier.efficiency


def passages(routing: Routing, group: Group, tiers: Sequence[Tier], copies: Num) -> Iterator[Passage]:
    """Every tier, the innermost first.

    The innermost tier carries the tokens for other ranks of the domain; an outer tier carries one copy of a token for each other
    domain that holds any of its experts.
    """
    below: Num = 1.0
    for tier in tiers:
        members = group.ranks if tier is tiers[-1] else members_per_domain(group, tier.size)
        domains = group.ranks / below
        wanted = routing.distinct(maximum(domains, 1.0))
        share = where(below > 1, wanted * (domains - 1.0) / maximum(domains, 1.0) / copies, (members - 1.0) / members)
        yield Passage(tier, members > below, domains, wanted, share)
        below = members


def score_bytes(op: Comm, group: Group, tiers: Sequence[Tier]) -> Num:
    """Bytes of the scores that an exchange sends with its rows: for each expert of the innermost domain."""
    if op.routing is None:
        return 0.0
    return op.score_bytes * op.routing.n_experts * members_per_domain(group, tiers[0].size) / group.ranks


def exchange(bytes_: Num, routing: Routing, group: Group, tiers: Sequence[Tier], copies: Num) -> CommCost:
    """One call over a group of which a rank receives `bytes_`, `copies` rows for each token of it.

    Tiers stream at once, and the slowest determines the time.
    """
    if not is_column(group.ranks) and group.ranks <= 1:
        return FREE
    pace: Num = 0.0
    name: Num = ""
    for one in passages(routing, group, tiers, copies):
        pace = maximum(pace, where(one.crossed, one.share / (one.tier.bytes_per_s * one.efficiency), 0.0))
        name = where(one.crossed, one.tier.name, name)
    bandwidth = bytes_ * pace
    found = CommCost(EXCHANGE_S, bandwidth, name, EXCHANGE_S + bandwidth, "exchange")
    if not is_column(group.ranks):
        return found
    return CommCost(*(where(group.ranks > 1, field, free) for field, free in zip(found, FREE, strict=True)))
