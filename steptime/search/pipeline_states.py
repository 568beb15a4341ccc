"""States, buckets and what follows the pipeline: what depends on tp, ep, etp and the pipeline alone, one row per sharding.

Parameters, and so states, buckets, the optimizer and the gradients that sequence parallelism leaves partial, do not depend on
how dp * cp is split nor on the micro-batch. All shardings of a pipeline are worked out together, and all their buckets are priced
at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from steptime.base.num import Num
from steptime.cost.network import one_link
from steptime.hardware.machine import Tier
from steptime.job.assembly import Assembly
from steptime.job.candidates import Candidates
from steptime.job.job import Job
from steptime.job.mesh import Group, group
from steptime.memory.block_rests import block_rest_bytes
from steptime.memory.kept_buffers import dummy_wgrad_bytes
from steptime.memory.states import States, partial_gradients, states_of
from steptime.search.part_columns import joined
from steptime.search.pipeline import Stages, contents
from steptime.search.sharded_weights import Cut, ShardedWeights, WeightSharding, columns, cut
from steptime.timing.data_parallel import Network, networks, reduced_itemsize, reduction
from steptime.timing.optimizer import optimizer_step
from steptime.timing.part_times import Pricing
from steptime.timing.step_time import embedding_reduce


class SentColumns(NamedTuple):
    """The collectives of one sort on the chunks of one kind of stage: columns by sharding, lists by chunk."""

    chunks: list[Num]
    """Seconds of each chunk's buckets."""
    marks: list[tuple[Num, Num]]
    """Of a first chunk's buckets some: the share of the chunk's bytes that comes after the bucket, and the seconds from it on."""
    buckets: Num
    """How many the first chunk has."""
    first_s: Num
    """Of the first chunk, seconds of the bucket that comes last in backward order."""

    @property
    def total_s(self) -> Num:
        """Seconds of all."""
        return sum(self.chunks)


class StageStates(NamedTuple):
    """What a kind of stage holds permanently [B], and the part that is sent: columns by sharding."""

    params: Num
    gradients: Num
    optimizer: Num
    owned: Num
    """Parameters that a device updates."""
    update: Num
    """Bytes that the update holds for the tensor it works on."""
    kept_masters: Num
    """Of `optimizer` the masters of parameters that the host updates."""
    gathered_itemsize: Num
    dummies: Num
    """Weight-shaped buffers that stay."""
    rest: Num
    """Ends of blocks of its states that are not cut off."""
    partial: Num
    """Gradients that sequence parallelism leaves partial."""
    local: Num
    """Parameters."""

    @property
    def states(self) -> States:
        """The states, their buckets left out."""
        kept = {"update_bytes": self.update, "kept_masters": self.kept_masters}
        return States(self.params, self.gradients, self.optimizer, [], owned=self.owned, **kept)


class PipelineStates(NamedTuple):
    """All of one pipeline under one ZeRO level by sharding."""

    stages: tuple[StageStates, ...]
    """Of each kind of stage."""
    optimizer_s: Num
    embedding_s: Num
    in_turn: Num
    """Parameters whose gradients go to the host one after another."""


class AroundPipeline(NamedTuple):
    """Work before and after the pipeline, columns by sharding."""

    states: PipelineStates
    reductions: list[SentColumns]
    """Of each kind of stage."""
    gathers: list[SentColumns]
    view: Job
    """The job with these shardings as columns."""
    tiers: tuple[Tier, ...]
    """As its data-parallel collectives see them."""


def around(
    job: Job,
    weights: ShardedWeights,
    stages: Stages,
    parts: Assembly,
    shardings: Sequence[WeightSharding],
    devices: int,
    priced: Pricing,
) -> AroundPipeline:
    """Work before and after a pipeline on so many devices. `job`: has the ZeRO level; `parts`: which the stages hold."""
    import numpy as np

    def view(said: Mapping[str, Any]) -> Job:
        degrees = {"pp": stages.pp, "vpp": stages.vpp, "cp": 1, "dp": devices / (stages.pp * said["tp"])}
        return Candidates(job, **said, **degrees).as_job

    states, places, cuts = [], [], []
    for where, mine, assembly in weights.of(shardings, stages, parts, view):
        of_family, found = _states_and_buckets(assembly, len(mine), priced)
        states.append(of_family)
        places.append(where)
        cuts.append(found)
    every, size = view(columns(shardings)), len(shardings)
    joint = joined(states, places, size)
    tiers = priced.context.tiers
    if job.software.comm.node_links == "one":
        tiers = one_link(group(every.parallelism, "shards", n_dcs=priced.n_dcs), tiers)
    nets = networks(every, tiers)
    known: dict[tuple[int, ...], Cut] = {}
    kinds = [[_together(one, places, known) for one in zip(*same, strict=True)] for same in zip(*cuts, strict=True)]
    itemsizes = [np.full(size, reduced_itemsize(job)) for _ in kinds]
    reductions = sent(kinds, nets, reduction(job), itemsizes)
    gathers: list[SentColumns] = []
    if job.zero_level >= 1:
        gathers = sent(kinds, nets, job.software.comm.sharded_gather, [of.gathered_itemsize for of in joint.stages])
    return AroundPipeline(joint, reductions, gathers, every, tiers)


