"""States, buckets and what follows the pipeline: what depends on tp, ep, etp and the pipeline alone, one row per spread.

Parameters, and so states, buckets, the optimizer and the gradients that sequence parallelism leaves partial, do not depend on
how dp * cp is split nor on the micro-batch. Each spread is worked out by the functions of an estimate; all buckets of a pipeline
are priced at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from steptime.base.num import Num
from steptime.cost.comm import one_link
from steptime.hardware.machine import Tier
from steptime.job.assembly import Assembly, Chunk
from steptime.job.candidates import Candidates
from steptime.job.job import Job
from steptime.job.mesh import Group, group
from steptime.memory.buffers import block_rest_bytes
from steptime.memory.kept_buffers import dummy_wgrad_bytes
from steptime.memory.states import Bucket, States, chunk_buckets, partial_gradients, states_of
from steptime.search.pipeline import Stages
from steptime.timing.data_parallel import Network, networks, reduced_itemsize, reduction
from steptime.timing.optimizer import optimizer_s
from steptime.timing.part_times import Pricing
from steptime.timing.step_time import embedding_reduce


class Spread(NamedTuple):
    """How the weights of a stage lie on its devices."""

    tp: int
    ep: int
    etp: int


class Sent(NamedTuple):
    """The collectives of one sort on the chunks of one kind of stage: columns by tp, lists by chunk."""

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


class Around(NamedTuple):
    """What stands around the pipeline, columns by tp."""

    states: list[States]
    """Of each kind of stage, its buckets left out."""
    dummy_bytes: list[Num]
    """Of each kind of stage, weight-shaped buffers that stay."""
    rest_bytes: list[Num]
    """Of each kind of stage, ends of blocks of its states that are not cut off."""
    reductions: list[Sent]
    gathers: list[Sent]
    optimizer_s: Num
    embedding_s: Num
    partial_bytes: list[Num]
    """Of each kind of stage, gradients that sequence parallelism leaves partial."""
    view: Job
    """The job with these tp as columns."""
    tiers: tuple[Tier, ...]
    """As its data-parallel collectives see them."""


class Side(NamedTuple):
    """What stands around the pipeline under any ZeRO level."""

    dummy_bytes: list[Num]
    partial_bytes: list[Num]
    embedding_s: Num


class Sketches:
    """Assemblies of one device by tp, whose stages are the kinds of a pipeline."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._known: dict[Spread, Assembly] = {}
        self._buckets: dict[tuple[object, ...], list[Bucket]] = {}
        self._rests: dict[tuple[object, ...], Num] = {}
        self._sides: dict[tuple[object, ...], Side] = {}

    def states(self, sketch: Assembly, spread: Spread, joined: Stages) -> tuple[list[States], list[Num]]:
        """States of every kind of stage, and the ends of their blocks: those of a chunk once for all ZeRO levels that shard."""
        job = sketch.job
        ranks, sharded = job.parallelism.dp * job.parallelism.cp, job.zero_level >= 1
        lead = (spread, ranks, sharded, sketch.embedding_copied)
        states: list[States] = []
        rests: list[Num] = []
        for mine, of in zip(sketch.stages, joined.chunks, strict=True):
            keys = [(*lead, chunk.runs, chunk.embedding, chunk.head, chunk.depth == 0) for chunk in of]
            for key, chunk in zip(keys, mine, strict=True):
                if key not in self._buckets:
                    self._buckets[key] = chunk_buckets(sketch, chunk)
                    self._rests[key] = block_rest_bytes(sketch, [chunk], [self._buckets[key]])
            states.append(states_of(sketch, mine, [self._buckets[key] for key in keys]))
            rests.append(sum([self._rests[key] for key in keys]))
        return states, rests

    def side(self, sketch: Assembly, spread: Spread, joined: Stages, priced: Pricing) -> Side:
        """What no ZeRO level changes."""
        key = (spread, joined, sketch.job.parallelism.dp)
        if key not in self._sides:
            every = range(len(joined.chunks))
            self._sides[key] = Side(
                [dummy_wgrad_bytes(sketch, kind) for kind in every],
                [partial_gradients(sketch, kind, one_by_one=False).bytes for kind in every],
                embedding_reduce(sketch, priced).time_s,
            )
        return self._sides[key]

    def one(self, spread: Spread) -> Assembly:
        """The assembly of one spread."""
        if spread not in self._known:
            self._known[spread] = Assembly(Candidates(self.job, **spread._asdict()).as_job)
        return self._known[spread]

    def layer_params(self, spread: Spread) -> float:
        """Parameters of all layers that lie on one device without a pipeline."""
        return float(sum([count * part.n_params for part, count in self.one(spread).runs]))

    def of(self, spread: Spread, stages: Stages, joined: Assembly, view: Any) -> Assembly:
        """The assembly of one spread with one stage of each kind; `view`: its job."""
        known = self.one(spread)
        part = dict(zip(joined.kinds, known.kinds, strict=True))
        sketch, of_stages = Assembly.__new__(Assembly), {"local_head_params", "first_alike"}
        vars(sketch).update({key: value for key, value in vars(known).items() if key not in of_stages})
        sketch.job = view
        vars(sketch)["stages"] = [[_moved(chunk, part) for chunk in chunks] for chunks in stages.chunks]
        return sketch


