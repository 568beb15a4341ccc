"""From a job to its pieces: the shard of one device, the three kinds of part, and the model chunks that hold them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from steptime.base.num import Num
from steptime.base.recent import Recent, T
from steptime.job.job import Job
from steptime.job.local_params import CountedParams, LocalParams, shard_of
from steptime.job.parts import Part, Parts, parts_of, shared_parts
from steptime.model.ops import Param
from steptime.schedule import Place, placement

Runs: TypeAlias = "tuple[tuple[Part, int], ...]"
"""Parts in depth order, equal neighbors joined with their count."""


class Chunk(NamedTuple):
    """One model chunk: number `depth` of pp*vpp; stage `stage` holds it as its virtual chunk `virtual`."""

    depth: int
    stage: int
    virtual: int
    runs: Runs
    """Its layers."""
    embedding: bool
    head: bool

    @property
    def layers(self) -> int:
        """How many layers it holds."""
        return sum(count for _, count in self.runs)


class ChunkLayout(NamedTuple):
    """Which chunk holds which layers: what jobs of the same parts and pipeline share, whatever their data parallelism."""

    chunks: list[Chunk]
    """In depth order."""
    stages: list[list[Chunk]]
    """By stage, virtual chunks in order."""
    contents: list[list[int]]
    """`contents_of` the stages."""
    first_alike: list[int]
    """For each stage the first one with the same contents."""
    stage_params: list[CountedParams]
    """`Assembly.stage_params`, once it is known."""


LAYOUTS: Recent[ChunkLayout] = Recent(16)
"""The last layouts."""
SHARED: Recent[dict[Any, Any]] = Recent(16)
"""What `Assembly.once` has found for the last layouts, by function."""


class Assembly:
    """The parts of a job and the chunks that contain them."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.shard = shard_of(job)
        ends = job.performance.bf16_layers_at_start or 0, job.performance.bf16_layers_at_end or 0
        self.alone = self.shard.columns
        """Whether its parts and chunks are made for it alone."""
        self.take((parts_of if self.alone else shared_parts)(self.shard, ends, job.model))
        self.experts: Num = job.parallelism.ep * job.parallelism.etp

    def take(self, parts: Parts) -> None:
        """Consist of these parts."""
        self.parts = parts
        self.embedding, self.head, self.runs, self.kinds, self.boundary_bytes = parts

    def hold(self, stages: Sequence[Sequence[Chunk]]) -> None:
        """Consist of these stages, which all differ, instead of the job's own."""
        self.stages, self.first_alike = [list(chunks) for chunks in stages], list(range(len(stages)))
        self.contents, self.alone = contents_of(self.stages, self.job.recompute.n_layers), True

    def remade(self, job: Job, parts: Mapping[Part, Part]) -> Assembly:
        """The assembly of another job, with some parts replaced."""
        other = Assembly.__new__(Assembly)
        other.job, other.shard, other.experts, other.alone = job, self.shard, self.experts, True
        embedding, head, *kinds = [parts.get(part, part) for part in (self.embedding, self.head, *self.kinds)]
        runs = [(parts.get(part, part), count) for part, count in self.runs]
        other.take(Parts(embedding, head, runs, kinds, self.boundary_bytes))
        return other

    @cached_property
    def layout(self) -> ChunkLayout:
        """The chunks, made once for all jobs that have them."""
        job, p = self.job, self.job.parallelism
        counts, sizes = tuple(job.layers_per_chunk), job.recompute.n_layers
        key = p.pp, p.vpp, job.schedule, counts, sizes, self.parts

        def laid() -> ChunkLayout:
            chunks = chunks_of(tuple(self.runs), counts, placement(job.schedule, p.pp, p.vpp))
            stages = stages_of(chunks, p.pp)
            contents, first = contents_of(stages, sizes), dict[tuple[int, ...], int]()
            alike = [first.setdefault(tuple(mine), stage) for stage, mine in enumerate(contents)]
            return ChunkLayout(chunks, stages, contents, alike, [])

        return laid() if self.alone else LAYOUTS.of(key, laid)

    @property
    def chunks(self) -> list[Chunk]:
        """Model chunks in depth order."""
        return self.layout.chunks

    @cached_property
    def stages(self) -> list[list[Chunk]]:
        """Chunks by stage, virtual chunks in order."""
        return self.layout.stages

    @cached_property
    def contents(self) -> list[list[int]]:
        """`contents_of` the stages."""
        return self.layout.contents

    @cached_property
    def first_alike(self) -> list[int]:
        """For each stage the first one with the same parts, as many of them recomputed."""
        return self.layout.first_alike

    @cached_property
    def _shared(self) -> dict[Any, Any]:
        job = self.job
        on = self.layout, job.parallelism, job.performance, job.machine, job.cross_dc
        return SHARED.of((*on, min(job.microbatches, 3)), dict)

    def once(self, of: Callable[..., T], *given: object) -> T:
        """What follows from the chunks, parallelism, software and network, found once for all jobs that differ in their batch.

        Of the number of micro-batches it may depend on whether there are one, two or more. `given`: what follows from the same.
        """
        if self.alone:
            return of(self, *given)
        if of not in self._shared:
            self._shared[of] = of(self, *given)
        found: T = self._shared[of]
        return found

    def by_stage(self, of: Callable[[int, list[Chunk]], T]) -> list[T]:
        """What follows from a stage's chunks, computed for the first of equal stages, which share it."""
        values = {stage: of(stage, self.stages[stage]) for stage in dict.fromkeys(self.first_alike)}
        return [values[stage] for stage in self.first_alike]

    def by_chunk(self, of: Callable[[Chunk], T]) -> list[list[T]]:
        """What follows from the contents of a chunk, [stage][virtual chunk], computed for the first of equal chunks."""
        known: dict[int, T] = {}
        rows: dict[int, list[T]] = {}
        for stage in dict.fromkeys(self.first_alike):
            contents = self.contents[stage]
            for content, chunk in zip(contents, self.stages[stage], strict=True):
                if content not in known:
                    known[content] = of(chunk)
            rows[stage] = [known[content] for content in contents]
        return [rows[stage] for stage in self.first_alike]

    @property
    def embedding_copied(self) -> bool:
        """Whether the last stage holds its own copy of the embedding: for a tied head, or for multi-token prediction."""
        return (self.job.model.tie_embeddings or self.job.model.mtp > 0) and self.job.parallelism.pp > 1

    @property
    def tied_here(self) -> bool:
        """Whether the head's weight is the embedding's own, on the same stage."""
        return self.job.model.tie_embeddings and not self.embedding_copied

    @property
    def head_params(self) -> list[Param]:
        """Parameters of the head on its stage."""
        return [p for p in self.head.params if not (p.vocab and self.tied_here)]

    @cached_property
    def local_head_params(self) -> LocalParams:
        """The trained ones on one device: a tied head on the embedding's own stage has no separate weight.

        In a pipeline it has one, in addition to the embedding that multi-token prediction needs too, where it gets no gradient
        (megatron/core/models/gpt/gpt_model.py, skip_weight_param_allocation).
        """
        if not self.tied_here:
            return self.head.registered_params
        return LocalParams([p for p in self.head.registered_params if not p.param.vocab])

    @property
    def head_modules(self) -> frozenset[str | float]:
        """What recomputation runs again in the head part: only modules of multi-token prediction."""
        return self.job.recompute.mtp_modules if self.job.model.mtp else frozenset()

    def offload_modules(self, part: Part) -> frozenset[str]:
        """Modules of a part whose kept tensors are offloaded to host memory: only layers have them."""
        layers = part in self.kinds or (part is self.head and self.job.model.mtp > 0)
        return frozenset(self.job.performance.offload_modules or ()) if layers else frozenset()

    def holds_copy(self, chunk: Chunk) -> bool:
        """Whether a chunk holds a copy of the whole embedding, for multi-token prediction."""
        return chunk.head and not chunk.embedding and self.job.model.mtp > 0

    def copied_weight(self, chunk: Chunk) -> Param | None:
        """The weight of a chunk that both the first and the last stage hold."""
        if not self.embedding_copied or not (chunk.embedding or chunk.head):
            return None
        of = self.embedding if chunk.embedding or self.job.model.mtp else self.head
        return next(p for p in of.params if p.vocab)

    def chunk_params(self, chunk: Chunk) -> CountedParams:
        """Parameters of a chunk in registered order, part by part in depth order, with how often each part occurs."""
        parts = [(self.embedding.registered_params, 1)] if chunk.embedding or self.holds_copy(chunk) else []
        parts += [(part.registered_params, count) for part, count in chunk.runs]
        return [*parts, (self.local_head_params, 1)] if chunk.head else parts

    def counted_params(self, chunks: Sequence[Chunk]) -> CountedParams:
        """The same for several chunks: every part once, with how often it occurs in all of them."""
        lists, counts = dict[int, LocalParams](), dict[int, int]()
        for chunk in chunks:
            for params, count in self.chunk_params(chunk):
                lists[id(params)] = params
                counts[id(params)] = counts.get(id(params), 0) + count
        return [(params, counts[key]) for key, params in lists.items()]

    @cached_property
    def stage_params(self) -> list[CountedParams]:
        """Those of every stage's chunks; equal stages share theirs."""
        if self.alone:
            return self.by_stage(lambda _, chunks: self.counted_params(chunks))
        known = self.layout.stage_params
        if not known:
            known[:] = self.by_stage(lambda _, chunks: self.counted_params(chunks))  # whole, whichever thread is first
        return known

    def local_params(self, chunk: Chunk) -> Num:
        """Trained parameters of a chunk on one device."""
        own = self.embedding.n_params if chunk.embedding or self.holds_copy(chunk) else 0
        own = own + sum([count * part.n_params for part, count in chunk.runs])
        return own + self.local_head_params.total if chunk.head else own


