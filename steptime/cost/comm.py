"""Collectives on network tiers: latency, bandwidth, and the transition between them (ramp).

One table row per (kind, algorithm) says how many hops a call takes and which share of its bytes every rank sends; one
function applies a row to a group of ranks on the tiers of a machine. Everything works for numbers and for numpy columns of
bytes and ranks.

Sources: hops and base latencies NCCL@5067397c src/graph/tuning.cc; shares of bytes nccl-tests doc/PERFORMANCE.md ("bus
bandwidth") and Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH" (2005), section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from steptime.base.num import HASHED, Num, ceil, is_column, maximum, minimum, new_row, sqrt, tree_depth, where
from steptime.hardware.machine import Tier
from steptime.job.mesh import Group, members_per_domain

RAMP = 0.6
"""Weight of the ramp, sqrt(tree latency * bandwidth time), fitted to the all-reduce tables in tests/data/collectives.yaml. It
covers the middle of the size range, where neither latency nor bandwidth dominates: protocol switches (LL, LL128, Simple) and
pipelines that fill and drain."""


class CommCost(NamedTuple):
    """Seconds of one call; `time_s` is latency plus bandwidth plus the ramp."""

    latency_s: Num
    bandwidth_s: Num
    tier: Any
    """Name of the outermost tier that the group crosses, "" for a single rank: text, or a column of it."""
    time_s: Num
    algorithm: Any


FREE = CommCost(0.0, 0.0, "", 0.0, "")


class Algorithm(NamedTuple):
    """One way to run a collective."""

    name: str
    hops: Callable[[Num, Num, Num, bool], Num]
    """Hops over one tier: (ranks of the group, ranks in a domain below, ranks in a domain, innermost tier?)."""
    passes: float
    """How many times those hops are made: 2 for all-reduce (a reduction and a broadcast)."""
    share: Callable[[Num, Num, Num, bool], Num]
    """Bytes that a rank sends over one tier, divided by the bytes of the call; arguments as for `hops`."""
    base_s: float
    """Fixed cost of a call before its first hop [s]."""
    rate: float = 1.0
    """Rate divided by that of a ring."""
    joined: bool = True
    """Whether the ranks of a domain forward one stream, so that a group can use the links of all its ranks to the next domain."""
    in_switch: bool = False
    to_all: bool = False
    """Whether every rank sends to every other rank."""


def _ring_hops(ranks: Num, below: Num, members: Num, _innermost: bool) -> Num:
    """The hops of a ring (ranks - 1 in all) that cross this tier (tuning.cc: nInter = nodes - 1, the others are intra)."""
    return ceil(ranks / below) - ceil(ranks / members)


def tree_hops(_ranks: Num, below: Num, members: Num, innermost: bool) -> Num:
    """A chain in the innermost domain, a binary tree over domains (tuning.cc: (g - 1) intra + log2(nodes) inter)."""
    return members - 1.0 if innermost else tree_depth(ceil(members / below))


def _one_hop(ranks: Num, below: Num, members: Num, _innermost: bool) -> Num:
    """One hop, over the outermost tier between any two of the ranks."""
    return where(members > below, where(members >= ranks, 1.0, 0.0), 0.0)


def _all_but_own(ranks: Num, _below: Num, _members: Num, _innermost: bool) -> Num:
    """(n - 1) / n on every tier: each rank of a ring sends to one neighbor."""
    return (ranks - 1.0) / ranks


def _pairwise_share(ranks: Num, below: Num, members: Num, innermost: bool) -> Num:
    """All-to-all, 1/n of the bytes to each rank: in the innermost domain to its other ranks, on an outer tier to all outside.

    If the group does not fill all domains, the ranks of the smallest domain have the most to send out.
    """
    fewest = ranks - below * (ceil(ranks / below) - 1.0)
    return (members - 1.0) / ranks if innermost else (ranks - fewest) / ranks


def _switch_hops(_ranks: Num, below: Num, members: Num, _innermost: bool) -> Num:
    return where(members > below, 1.0, 0.0)


RING_S = 8.4e-6
"""Fixed cost of a ring or tree before its first hop [s]: NCCL@5067397c src/graph/tuning.cc, baseLatencies, Ring and Tree,
Simple."""
SWITCH_S = 25e-6
"""Fixed cost of a reduction in the switch [s]: tuning.cc, hwLatencies, NVLS."""
SEND_S = 4.5e-6
"""Fixed cost of a send [s]: 2 KB over NVLink takes 8 us (A100), 5 us (H100), less one hop (microsoft/vidur@7d47513
data/profiling)."""
TREE_RATE = 0.92
"""Rate of a tree divided by that of a ring (NCCL@5067397c src/graph/tuning.cc)."""
PAIRWISE_RATE = 0.9
"""Rate of all-to-all divided by that of a ring: 210/235, 320/361, 640/690 GB/s on 8 x A100, H100, B200 (NVIDIA GTC 2025,
S72583)."""

PEER_S = 1e-6
"""Time of an all-to-all per other rank, in addition to its hop [s]: it sends to all at once, over a connection to each. 64
ranks on 8 nodes of H800 exchange 8 MiB in 296 and 338 us (NVIDIA/nccl issue 1531): 175 of the bytes, 22 of base and hop, 60 of
the ramp, and this."""

ALGORITHMS: dict[str, tuple[Algorithm, ...]] = {
    "all_gather": (Algorithm("ring", _ring_hops, 1.0, _all_but_own, RING_S),),
    "reduce_scatter": (Algorithm("ring", _ring_hops, 1.0, _all_but_own, RING_S),),
    "all_reduce": (
        Algorithm("ring", _ring_hops, 2.0, lambda *at: 2.0 * _all_but_own(*at), RING_S),
        # every rank sends the whole up and the whole down
        Algorithm("tree", tree_hops, 2.0, lambda *_: 2.0, RING_S, rate=TREE_RATE),
        # every rank sends its bytes to the switch, which adds, and its share of the sums back (NVLink SHARP)
        Algorithm("in-network", _switch_hops, 2.0, lambda n, *_: (n + 1.0) / n, SWITCH_S, in_switch=True),
    ),
    "all_to_all": (
        Algorithm("pairwise", _one_hop, 1.0, _pairwise_share, RING_S, rate=PAIRWISE_RATE, joined=False, to_all=True),
    ),
    "broadcast": (Algorithm("ring", _ring_hops, 1.0, lambda *_: 1.0, RING_S),),
    "send_recv": (Algorithm("direct", _one_hop, 1.0, lambda *_: 1.0, SEND_S, joined=False),),
}


def collective(kind: str, bytes_: Num, group: Group, tiers: Sequence[Tier]) -> CommCost:
    """Seconds of one call of `kind` over a group.

    Args:
        kind: a key of ALGORITHMS.
        bytes_: the full tensor of one call [B]: what all-gather returns, what reduce-scatter, all-reduce and broadcast take,
            what one rank hands to all-to-all, one message of send_recv.
        group: its ranks; a single rank costs nothing.
        tiers: innermost first; the last one contains every rank that the others do not.

    All-reduce takes the best of ring, tree and, where all tiers it crosses have it, reduction in the switch. Over a
    hierarchical tier (between data centers) a collective may run inside and across in turn, where that is faster.
    """
    return Collective(kind, group, tiers).cost(bytes_)


class Collective:
    """The calls of one kind over a group, for any number of bytes; arguments as in `collective`."""

    def __init__(self, kind: str, group: Group, tiers: Sequence[Tier]) -> None:
        self.group, self.tiers = group, tiers
        self.phases = _PHASES.get(kind) if len(tiers) > 1 and tiers[-1].hierarchical else None
        plain = HASHED.issuperset(map(type, group))
        self.routes = _routes(kind, group, tuple(tiers)) if plain else routes(kind, group, tiers)

    def cost(self, bytes_: Num) -> CommCost:
        """Seconds of a call of so many bytes."""
        flat, steps = self.flat(bytes_), self.phases
        return _better(flat, _in_phases(steps, bytes_, self.group, self.tiers), allowed=True) if steps else flat

    def flat(self, bytes_: Num) -> CommCost:
        """The fastest algorithm among those that treat all tiers in one pass."""
        if not self.routes:
            return FREE
        first, *others = self.routes
        best = first.cost(bytes_)
        for other in others:
            best = _better(best, other.cost(bytes_), other.allowed)
        if not is_column(self.group.ranks):
            return best
        return CommCost(*(where(self.group.ranks > 1, field, free) for field, free in zip(best, FREE, strict=True)))


class Crossing(NamedTuple):
    """A tier that a group crosses."""

    tier: Tier
    crossed: Num
    """Whether it does, in any row of a column."""
    position: tuple[Num, Num, Num, bool]
    """Ranks of the group, in a domain below, in a domain of the tier; whether it is the innermost tier."""
    tree_hops: Num


def crossings(group: Group, tiers: Sequence[Tier]) -> list[Crossing]:
    """The tiers that a group crosses, innermost first."""
    found: list[Crossing] = []
    below: Num = 1.0
    innermost, outermost, ranks = tiers[0], tiers[-1], group.ranks
    for tier in tiers:
        members = ranks if tier is outermost else members_per_domain(group, tier.size)
        crossed = members > below
        if crossed is False:  # a plain number: the group does not use this tier
            continue
        position = (ranks, below, members, tier is innermost)
        found.append(new_row(Crossing, (tier, crossed, position, 0.0 if tier.hierarchical else tree_hops(*position))))
        below = members
    return found


class Route(NamedTuple):
    """One algorithm among the ranks of a group over the tiers that they cross."""

    latency_s: Num
    tree_s: Num
    """Latency of a tree over the same tiers, for the ramp."""
    pace: Num
    """Seconds per byte of a call on the slowest tier."""
    tier: Any
    algorithm: str
    allowed: Num
    """Whether the group can use it."""

    def cost(self, bytes_: Num) -> CommCost:
        """Seconds of a call of so many bytes."""
        latency, tree, pace, tier, algorithm, _ = self
        bandwidth = bytes_ * pace
        time = latency + bandwidth + RAMP * sqrt(tree * bandwidth)
        return new_row(CommCost, (latency, bandwidth, tier, time, algorithm))


def routes(kind: str, group: Group, tiers: Sequence[Tier]) -> list[Route]:
    """Every algorithm of a kind over a group, the usual one first; none for a single rank."""
    if not is_column(group.ranks) and group.ranks <= 1:
        return []
    path, switched = crossings(group, tiers), any(tier.in_network_reduction for tier in tiers)
    return [route(one, group.ranks, path) for one in ALGORITHMS[kind] if switched or not one.in_switch]


_routes = lru_cache(maxsize=256)(routes)  # a sweep of layouts or batches comes back to the same few groups


def route(algorithm: Algorithm, ranks: Num, path: Sequence[Crossing]) -> Route:
    """One algorithm among some ranks.

    Hops add up; bytes stream over all tiers at once, each tier with its share, and the slowest tier determines the time. A ring
    enters and leaves a domain once, so over an outer tier the group has the links of all its ranks in a domain; groups side by
    side share the domain's links, which is why a tier's rate is that of one device.
    """
    latency, tree, pace, allowed, tier_name = algorithm.base_s, algorithm.base_s, 0.0, True, ""
    passes, joined = algorithm.passes, algorithm.joined
    for tier, crossed, position, up in path:
        latency_s = tier.latency_s
        latency = latency + passes * algorithm.hops(*position) * latency_s
        tree = tree + passes * up * latency_s
        rate = tier_rate(tier, algorithm, position[2]) * (position[1] if joined else 1.0)
        pace = maximum(pace, where(crossed, algorithm.share(*position) / rate, 0.0))
        tier_name = where(crossed, tier.name, tier_name)
        if algorithm.in_switch and not tier.in_network_reduction:
            allowed = where(crossed, False, allowed)
    if algorithm.to_all:
        latency = latency + PEER_S * (ranks - 1.0)
    return new_row(Route, (latency, tree, pace, tier_name, algorithm.name, allowed))


def tier_rate(tier: Tier, algorithm: Algorithm, members: Num) -> Num:
    """Rate at which one device sends over a tier [B/s]; without a switch n devices have n - 1 links each."""
    if algorithm.in_switch:
        return tier.bytes_per_s * (tier.in_network_efficiency or tier.efficiency)
    wire: Num = tier.bytes_per_s
    if tier.link_bytes_per_s is not None:
        wire = minimum(wire, maximum(members - 1.0, 1.0) * tier.link_bytes_per_s)
    if algorithm.to_all and tier.pairwise_efficiency is not None:
        return wire * tier.pairwise_efficiency
    return wire * tier.efficiency * algorithm.rate


_PHASES: dict[str, tuple[tuple[str, ...], str]] = {
    "all_reduce": (("reduce_scatter", "all_gather"), "all_reduce"),
    "reduce_scatter": (("reduce_scatter",), "reduce_scatter"),
    "all_gather": (("all_gather",), "all_gather"),
}
"""What a hierarchical collective does inside a domain, and across domains with one rank's shard of the result inside."""


