"""The rows of FSDP's collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from steptime.base.num import Num
from steptime.base.rows import CollectiveRow
from steptime.cost.comm import CommCost, collective
from steptime.fsdp.groups import ParamGroup, buffers
from steptime.fsdp.seconds import Calls, copy_group, shard_group
from steptime.hardware.machine import Tier
from steptime.job.assembly import Assembly
from steptime.job.mesh import Group
from steptime.model.ops import Kind


def rows(
    assembly: Assembly,
    tiers: tuple[Tier, ...],
    calls: Mapping[tuple[str, ParamGroup], Calls],
    exposed: float,
    row: Callable[..., CollectiveRow],
) -> list[CollectiveRow]:
    """Collectives per step."""
    job = assembly.job
    copies = copy_group(job)
    made: list[tuple[str, Kind, Num, float, CommCost, Group]] = []
    known = [kind for kind, _ in calls]
    kinds = [(kind if known.count(kind) == 1 else f"{kind} {i - known.index(kind)}") for i, kind in enumerate(known)]
    named = [(name, of, count) for name, (_, of), count in zip(kinds, calls, calls.values(), strict=True)]
    named += [(f"{name} experts", of.experts, count) for name, of, count in named if of.experts is not None]
    for name, of, count in named:
        sizes, over = buffers(assembly, of), shard_group(job, of.kind)
        if sizes.gathered:
            gather = collective("all_gather", sizes.gathered, over, tiers)
            made.append((f"{name} parameters", "all_gather", sizes.gathered, count.gathers, gather, over))
        if sizes.reduce_input:
            reduce = collective("reduce_scatter", sizes.reduce_input, over, tiers)
            made.append((f"{name} gradients", "reduce_scatter", sizes.reduce_input, count.reductions, reduce, over))
            if copies.ranks > 1:
                between = collective("all_reduce", sizes.reduce_output, copies, tiers)
                what = f"{name} gradients, replicas"
                made.append((what, "all_reduce", sizes.reduce_output, count.reductions, between, copies))
    total = sum(count * cost.time_s for _, _, _, count, cost, _ in made)
    return [
        row(
            name,
            kind,
            "dp",
            ranks.ranks,
            bytes_,
            count,
            cost,
            exposed * count * cost.time_s / total if total else 0.0,
        )
        for name, kind, bytes_, count, cost, ranks in made
    ]