def _moved(chunk: Chunk, part: dict[Any, Any]) -> Chunk:
    return chunk._replace(runs=tuple((part[one], count) for one, count in chunk.runs))


def around(
    job: Job,
    sketches: Sketches,
    stages: Stages,
    joined: Assembly,
    spreads: Sequence[Spread],
    devices: int,
    priced: Pricing,
) -> Around:
    """What stands around a pipeline on so many devices. `job`: says the ZeRO level; `priced`: tiers and rates."""
    import numpy as np

    pp, rows = stages.pp, []
    for spread in spreads:
        said = {**spread._asdict(), "pp": pp, "vpp": stages.vpp, "cp": 1, "dp": devices // (pp * spread.tp)}
        sketch = sketches.of(spread, stages, joined, Candidates(job, **said).as_job)
        states, rests = sketches.states(sketch, spread, stages)
        side = sketches.side(sketch, spread, stages, priced)
        over_tp = {**priced.context.groups, "tp": group(sketch.job.parallelism, "tp", n_dcs=priced.n_dcs)}
        update = optimizer_s(sketch, replace(priced.context, groups=over_tp))
        rows.append((states, side.dummy_bytes, side.partial_bytes, (update, side.embedding_s), rests))
    columns = {name: np.array([float(getattr(spread, name)) for spread in spreads]) for name in Spread._fields}
    view = Candidates(job, **columns, pp=pp, vpp=stages.vpp, cp=1, dp=devices / (pp * columns["tp"])).as_job
    tiers = priced.context.tiers
    if job.software.comm.node_links == "one":
        tiers = one_link(group(view.parallelism, "shards", n_dcs=priced.n_dcs), tiers)
    nets = networks(view, tiers)
    every_states = [row[0] for row in rows]
    sharded = job.zero_level >= 1
    return Around(
        [_stacked([row[0][kind] for row in rows]) for kind in range(len(stages.chunks))],
        [np.array([row[1][kind] for row in rows]) for kind in range(len(stages.chunks))],
        [np.array([row[4][kind] for row in rows]) for kind in range(len(stages.chunks))],
        sent(every_states, nets, reduction(job), reduced_itemsize(job)),
        sent(every_states, nets, job.software.comm.sharded_gather, None) if sharded else [],
        np.array([row[3][0] for row in rows]),
        np.array([row[3][1] for row in rows]),
        [np.array([row[2][kind] for row in rows]) for kind in range(len(stages.chunks))],
        view,
        tiers,
    )


def _stacked(rows: Sequence[States]) -> States:
    import numpy as np

    params = np.array([row.params_bytes for row in rows])
    gradients = np.array([row.gradients_bytes for row in rows])
    optimizer = np.array([row.optimizer_bytes for row in rows])
    owned, updating = (np.array([getattr(row, name) for row in rows]) for name in ("owned", "update_bytes"))
    return States(params, gradients, optimizer, [], owned=owned, update_bytes=updating)


def sent(every: list[list[States]], nets: Mapping[str, Network], kind: Any, itemsize: float | None) -> list[Sent]:
    """One collective per bucket, all priced at once: [kind of stage]. `itemsize`: bytes per element; None: as gathered."""
    import numpy as np

    flat: list[float] = []
    owner: list[int] = []
    group_of: list[str] = []
    for row, states in enumerate(every):
        for state in states:
            size = state.gathered_itemsize if itemsize is None else itemsize
            for bucket in (bucket for buckets in state.buckets for bucket in buckets):
                flat.append(bucket.elements * size)
                owner.append(row)
                group_of.append(bucket.group)
    bytes_, owners, groups = np.array(flat), np.array(owner), np.array(group_of)
    seconds = np.empty_like(bytes_)
    for name in set(group_of):
        mine = groups == name
        seconds[mine] = spread_over(nets[name], owners[mine], len(every)).cost(kind, bytes_[mine]).time_s
    at, by_row = 0, []
    for states in every:
        kinds = []
        for state in states:
            chunks = []
            for buckets in state.buckets:
                chunks.append((bytes_[at : at + len(buckets)], seconds[at : at + len(buckets)]))
                at += len(buckets)
            kinds.append(_chunk_figures(chunks))
        by_row.append(kinds)
    return [_columns([row[kind] for row in by_row]) for kind in range(len(every[0]))]


def spread_over(net: Network, owners: Any, size: int) -> Network:
    """A network whose figures are columns by spread, by bucket instead."""
    tiers = tuple(_spread_tier(tier, owners, size) for tier in net.tiers)
    return Network(_spread(net.shards, owners, size), _spread(net.replicas, owners, size), tiers)


def _spread(group: Group, owners: Any, size: int) -> Group:
    """A group whose ranks and stride may be columns by tp, by bucket; of one rank where nobody else is."""
    import numpy as np

    ranks, stride = (np.broadcast_to(x, (size,))[owners] for x in (group.ranks, group.stride))
    return group._replace(ranks=group.ranks if np.ndim(group.ranks) == 0 else ranks, stride=stride)


def _spread_tier(tier: Tier, owners: Any, size: int) -> Tier:
    """A tier whose rate may be a column by tp, by bucket."""
    import numpy as np

    if not isinstance(tier.bytes_per_s, np.ndarray):
        return tier
    return tier.model_copy(update={"bytes_per_s": np.broadcast_to(tier.bytes_per_s, (size,))[owners]})


MARKS = 4
"""Buckets of a chunk that are looked at: the first, one in the middle, and the last two."""


def _chunk_figures(chunks: list[tuple[Any, Any]]) -> tuple[list[float], list[tuple[float, float]], float, float]:
    """Seconds of each chunk, marks of the first, its number of buckets, seconds of its last bucket."""
    import numpy as np

    totals = [float(seconds.sum()) for _, seconds in chunks]
    bytes_, seconds = chunks[0]
    n = len(seconds)
    done, rest = np.cumsum(bytes_), np.cumsum(seconds[::-1])[::-1]
    places = sorted({0, n // 2, max(0, n - 2), n - 1})
    places = [places[0]] * (MARKS - len(places)) + places
    marks = [(float(1.0 - done[i] / done[-1]), float(rest[i])) for i in places]
    return totals, marks, float(n), float(seconds[-1])


def _columns(rows: list[tuple[list[float], list[tuple[float, float]], float, float]]) -> Sent:
    import numpy as np

    chunks = [np.array(same) for same in zip(*(row[0] for row in rows), strict=True)]
    marks = [
        (np.array([mark[0] for mark in same]), np.array([mark[1] for mark in same]))
        for same in zip(*(row[1] for row in rows), strict=True)
    ]
    return Sent(chunks, marks, np.array([row[2] for row in rows]), np.array([row[3] for row in rows]))