def _in_phases(steps: tuple[tuple[str, ...], str], bytes_: Num, group: Group, tiers: Sequence[Tier]) -> CommCost:
    """Inside each domain of the last tier but one, then across them, one phase after the other."""
    *inside, outer = tiers
    members = members_per_domain(group, inside[-1].size)
    domains = ceil(group.ranks / members)
    within, between = steps
    near = group._replace(ranks=members, centers=1.0)
    across = Group(group.axis, domains, inside[-1].size, centers=domains)
    phases = [Collective(step, near, inside).flat(bytes_) for step in within]
    phases.append(Collective(between, across, tiers).flat(bytes_ / members))
    latency = bandwidth = time = 0.0
    for phase in phases:
        latency, bandwidth, time = latency + phase.latency_s, bandwidth + phase.bandwidth_s, time + phase.time_s
    crossed = where(domains > 1, outer.name, phases[0].tier)
    return CommCost(latency, bandwidth, crossed, time, "hierarchical")


def _better(best: CommCost, other: CommCost, allowed: Num) -> CommCost:
    """The faster of two, field by field for columns."""
    wins = allowed & (other.time_s < best.time_s)
    if not is_column(wins):
        return other if wins else best
    return CommCost(*(where(wins, new, old) for new, old in zip(other, best, strict=True)))
