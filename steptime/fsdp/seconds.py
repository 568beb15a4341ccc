"""FSDP2's communication beside the compute of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from steptime.assembly import Assembly
from steptime.cost.comm import collective
from steptime.cost.parts import PartTime
from steptime.estimate import CollectiveRow
from steptime.fsdp.groups import buffers, groups, options
from steptime.machine import Tier
from steptime.mesh import group


class CommSeconds(NamedTuple):
    """Seconds of one group of one micro-batch: its collectives, and the compute between them."""

    gather_s: float
    compute_s: float
    reduce_s: float = 0.0


def exposed_s(groups_s: list[CommSeconds], prefetch: int) -> float:
    """Seconds by which groups in a row outlast their compute.

    Compute and network are one stream each. The gather of the group `prefetch` ahead is queued when a group's compute starts, its
    reduce-scatter when that ends; a group waits for its own gather.

    >>> exposed_s([CommSeconds(2.0, 10.0), CommSeconds(2.0, 10.0, 3.0)], 1)
    5.0
    """
    network = clock = 0.0
    arrived: list[float] = []

    def gather(gate: float) -> None:
        nonlocal network
        network = max(network, gate) + groups_s[len(arrived)].gather_s
        arrived.append(network)

    for i, of in enumerate(groups_s):
        if len(arrived) == i:
            gather(clock)
        start = max(clock, arrived[i])
        while len(arrived) < min(i + 1 + prefetch, len(groups_s)):
            gather(start)
        clock = start + of.compute_s
        if of.reduce_s:
            network = max(network, clock) + of.reduce_s
    return max(clock, network) - sum(of.compute_s for of in groups_s)


def group_seconds(
    assembly: Assembly, tiers: tuple[Tier, ...], parts: tuple[PartTime, PartTime, PartTime], replay_s: float
) -> tuple[list[CommSeconds], list[CommSeconds]]:
    """Groups of a micro-batch in forward and in backward order, collectives priced.

    The root gathers first and stays; its reduce-scatter comes last, after the embedding's backward. With replicas (HSDP) an
    all-reduce of the shard between them follows each reduce-scatter (_fsdp_collectives.py, foreach_reduce).
    """
    job = assembly.job
    over = group(job.parallelism, "shards", n_dcs=job.cross_dc.n_dcs if job.cross_dc else 1)
    g = groups(assembly)
    copies = group(job.parallelism, "replicas", n_dcs=job.cross_dc.n_dcs if job.cross_dc else 1)
    root, block = (
        [
            collective("all_gather", b.gathered, over, tiers).time_s,
            collective("reduce_scatter", b.reduce_input, over, tiers).time_s
            + collective("all_reduce", b.reduce_output, copies, tiers).time_s,
        ]
        for b in (buffers(assembly, g.root), buffers(assembly, g.block))
    )
    embedding, blocks, head = parts
    again = block[0] if options(assembly).reshard_after_forward else 0.0
    forward = [CommSeconds(root[0], embedding.forward.seconds)]
    forward += [CommSeconds(block[0], blocks.forward.seconds)] * g.n_blocks
    forward.append(CommSeconds(0.0, head.forward.seconds))
    back = [CommSeconds(0.0, head.backward.seconds)]
    back += [CommSeconds(again, blocks.backward.seconds + replay_s, block[1])] * g.n_blocks
    back.append(CommSeconds(0.0, embedding.backward.seconds, root[1]))
    return forward, back


def rows(
    assembly: Assembly, tiers: tuple[Tier, ...], exposed: float, row: Callable[..., CollectiveRow]
) -> list[CollectiveRow]:
    """Collectives per step: parameters gathered once or twice per micro-batch, gradients reduced once."""
    job = assembly.job
    over = group(job.parallelism, "shards", n_dcs=job.cross_dc.n_dcs if job.cross_dc else 1)
    copies = group(job.parallelism, "replicas", n_dcs=job.cross_dc.n_dcs if job.cross_dc else 1)
    g, m = groups(assembly), float(job.microbatches)
    again = 2.0 if options(assembly).reshard_after_forward else 1.0
    made = []
    for name, of, count, gathers in (("root", g.root, 1.0, 1.0), ("block", g.block, float(g.n_blocks), again)):
        sizes = buffers(assembly, of)
        if of.padded:
            gather = collective("all_gather", sizes.gathered, over, tiers)
            reduce = collective("reduce_scatter", sizes.reduce_input, over, tiers)
            made.append((f"{name} parameters", "all_gather", sizes.gathered, m * count * gathers, gather))
            made.append((f"{name} gradients", "reduce_scatter", sizes.reduce_input, m * count, reduce))
            if copies.ranks > 1:
                between = collective("all_reduce", sizes.reduce_output, copies, tiers)
                made.append((f"{name} gradients, replicas", "all_reduce", sizes.reduce_output, m * count, between))
    total = sum(count * cost.time_s for _, _, _, count, cost in made)
    return [
        row(
            name,
            kind,
            "dp",
            (copies if kind == "all_reduce" else over).ranks,
            bytes_,
            count,
            cost,
            exposed * count * cost.time_s / total if total else 0.0,
        )
        for name, kind, bytes_, count, cost in made
    ]
