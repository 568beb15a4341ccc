"""What `3dtrn explain` adds to one matrix multiply or collective: rate, latency and overlap as formulas with their constants."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import ceil
from typing import NamedTuple

from steptime.answer.assumptions import one_link
from steptime.answer.result import Estimate
from steptime.base.rows import CollectiveRow, GemmRow
from steptime.base.words import counted
from steptime.cost import comm, compute, overlap
from steptime.cost.exchange import passages, score_bytes
from steptime.cost.rates import Rates
from steptime.hardware.machine import Tier
from steptime.job.mesh import Group, group
from steptime.model.ops import Comm, Gemm
from steptime.model.router_choice import Routing
from steptime.report.constants import constant, machine_source
from steptime.report.format import BINARY, SI, quantity, seconds, whole
from steptime.report.table import Fact, FactList


def waves(row: GemmRow, op: Gemm, rates: Rates) -> str:
    """Tiles of the output over the SMs, and the share of the rate that remains with a partly filled last wave."""
    if rates.sm_count is None:
        return "no wave quantization: accelerator.sm_count is not stated"
    tiles = ceil(row.m / compute.TILE_M) * ceil(row.n / compute.TILE_N) * op.count
    each = f"{whole(tiles)} tiles of {compute.TILE_M:g} x {compute.TILE_N:g} / {rates.sm_count:g} SMs"
    share = tiles / rates.sm_count
    left = 1.0 - compute.WAVE_LOSS + compute.WAVE_LOSS * share / ceil(share)
    return f"{each} = {share:.3f} waves; 1 - WAVE_LOSS {compute.WAVE_LOSS:g} x (1 - {share:.3f} / {ceil(share)}) = {left:.3f}"


def gemm_constants(estimate: Estimate, sustained: float, dtype: str) -> FactList:
    """The rates and constants used by all matrix multiplies of the plan, each with its source."""
    job, rates = estimate.job, estimate.timing.rates
    device = job.machine.accelerator
    stated = device.sustained_flops.get(dtype)
    facts = []
    if stated:
        key = f"accelerator.sustained_flops.{dtype}"
        told = [
            f"{quantity(sustained, SI, 'FLOP/s', 4)} = {quantity(stated, SI, 'FLOP/s', 4)} x {sustained / stated:.4g}",
            "the factor is fitted: sustained_share over the profile's compute_factor, data/efficiency.yaml",
            f"{key}: {machine_source(job, key)}",
        ]
        facts.append(Fact("sustained", told))
    moved = f"{quantity(device.memory_bytes_per_s, SI, 'B/s')} x memory_efficiency {device.memory_efficiency:g}"
    stream = machine_source(estimate.job, "accelerator.memory_efficiency")
    facts += [
        Fact("memory", [f"{quantity(rates.bytes_per_s, SI, 'B/s', 4)} = {moved}: {stream}"]),
        Fact("launch", [f"{seconds(rates.gemm_kernel_s)}: {job.software.sources.get('gemm_kernel_s', 'assumed')}"]),
        *constants("cost.compute", "K_OVERHEAD", "WAVE_LOSS", "WGRAD_RATE"),
        *(constants("cost.compute", "GROUP_ROWS") if job.model.moe else []),
    ]
    return FactList("constants", facts)


def network_constants(estimate: Estimate, pages: Sequence[FactList]) -> FactList:
    """The figures of the network and the constants that pages of collectives use, each with its source.

    Of a call that is priced in several phases the page does not say which it uses: all those of collectives are listed.
    """
    text = " ".join(line for page in pages for fact in page.facts for line in fact.lines)
    phased = any(not {"algorithm", "rows"} & {fact.label for fact in page.facts} for page in pages)

    def used(words: str) -> bool:
        return phased or bool(re.search(rf"\b{re.escape(words)}\b", text))

    facts = []
    for at, tier in enumerate(estimate.job.machine.tiers):
        figures = (
            "bytes_per_s",
            "latency_s",
            "efficiency",
            *(("in_network_efficiency",) if tier.in_network_reduction else ()),
        )
        if used(tier.name):
            facts.append(
                Fact(tier.name, [f"{key}: {machine_source(estimate.job, f'tiers.{at}.{key}')}" for key in figures])
            )
    bases = {name: f"{seconds(getattr(comm, name))} base" for name in ("RING_S", "SWITCH_S", "SEND_S")}
    found = {
        "cost.comm": [name for name in ("RAMP", *bases, "PEER_S") if used(bases.get(name, name))],
        "cost.exchange": ["EXCHANGE_S"] if "EXCHANGE_S" in text else [],
        "cost.overlap": [name for name in ("CONTENTION", "NIC_CONTENTION") if used(name)],
    }
    facts += [fact for module, named in found.items() for fact in constants(module, *named)]
    return FactList("constants", facts)


def constants(module: str, *names: str) -> list[Fact]:
    """Shared constants with their values and sources."""
    return [Fact(name, [constant(f"{module}.{name}").said]) for name in names]


class CrossedTier(NamedTuple):
    """One algorithm's work on one tier."""

    tier: Tier
    hops: float
    tree_hops: float
    share: float
    """Bytes that a rank sends over the tier, divided by those of the call."""
    rate: float
    """Rate of all links of the group [B/s]."""
    links: float