def chunks_of(runs: Runs, counts: Sequence[int], places: Sequence[Place]) -> list[Chunk]:
    """Model chunks in depth order: `counts` layers each, taken from `runs`, held at `places`."""
    last, chunks = len(counts) - 1, []
    for depth, (count, place) in enumerate(zip(counts, places, strict=True)):
        mine, runs = take(runs, count)
        chunks.append(Chunk(depth, place.stage, place.chunk, mine, depth == 0, depth == last))
    return chunks


def stages_of(chunks: Sequence[Chunk], pp: int) -> list[list[Chunk]]:
    """Chunks by stage, virtual chunks in order."""
    stages: list[list[Chunk]] = [[] for _ in range(pp)]
    for chunk in sorted(chunks, key=lambda chunk: chunk.virtual):
        stages[chunk.stage].append(chunk)
    return stages


def contents_of(stages: Sequence[Sequence[Chunk]], sizes: Sequence[int]) -> list[list[int]]:
    """Chunks by stage as numbers, equal for those with the same parts of which as many are recomputed (`sizes`, by depth)."""
    numbers: dict[tuple[object, ...], int] = {}
    return [[numbers.setdefault(content_of(chunk, sizes), len(numbers)) for chunk in chunks] for chunks in stages]


def content_of(chunk: Chunk, sizes: Sequence[int]) -> tuple[object, ...]:
    """What equal chunks have in common: parts, and how many of them are recomputed."""
    return chunk.runs, chunk.embedding, chunk.head, sizes[chunk.depth] if sizes else 0


def take(runs: Runs, count: int) -> tuple[Runs, Runs]:
    """The first `count` layers of some runs, and the remaining runs."""
    mine: list[tuple[Part, int]] = []
    for at, (part, n) in enumerate(runs):
        if count <= 0:
            return tuple(mine), runs[at:]
        mine.append((part, min(n, count)))
        if n > count:
            return tuple(mine), ((part, n - count), *runs[at + 1 :])
        count -= n
    return tuple(mine), ()
