"""Assemblies of one device for many shardings of the weights at once: parameters in columns, one row per (tp, ep, etp).

Where ep is 1 experts are dense parameters, else they have their own ranks; so these are two families of shardings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from steptime.base.num import Num, is_column
from steptime.job.assembly import Assembly, Chunk
from steptime.job.candidates import Candidates
from steptime.job.job import Job
from steptime.job.local_params import LocalParam, LocalParams, Pieces, shard_of
from steptime.job.parts import Part
from steptime.memory.buckets import Run, run_buckets
from steptime.memory.states import Bucket, backward_runs, bucket_size, in_one_piece, pads, shard_ranks, whole_buckets
from steptime.model.ops import Param
from steptime.search.pipeline import Stages


class WeightSharding(NamedTuple):
    """Distribution of the weights of a stage over its devices."""

    tp: int
    ep: int
    etp: int


class ShardedWeights:
    """The assemblies of some shardings."""

    def __init__(self, job: Job, shardings: Sequence[WeightSharding]) -> None:
        self.job = job
        self._families: dict[bool, tuple[dict[WeightSharding, int], Assembly]] = {}
        self._some: dict[tuple[WeightSharding, ...], Assembly] = {}
        for alone in (True, False):
            mine = [sharding for sharding in shardings if (sharding.ep == 1) == alone]
            if mine:
                self._families[alone] = {sharding: i for i, sharding in enumerate(mine)}, whole(job, mine)

    def layer_params(self, shardings: Sequence[WeightSharding]) -> Any:
        """Parameters of all layers that lie on one device without a pipeline, a column."""
        import numpy as np

        found: dict[WeightSharding, float] = {}
        for places, known in self._families.values():
            each = np.broadcast_to(sum([count * part.n_params for part, count in known.runs]), (len(places),))
            found |= dict(zip(places, each.tolist(), strict=True))
        return np.array([found[sharding] for sharding in shardings])

    def of(
        self,
        shardings: Sequence[WeightSharding],
        stages: Stages,
        joined: Assembly,
        view: Callable[[Mapping[str, Any]], Job],
    ) -> Iterator[tuple[Any, tuple[WeightSharding, ...], Assembly]]:
        """By family: the places of its shardings, they themselves, and their assembly with one stage of each kind.

        `view`: the job with columns of tp, ep and etp; `joined`: whose parts the stages hold.
        """
        import numpy as np

        for alone in self._families:
            where = [i for i, sharding in enumerate(shardings) if (sharding.ep == 1) == alone]
            if not where:
                continue
            mine = tuple(shardings[i] for i in where)
            known = self.some(alone, mine)
            part = dict(zip(joined.kinds, known.kinds, strict=True))
            assembly = known.remade(view(columns(mine)), {})
            assembly.shard = shard_of(assembly.job)
            assembly.hold([[_moved(chunk, part) for chunk in chunks] for chunks in stages.chunks])
            yield np.array(where), mine, assembly

    def some(self, alone: bool, shardings: tuple[WeightSharding, ...]) -> Assembly:
        """The assembly of some shardings of a family."""
        import numpy as np

        if shardings not in self._some:
            places, known = self._families[alone]
            which = np.array([places[sharding] for sharding in shardings])
            self._some[shardings] = joined([known], lambda same: same[0][which] if is_column(same[0]) else same[0])
        return self._some[shardings]


def columns(shardings: Sequence[WeightSharding]) -> dict[str, Any]:
    """Spreads as columns."""
    import numpy as np

    return {name: np.array([float(getattr(one, name)) for one in shardings]) for name in WeightSharding._fields}


def whole(job: Job, shardings: Sequence[WeightSharding]) -> Assembly:
    """One assembly of all shardings, put together of those whose layers are made of the same ops."""
    import numpy as np

    view = Candidates(job, **columns(shardings))
    places, found = zip(*((which, Assembly(group.as_job)) for which, group in view.alike_parts()), strict=True)

    def join(same: Sequence[Num]) -> Num:
        if not any(map(is_column, same)) and len(set(same)) == 1:
            return same[0]
        column = np.zeros(len(shardings))
        for where, values in zip(places, same, strict=True):
            column[where] = values
        return float(column[0]) if (column == column[0]).all() else column

    return joined(found, join)


def joined(assemblies: Sequence[Assembly], join: Callable[[Sequence[Num]], Num]) -> Assembly:
    """Assemblies of the same parts as one, each of its figures made of theirs by `join`."""
    first = assemblies[0]
    every = zip(*((a.embedding, a.head, *a.kinds) for a in assemblies), strict=True)
    found = first.remade(first.job, {same[0]: _joined_part(same, join) for same in every})
    found.experts = join([a.experts for a in assemblies])
    return found


def _joined_part(same: Sequence[Part], join: Callable[[Sequence[Num]], Num]) -> Part:
    first, tp, experts = same[0], join([p.tp for p in same]), join([p.experts for p in same])
    renewed: dict[int, Param] = {}
    for alike in zip(*(part.params for part in same), strict=True):
        shape = tuple(join(extents) for extents in zip(*(p.shape for p in alike), strict=True))
        renewed[id(alike[0])] = alike[0]._replace(shape=shape)
    found = Part(first.kind, first.ops, first.x, first.out, tp, first.model, experts)
    elements = [
        join([p.elements for p in alike]) for alike in zip(*(part.registered_params for part in same), strict=True)
    ]
    own = [join([p.tensors for p in alike]) for alike in zip(*(part.registered_params for part in same), strict=True)]
    alike_params = zip(first.registered_params, elements, own, strict=True)
    registered = LocalParams([LocalParam(renewed[id(p.param)], n, tensors) for p, n, tensors in alike_params])
    quantized = join([part.n_quantized for part in same])
    vars(found).update(params=list(renewed.values()), registered_params=registered, n_quantized=quantized)
    return found


def _moved(chunk: Chunk, part: Mapping[Part, Part]) -> Chunk:
    return chunk._replace(runs=tuple((part[one], count) for one, count in chunk.runs))


NO_BUCKET = Bucket(0.0)
"""Of a chunk with no parameter that is trained."""


class Cut(NamedTuple):
    """The gradient buckets of one chunk under many shardings, sharding by sharding, in the order of backward."""

    elements: Any
    sharding: Any
    """The row of the sharding that each belongs to."""
    group: Any
    """Its parameter group."""

    def totals(self, size: int) -> list[Bucket]:
        """What all buckets of a group carry, for `size` shardings."""
        import numpy as np

        found = []
        for name in dict.fromkeys(self.group.tolist()):
            mine = self.group == name
            found.append(Bucket(np.bincount(self.sharding[mine], self.elements[mine], size), name))
        return found


def cut(assembly: Assembly, chunk: Chunk, size: int) -> Cut:
    """The buckets of a chunk, as in `memory.states.chunk_buckets`, for an assembly of `size` shardings."""
    import numpy as np

    if in_one_piece(assembly, chunk):
        buckets = whole_buckets(assembly, chunk, sharded=pads(assembly.job)) or [NO_BUCKET]
        elements = np.stack([np.broadcast_to(1.0 * bucket.elements, (size,)) for bucket in buckets], axis=-1)
        groups = np.tile([bucket.group for bucket in buckets], size)
        return Cut(elements.ravel(), np.repeat(np.arange(size), len(buckets)), groups)
    found: list[tuple[str, int, list[Num]]] = []
    for group, runs in backward_runs(assembly, chunk).items():
        ranks = np.broadcast_to(shard_ranks(assembly.job, group), (size,)).tolist()
        limits = (
            np.broadcast_to(bucket_size(assembly.job, runs), (size,)).tolist() if chunk.depth == 0 else [None] * size
        )
        for row, mine in enumerate(_rows(runs, size)):
            found.append((group, row, run_buckets(mine, int(ranks[row]), limits[row], sharded=pads(assembly.job))))
    empty = set(range(size)) - {row for _, row, sizes in found if sizes}
    found += [(NO_BUCKET.group, row, [NO_BUCKET.elements]) for row in empty]
    counts = [len(sizes) for _, _, sizes in found]
    owners, groups = (np.repeat([one[at] for one in found], counts) for at in (1, 0))
    order = np.argsort(owners, kind="stable")
    elements = np.array([n for _, _, sizes in found for n in sizes])
    return Cut(elements[order], owners[order], groups[order])


def _rows(runs: Sequence[Run], size: int) -> Iterator[list[Run]]:
    """Pieces in columns as those of each row."""
    import numpy as np

    known: dict[int, list[Pieces]] = {}
    for piece in (piece for pieces, _ in runs for piece in pieces):
        elements, times = (np.broadcast_to(x, (size,)).tolist() for x in (piece.elements, piece.times))
        known[id(piece)] = [Pieces(n, int(count), piece.alone) for n, count in zip(elements, times, strict=True)]
    for row in range(size):
        yield [([known[id(piece)][row] for piece in pieces], times) for pieces, times in runs]
