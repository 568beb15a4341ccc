"""Seconds of an exchange that sends a row once to each domain that needs it (DeepEP, HybridEP; deepseek-ai/DeepEP README)."""

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple

from steptime.base.num import Num, is_column, maximum, where
from steptime.cost.comm import FREE, CommCost
from steptime.hardware.machine import Tier
from steptime.job.mesh import Group, members_per_domain
from steptime.model.ops import Comm
from steptime.model.router_choice import Routing
from steptime.software.performance import Software

EXCHANGE_S = 77e-6
"""Minimum time of a call, even for few bytes: dispatch of 128 tokens over 8 ranks of H800 (DeepEP README, low latency)."""

PER_SM = {9: 16.5e9, 10: 21.2e9}
"""What DeepEP's kernels inside one NVLink domain receive on one multiprocessor, of a call without its EXCHANGE_S, by major
compute capability: the mean of dispatch and combine, each the other's backward. B200, 24 SMs, bf16: 319 MB at 494 and 420 GB/s,
23.4 and 19.5; on 16 to 32 SMs the mean is 21.9 to 20.6, on GB200 3 % more, there 13 % less on 16 ranks, and on 24 the combine a
third (deepseek-ai/DeepEP@94a9f8f docs/README_Hybrid-EP.md). H100, 20 SMs: 330 MB in 1.005 and 1.155 ms, 17.8 and 15.4
(tile-ai/tilescale pull request 40). HybridEP is on 8 ranks within 6 % as fast on 16 SMs as on 32 (the same README) [B/s]."""

DEFAULT_SMS = 20
"""SMs of DeepEP's kernels unless its user sets them: Buffer.num_sms (deepseek-ai/DeepEP@94a9f8f deep_ep/buffer.py), which is
also Megatron-Core's and NeMo AutoModel's default (moe_deepep_num_sms, dispatcher_num_sms)."""

SECOND = "torchtitan"
"""The profile with DeepEP 2, since 2026-06-28 (pytorch/torchtitan pull request 3808): it takes as many SMs as its links need
(deepseek-ai/DeepEP@dd758ca deep_ep/buffers/elastic.py, get_theoretical_num_sms)."""


def kernel_rate(software: Software, sm_count: float | None) -> float:
    """Rate at which the kernels of an exchange can receive inside one domain, whatever its links; inf if nothing limits them."""
    moe, device = software.moe, PER_SM.get(int(software.compute_capability))
    if device is None or moe.flex_backend != "deepep" or (moe.deepep_sms is None and software.name == SECOND):
        return inf
    return device * min(moe.deepep_sms or DEFAULT_SMS, sm_count or inf)


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


def exchange(
    bytes_: Num, routing: Routing, group: Group, tiers: Sequence[Tier], copies: Num, kernels: float = inf
) -> CommCost:
    """One call over a group of which a rank receives `bytes_`, `copies` rows for each token of it.

    Tiers stream at once, and the slowest determines the time; inside one domain not less than at `kernels` [B/s].
    """
    if not is_column(group.ranks) and group.ranks <= 1:
        return FREE
    pace = where(group.ranks <= members_per_domain(group, tiers[0].size), 1.0 / kernels, 0.0)
    name: Num = ""
    for one in passages(routing, group, tiers, copies):
        pace = maximum(pace, one.share / (one.tier.bytes_per_s * one.efficiency))  # 0 where it is not crossed
        name = where(one.crossed, one.tier.name, name)
    bandwidth = bytes_ * pace
    found = CommCost(EXCHANGE_S, bandwidth, name, EXCHANGE_S + bandwidth, "exchange")
    if not is_column(group.ranks):
        return found
    return CommCost(*(where(group.ranks > 1, field, free) for field, free in zip(found, FREE, strict=True)))


def priced(op: Comm, bytes_: Num, groups: Mapping[str, Group], tiers: Sequence[Tier], kernels: float) -> CommCost:
    """One call of an op with `routing`, over the ranks of its axis, of which each receives `bytes_` in rows, and their scores."""
    if op.routing is None:
        return FREE
    group, copies = groups[op.axis], op.routing.distinct(groups["ep"].ranks) * groups["etp"].ranks
    return exchange(bytes_ + score_bytes(op, group, tiers), op.routing, group, tiers, copies, kernels)
