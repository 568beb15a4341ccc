"""FSDP's collectives of a step: how often each is called, and their rows in the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from steptime.base.num import Num
from steptime.base.rows import CollectiveRow
from steptime.cost.comm import CommCost, collective
from steptime.fsdp.collective_ranks import backward_group, copy_group, shard_group
from steptime.fsdp.groups import ParamGroup, buffers, groups, root_stays, stays_gathered
from steptime.fsdp.of_job import unsynced
from steptime.fsdp.plus_plus import has_second_partition, reduction, sent_bytes
from steptime.fsdp.replays import backward_gathers, to_fewer_ranks
from steptime.hardware.machine import Tier
from steptime.job.assembly import Assembly
from steptime.job.mesh import Group, shown_axis
from steptime.model.ops import Kind


class Calls(NamedTuple):
    """A group's collectives in a step."""

    gathers: float
    reductions: float
    regathers: float = 0.0
    """Gathers among fewer ranks: of backward (`reshard_after_forward` is their number), or all but the first (ZeRO++)."""

    def plus(self, gathers: float, reductions: float) -> Calls:
        """Scale by a number of repetitions."""
        return Calls(self.gathers + gathers, self.reductions + reductions)


def calls_without_pipeline(assembly: Assembly) -> dict[tuple[str, ParamGroup], Calls]:
    """Layers are gathered up to three times, the root once, gradients reduced once: for each micro-batch, or a step (no_sync)."""
    found, m = groups(assembly, assembly.chunks[0]), float(assembly.job.microbatches)
    in_backward, fewer = backward_gathers(assembly), to_fewer_ranks(assembly)
    each, regathers = (1.0, in_backward) if fewer else (1.0 + in_backward, 0.0)
    reductions = 1.0 if unsynced(assembly.job) else m
    gathers = 1.0 if unsynced(assembly.job) and stays_gathered(assembly) else m
    counts = {("block", of): float(found.layers.count(of)) for of in found.layers}
    layers = {key: Calls(gathers * n * each, reductions * n, gathers * n * regathers) for key, n in counts.items()}
    if has_second_partition(assembly.job):
        layers = {key: Calls(n, reductions * n, ((1.0 + in_backward) * m - 1.0) * n) for key, n in counts.items()}
        return {("root", found.root): Calls(1.0, reductions, m - 1.0)} | layers
    return {("root", found.root): Calls(1.0 if root_stays(assembly.job) else gathers, reductions)} | layers


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
    listed: list[tuple[str, Kind, Num, float, CommCost, Group]] = []
    known = [kind for kind, _ in calls]
    kinds = [(kind if known.count(kind) == 1 else f"{kind} {i - known.index(kind)}") for i, kind in enumerate(known)]
    named = [(name, of, count) for name, (_, of), count in zip(kinds, calls, calls.values(), strict=True)]
    named += [(f"{name} experts", of.experts, count) for name, of, count in named if of.experts is not None]
    for name, of, count in named:
        sizes, over = buffers(assembly, of), shard_group(job, of.kind)
        sent = sent_bytes(job, of.padded, sizes.gathered)
        if sizes.gathered:
            gather = collective("all_gather", sent, over, tiers)
            listed.append((f"{name} parameters", "all_gather", sent, count.gathers, gather, over))
        if count.regathers:
            near, what = backward_group(job), "second partition" if has_second_partition(job) else "backward"
            gather = collective("all_gather", sent, near, tiers)
            listed.append((f"{name} parameters, {what}", "all_gather", sent, count.regathers, gather, near))
        if sizes.reduce_input:
            for one in reduction(job, of.elements - of.frozen, sizes.reduce_input, of.matrices, over):
                reduce, times = collective(one.kind, one.bytes, one.group, tiers), count.reductions * one.calls
                if times:
                    listed.append((f"{name} {one.name}", one.kind, one.bytes, times, reduce, one.group))
            if copies.ranks > 1:
                between = collective("all_reduce", sizes.reduce_output, copies, tiers)
                what = f"{name} gradients, replicas"
                listed.append((what, "all_reduce", sizes.reduce_output, count.reductions, between, copies))
    total = sum(count * cost.time_s for _, _, _, count, cost, _ in listed)
    each = [exposed * count * cost.time_s / total if total else 0.0 for _, _, _, count, cost, _ in listed]
    return [
        row(name, kind, shown_axis(ranks), ranks.ranks, bytes_, count, cost, its)
        for (name, kind, bytes_, count, cost, ranks), its in zip(listed, each, strict=True)
    ]
