"""From a job to its pieces: the shard of one device, the three kinds of part, and the model chunks that hold them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias

from steptime.base.num import Num
from steptime.base.recent import Recent, T
from steptime.base.records import record
from steptime.job.job import Job
from steptime.job.local_params import CountedParams, LocalParam, LocalParams, in_bf16_of, shard_of
from steptime.model.blocks import embedding_ops, ends_in_bf16, head_ops, last_output, layers, params_of
from steptime.model.model import Model
from steptime.model.ops import Gemm, Op, Param, Tensor, tensor_bytes
from steptime.model.shard import Shard
from steptime.schedule import Place, placement

Runs: TypeAlias = "tuple[tuple[Part, int], ...]"
"""Parts in depth order, equal neighbors joined with their count."""


@record
class Part:
    """A piece of the model on one device: a layer of one kind, the embedding or the head. Equal layers share one part."""

    kind: str
    ops: list[Op]
    x: Tensor
    """Its input tensor."""
    out: str
    """Its output tensor."""
    tp: Num
    model: Model
    """The model with this kind of layer's widths."""
    experts: Num = 1
    """Devices that share the weights of its experts: ep * etp."""
    ep: Num = 1
    walks: dict[Any, Any] = field(default_factory=dict, repr=False)
    """Memory of its walks so far, by what a walk depends on besides the part (`memory.part_memories`)."""

    @cached_property
    def sizes(self) -> dict[str, Num]:
        """Bytes of every tensor by name."""
        return tensor_bytes(self.ops, self.x)

    @cached_property
    def pooled(self) -> list[Num]:
        """Bytes of each tensor that is stored in Megatron's grow-only buffer, where there is one."""
        return [t.bytes for op in self.ops for t in op.allocates if t.pooled]

    @cached_property
    def params(self) -> list[Param]:
        """Its parameter tensors, in the order of its ops."""
        return params_of(self.ops)

    @cached_property
    def registered_params(self) -> LocalParams:
        """The trained ones on one device, as Megatron's modules register them: the output projection before qkv.

        megatron/core/transformer/attention.py: Attention.__init__ builds linear_proj, SelfAttention.__init__ then linear_qkv.
        """
        ordered: list[Op] = []
        after_norm = 0
        for op in self.ops:
            ordered.insert(after_norm if op.role == "attn_proj" else len(ordered), op)
            if op.role == "norm" and op.params:
                after_norm = len(ordered)
        trained = [p for p in params_of(ordered) if p.group != "frozen"]
        own = [p.n_experts // self.ep if p.n_experts else 1 for p in trained]
        return LocalParams(
            [LocalParam(p, p.local(self.tp, self.experts), n) for p, n in zip(trained, own, strict=True)]
        )

    @cached_property
    def n_params(self) -> Num:
        """Trained parameters on one device: split ones divided by their ranks."""
        return self.registered_params.total

    @cached_property
    def n_quantized(self) -> Num:
        """Parameters on one device that a recipe quantizes: the weights of its projections."""
        weights = [p for op in self.ops if isinstance(op, Gemm) and op.recipe for p in op.params if p.multiplies]
        return sum(p.local(self.tp, self.experts) for p in weights)


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


class Parts(NamedTuple):
    """What jobs of the same model and shard have in common, whatever their pipeline and data parallelism."""

    embedding: Part
    head: Part
    runs: list[tuple[Part, int]]
    """All layers in depth order."""
    kinds: list[Part]
    """Every kind of layer."""
    boundary_bytes: Num
    """The tensor that one stage sends to the next [B]."""


def parts_of(shard: Shard, ends: tuple[int, int], model: Model) -> Parts:
    """Build the op lists once; everything else reads them. `ends`: first and last layers that a recipe leaves in bf16."""
    hidden = Tensor("x", shard.sequence_tokens * model.hidden_sz, shard.itemsize)
    embedding = embedding_ops(model, shard)
    every, experts = layers(model), shard.ep * shard.etp
    last = every[-1][0].model if model.mtp else model
    made: dict[tuple[int, bool], Part] = {}
    runs: list[tuple[Part, int]] = []
    for layer, count, in_bf16 in ends_in_bf16(every, *ends):
        key = id(layer), in_bf16
        if key not in made:
            ops = layer.ops(in_bf16_of(shard) if in_bf16 else shard)
            made[key] = Part(layer.kind, ops, hidden, "y", shard.tp, layer.model, experts, shard.ep)
        runs.append((made[key], count))
    return Parts(
        Part("embedding", embedding, Tensor("ids", 0.0, 0.0), last_output(embedding), shard.tp, model),
        Part("head", head_ops(model, shard), hidden, "", shard.tp, last, experts, shard.ep),
        runs,
        list(made.values()),
        1.0 * hidden.bytes,
    )


PARTS: Recent[Parts] = Recent(16)
"""Parts of the last shards: a sweep of layouts or batches comes back to the same few degrees of tp, cp and ep."""


class Assembly:
    """The parts of a job and the chunks that contain them."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.shard = shard_of(job)
        ends = job.performance.bf16_layers_at_start or 0, job.performance.bf16_layers_at_end or 0
        make = partial(parts_of, self.shard, ends, job.model)
        self.take(make() if self.shard.columns else PARTS.of(make.args, make))
        self.experts: Num = job.parallelism.ep * job.parallelism.etp

    def take(self, parts: Parts) -> None:
        """Consist of these parts."""
        self.parts = parts
        self.embedding, self.head, self.runs, self.kinds, self.boundary_bytes = parts

    def hold(self, stages: Sequence[Sequence[Chunk]]) -> None:
        """Consist of these stages, which all differ, instead of the job's own."""
        self.stages, self.first_alike = [list(chunks) for chunks in stages], list(range(len(stages)))

    def remade(self, job: Job, parts: Mapping[Part, Part]) -> Assembly:
        """The assembly of another job, with some parts replaced."""
        made = Assembly.__new__(Assembly)
        made.job, made.shard, made.experts = job, self.shard, self.experts
        embedding, head, *kinds = [parts.get(part, part) for part in (self.embedding, self.head, *self.kinds)]
        runs = [(parts.get(part, part), count) for part, count in self.runs]
        made.take(Parts(embedding, head, runs, kinds, self.boundary_bytes))
        return made

    @cached_property
    def chunks(self) -> list[Chunk]:
        """Model chunks in depth order."""
        p = self.job.parallelism
        return chunks_of(tuple(self.runs), self.job.layers_per_chunk, placement(self.job.schedule, p.pp, p.vpp))

    @cached_property
    def stages(self) -> list[list[Chunk]]:
        """Chunks by stage, virtual chunks in order."""
        return stages_of(self.chunks, self.job.parallelism.pp)

    @cached_property
    def first_alike(self) -> list[int]:
        """For each stage the first one with the same parts, as many of them recomputed."""
        first: dict[tuple[object, ...], int] = {}
        sizes = self.job.recompute.n_layers or (0,) * len(self.chunks)
        each = [(c.runs, c.embedding, c.head, c.depth == 0, sizes[c.depth]) for c in self.chunks]
        return [first.setdefault(tuple([each[c.depth] for c in mine]), at) for at, mine in enumerate(self.stages)]

    def by_stage(self, of: Callable[[int, list[Chunk]], T]) -> list[T]:
        """What follows from a stage's chunks, computed for the first of equal stages, which share it."""
        made = {stage: of(stage, self.stages[stage]) for stage in dict.fromkeys(self.first_alike)}
        return [made[stage] for stage in self.first_alike]

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
    def held(self) -> list[CountedParams]:
        """Those of every stage's chunks; equal stages share theirs."""
        return self.by_stage(lambda _, chunks: self.counted_params(chunks))

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
    held: list[list[Chunk]] = [[] for _ in range(pp)]
    for chunk in sorted(chunks, key=lambda chunk: chunk.virtual):
        held[chunk.stage].append(chunk)
    return held


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