def crossings(algorithm: comm.Algorithm, ranks: Group, tiers: Sequence[Tier]) -> Iterator[CrossedTier]:
    """The tiers that a group crosses, in the form of `comm.route`."""
    for tier, _, position, up in comm.crossings(ranks, tiers):
        hops, tree = algorithm.passes * float(algorithm.hops(*position)), algorithm.passes * float(up)
        links = float(position[1]) if algorithm.joined else 1.0
        rate = float(comm.tier_rate(tier, algorithm, position[2])) * links
        yield CrossedTier(tier, hops, tree, float(algorithm.share(*position)), rate, links)


class Call(NamedTuple):
    """One collective as it was priced."""

    ranks: Group
    tiers: tuple[Tier, ...]
    algorithm: comm.Algorithm
    crossed: list[CrossedTier]


def priced(row: CollectiveRow, estimate: Estimate) -> Call | None:
    """The group, network and algorithm of a row; None where it is priced differently (experts, several phases)."""
    for ranks, tiers in _networks(row, estimate):
        cost = comm.collective(row.kind, row.bytes, ranks, tiers)
        same = (cost.latency_s, cost.bandwidth_s, cost.time_s) == (row.latency_s, row.bandwidth_s, row.time_s)
        for algorithm in comm.ALGORITHMS.get(row.kind, ()) if same else ():
            if algorithm.name == cost.algorithm:
                return Call(ranks, tiers, algorithm, list(crossings(algorithm, ranks, tiers)))
    return None


def _networks(row: CollectiveRow, estimate: Estimate) -> Sequence[tuple[Group, tuple[Tier, ...]]]:
    """Groups and tiers with which a row may have been priced."""
    job, pricing, dp = estimate.job, estimate.timing.pricing, estimate.timing.dp
    inner = [(one, pricing.context.tiers) for one in pricing.context.groups.values() if one.ranks == row.ranks]
    calls = [call for chunks in (*dp.reductions, *dp.gathers) for chunk in chunks for call in chunk] if dp else []
    boundaries = [
        (group(job.parallelism, "pp", stage=r, n_dcs=pricing.n_dcs), pricing.context.tiers)
        for r in range(row.axis == "pp")
    ]
    return [*inner, *boundaries, *((call.over, pricing.dp_tiers) for call in calls if call.bytes == row.bytes)]


def exchange_facts(row: CollectiveRow, estimate: Estimate) -> list[Fact]:
    """Rows of an exchange that sends a token once to each rank with any of its experts; nothing for other calls."""
    moe, context = estimate.job.model.moe, estimate.timing.pricing.context
    calls = (
        op for part in estimate.assembly.kinds for op in part.ops if isinstance(op, Comm) and op.bytes == row.bytes
    )
    found = next((op for op in calls if op.routing and op.backward), None)
    if moe is None or moe.capacity_factor is not None or found is None or found.routing is None:
        return []
    routing, ep, etp = found.routing, context.groups["ep"].ranks, context.groups["etp"].ranks
    copies, load = routing.distinct(ep) * etp, moe.imbalance_factor
    own = quantity(row.bytes / copies / load, BINARY)
    uneven, shards = f" x load {load:g}" if load != 1.0 else "", f" x etp {etp:g}" if etp != 1 else ""
    crossed = [one for one in passages(routing, context.groups[found.axis], context.tiers, copies) if one.crossed]
    slowest = max(crossed, key=lambda one: float(one.share / one.tier.bytes_per_s / one.efficiency))
    lines = [
        f"{own} of own tokens x {copies:.4g} ranks that have any of a token's experts{uneven}",
        f"{copies:.4g} = {distinct_words(routing, ep)}{shards}",
    ]
    domains = f"{slowest.domains:g}"
    passing = "the rows of other ranks"
    if slowest.tier is not context.tiers[0]:
        passing = (
            f"one copy for each of {slowest.wanted:.4g} of {domains} domains with experts of a token, "
            f"less 1/{domains} for its own"
        )
    rate = f"{quantity(slowest.tier.bytes_per_s, SI, 'B/s')} x {slowest.efficiency:.3g} reached"
    lines.append(f"wire: over {slowest.tier.name} {passing}: tensor x {slowest.share:.4g} / ({rate})")
    if scores := score_bytes(found, context.groups[found.axis], context.tiers):
        each = f"for each expert of {context.tiers[0].name}"
        lines.append(
            f"besides, {quantity(scores, BINARY)} of scores, 4 B a row {each}, the same share of which is sent"
        )
    return [Fact("rows", lines)]