def _states_and_buckets(assembly: Assembly, size: int, priced: Pricing) -> tuple[PipelineStates, list[list[Cut]]]:
    """What one family of shardings holds and does, and the buckets of each kind of stage, chunk by chunk."""
    known: dict[tuple[object, ...], Cut] = {}
    rests: dict[tuple[object, ...], Num] = {}
    stages, cuts = [], []
    for kind, chunks in enumerate(assembly.stages):
        keys = [(*contents(chunk), chunk.depth == 0) for chunk in chunks]
        for key, chunk in zip(keys, chunks, strict=True):
            if key not in known:
                known[key] = cut(assembly, chunk, size)
                rests[key] = block_rest_bytes(assembly, [chunk], [known[key].totals(size)])
        mine = [known[key] for key in keys]
        of = states_of(assembly, kind, [one.totals(size) for one in mine])
        partial = partial_gradients(assembly, kind, one_by_one=False).bytes
        bytes_ = of.params_bytes, of.gradients_bytes, of.optimizer_bytes
        local = 1.0 * sum([assembly.local_params(chunk) for chunk in chunks])
        extras = dummy_wgrad_bytes(assembly, kind), sum([rests[key] for key in keys]), partial, local
        stages.append(StageStates(*bytes_, of.owned, of.update_bytes, of.kept_masters, of.gathered_itemsize, *extras))
        cuts.append(mine)
    over_tp = {**priced.context.groups, "tp": group(assembly.job.parallelism, "tp", n_dcs=priced.n_dcs)}
    update = optimizer_step(assembly, replace(priced.context, groups=over_tp))
    reduced = embedding_reduce(assembly, priced).time_s
    return PipelineStates(tuple(stages), update.time_s, reduced, update.in_turn), cuts


def _together(cuts: Sequence[Cut], places: Sequence[Any], known: dict[tuple[int, ...], Cut]) -> Cut:
    """The buckets of one chunk under all families, by sharding; `places`: the shardings of each family."""
    import numpy as np

    key = tuple(map(id, cuts))
    if key not in known:
        moved = [one._replace(sharding=where[one.sharding]) for one, where in zip(cuts, places, strict=True)]
        found = Cut(*(np.concatenate(same) for same in zip(*moved, strict=True)))
        order = np.argsort(found.sharding, kind="stable")
        known[key] = Cut(*(column[order] for column in found))
    return known[key]


def sent(
    kinds: list[list[Cut]], nets: Mapping[str, Network], collective: Any, itemsizes: Sequence[Any]
) -> list[SentColumns]:
    """One collective per bucket, all priced at once: [kind of stage]. `itemsizes`: bytes per element, by sharding."""
    import numpy as np

    size = len(itemsizes[0])
    unlike = [list({id(one): one for one in chunks}.values()) for chunks in kinds]
    bytes_ = [[one.elements * each[one.sharding] for one in mine] for mine, each in zip(unlike, itemsizes, strict=True)]
    flat = np.concatenate([b for mine in bytes_ for b in mine])
    owners = np.concatenate([one.sharding for mine in unlike for one in mine])
    groups = np.concatenate([one.group for mine in unlike for one in mine])
    seconds = np.empty_like(flat)
    for name in nets:
        mine = groups == name
        if mine.any():
            seconds[mine] = network_by_bucket(nets[name], owners[mine], size).costs(collective)(flat[mine]).time_s
    found, at = [], 0
    for chunks, different, sizes in zip(kinds, unlike, bytes_, strict=True):
        times = {}
        for one, sent_bytes in zip(different, sizes, strict=True):
            times[id(one)] = sent_bytes, seconds[at : at + len(sent_bytes)]
            at += len(sent_bytes)
        totals = {
            key: np.bincount(one.sharding, times[key][1], size) for key, one in ((id(one), one) for one in different)
        }
        sent_bytes, taken_s = times[id(chunks[0])]
        found.append(SentColumns([totals[id(one)] for one in chunks], *_marks(chunks[0], sent_bytes, taken_s, size)))
    return found


def network_by_bucket(net: Network, owners: Any, size: int) -> Network:
    """A network with its figures by bucket instead of by sharding."""
    tiers = tuple(_tier_by_bucket(tier, owners, size) for tier in net.tiers)
    return Network(_group_by_bucket(net.shards, owners, size), _group_by_bucket(net.replicas, owners, size), tiers)


def _group_by_bucket(group: Group, owners: Any, size: int) -> Group:
    """A group whose ranks and stride may be columns by tp, by bucket; of one rank where nobody else is."""
    import numpy as np

    ranks, stride = (np.broadcast_to(x, (size,))[owners] for x in (group.ranks, group.stride))
    return group._replace(ranks=group.ranks if np.ndim(group.ranks) == 0 else ranks, stride=stride)


def _tier_by_bucket(tier: Tier, owners: Any, size: int) -> Tier:
    """A tier whose rate may be a column by tp, by bucket."""
    import numpy as np

    if not isinstance(tier.bytes_per_s, np.ndarray):
        return tier
    return tier.model_copy(update={"bytes_per_s": np.broadcast_to(tier.bytes_per_s, (size,))[owners]})


def _marks(first: Cut, bytes_: Any, seconds: Any, size: int) -> tuple[list[tuple[Num, Num]], Num, Num]:
    """Marks of a first chunk, its number of buckets, and seconds of its last bucket, by sharding."""
    import numpy as np

    n = np.bincount(first.sharding, minlength=size)
    end = np.cumsum(n)
    start, last = end - n, end - 1
    done, spent = (np.concatenate([[0.0], np.cumsum(values)]) for values in (bytes_, seconds))
    marks = []
    for place in (start, start + n // 2, np.maximum(start, last - 1), last):
        after = (done[end] - done[place + 1]) / np.maximum(done[end] - done[start], 1.0)
        marks.append((after, spent[end] - spent[place]))
    return marks, 1.0 * n, seconds[last]