def distinct_words(routing: Routing, parts: float) -> str:
    """`Routing.distinct` of `parts` in numbers."""
    k, groups, limit = routing.top_k, routing.n_groups, routing.limit
    if parts < groups:
        return f"{parts:g} x (1 - C({groups} - {groups}/{parts:g}, {limit}) / C({groups}, {limit})), by the groups of experts"
    experts, own = whole(routing.n_experts * limit / groups), whole(routing.n_experts / parts)
    if groups == 1:
        return f"{parts:g} x (1 - C({experts} - {own}, {k}) / C({experts}, {k}))"
    rest, more = f"{experts} - {limit}", k - limit
    missed = f"(1 - {groups}/{parts:g}) x C({rest} - {own}, {more}) / C({rest}, {more})"
    return f"{parts:g} x {limit}/{groups} groups chosen x (1 - {missed})"


def collective_facts(row: CollectiveRow, call: Call) -> list[Fact]:
    """Latency by hops, wire time by tier, ramp: formula, numbers, constants."""
    algorithm, crossed = call.algorithm, call.crossed
    hops = [f"{whole(one.hops)} x {seconds(one.tier.latency_s)} ({one.tier.name})" for one in crossed if one.hops]
    slowest = max(crossed, key=lambda one: float(one.share / one.rate))
    of = f"{quantity(row.bytes, BINARY)} x {slowest.share:.4g}"
    known = [one.name for one in comm.ALGORITHMS[row.kind]]
    depth = algorithm.base_s + sum(one.tree_hops * one.tier.latency_s for one in crossed)
    ramp = row.time_s - row.latency_s - row.bandwidth_s
    if algorithm.to_all:
        hops.append(f"{row.ranks - 1} x PEER_S {seconds(comm.PEER_S)}")
    return [
        Fact("algorithm", [algorithm.name + (f" (the fastest of {', '.join(known)})" if len(known) > 1 else "")]),
        Fact("latency", [f"{seconds(row.latency_s)} = {' + '.join([f'{seconds(algorithm.base_s)} base', *hops])}"]),
        Fact("wire", [f"{seconds(row.bandwidth_s)} = {of} / {_rate_words(slowest, algorithm)}"]),
        Fact("ramp", [f"{seconds(ramp)} = RAMP {comm.RAMP:g} x sqrt({seconds(depth)} tree latency x wire)"]),
    ]


def _rate_words(one: CrossedTier, algorithm: comm.Algorithm) -> str:
    """The rate of a tier as its wire rate, the share that a collective reaches, and the number of links of the group."""
    wire = f"{quantity(one.tier.bytes_per_s, SI, 'B/s')} {one.tier.name}"
    reached = one.rate / one.links / one.tier.bytes_per_s
    links = f" x {counted(one.links, 'link')}" if one.links != 1 else ""
    kind = " in the switch" if algorithm.in_switch else ""
    return f"({wire} x {reached:.4g} reached{kind}{links})"


def overlap_fact(row: CollectiveRow, call: Call | None) -> Fact:
    """The exposed part of all calls: what no compute covers, and the slowdown of compute by the hidden part."""
    total = row.count_per_step * row.time_s
    if call is None or row.axis == "pp" or not row.exposed_s < total:
        rest = (
            f"; {seconds(total - row.exposed_s)} overlapped with compute"
            if row.exposed_s < total and row.axis != "pp"
            else ""
        )
        return Fact("exposed", [seconds(row.exposed_s) + rest])
    slowed = float(overlap.contention(call.ranks, call.tiers))
    hidden = (total - row.exposed_s) / (1.0 - slowed)
    near = slowed == overlap.CONTENTION
    name, ranks = ("CONTENTION", "several ranks") if near else ("NIC_CONTENTION", "one rank")
    bare = f"{seconds(row.exposed_s)} = {seconds(max(total - hidden, 0.0))} not covered by compute"
    return Fact(
        "exposed",
        [
            f"{bare} + {name} {slowed:g} x {seconds(hidden)} covered (slowdown of that compute; {ranks} of the group in a node)"
        ],
    )


def links(row: CollectiveRow, estimate: Estimate) -> list[str]:
    """The links of a node that a data-parallel call between nodes uses, where it is one of several."""
    between = row.tier != estimate.job.machine.tiers[0].name
    return one_link(estimate.job) if row.axis == "dp" and between else []


def phases(row: CollectiveRow, exchange: list[Fact]) -> list[Fact]:
    """Latency, wire and ramp of a call that is priced in several phases, or by the distribution of tokens (`exchange`)."""
    ramp = seconds(row.time_s - row.latency_s - row.bandwidth_s)
    return [
        *exchange,
        Fact("latency", [f"{'EXCHANGE_S ' if exchange else ''}{seconds(row.latency_s)}"]),
        Fact("wire", [seconds(row.bandwidth_s)]),
        Fact("ramp", [f"{ramp}: transition between small and large messages"]),
    ]
