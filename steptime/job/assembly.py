"""From a job to its pieces: the shard of one device, the three kinds of part, and the model chunks that hold them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from steptime.base.num import Num, ceil
from steptime.job.job import Job
from steptime.model.blocks import block_ops, embedding_ops, head_ops
from steptime.model.ops import Gemm, Op, Param, Tensor, tensor_bytes
from steptime.model.shard import Shard


def padded_vocab(vocab_sz: int, tp: Num, multiple: int) -> Num:
    """Vocabulary padded to a multiple of `multiple` * tp.

    Source: megatron/training/tokenizer/tokenizer.py, _vocab_size_with_padding (make-vocab-size-divisible-by, 128).

    >>> padded_vocab(50257, 8, 128)
    51200
    """
    unit = multiple * tp
    return ceil(vocab_sz / unit) * unit


def shard_of(job: Job) -> Shard:
    """What one device of the job sees of one micro-batch."""
    p, data = job.parallelism, job.data
    return Shard(
        batch=float(data.microbatch_sz),
        seq=data.seqlen / p.cp,
        kv_seq=float(data.seqlen),
        tp=p.tp,
        sp=job.sp,
        vocab=padded_vocab(job.model.vocab_sz, p.tp, job.software.layout.vocab_multiple),
        software=job.software,
        cp=p.cp,
        cp_comm_type=job.cp_comm_type,
    )


@dataclass(frozen=True)
class Part:
    """One stretch of the model on one device: its ops, what it reads and what it hands on."""

    kind: str
    ops: list[Op]
    x: Tensor
    out: str
    tp: int

    @cached_property
    def sizes(self) -> dict[str, float]:
        """Bytes of every tensor by name."""
        return tensor_bytes(self.ops, self.x)

    @cached_property
    def params(self) -> list[Param]:
        """Its parameter tensors."""
        return [p for op in self.ops for p in op.params]

    @cached_property
    def n_params(self) -> int:
        """Parameters on one device: split ones divided by tp."""
        return sum(local_elements(p, self.tp) for p in self.params)

    @cached_property
    def n_quantised(self) -> int:
        """Parameters on one device that a recipe quantises: weights of its projections."""
        weights = [p for op in self.ops if isinstance(op, Gemm) and op.recipe for p in op.params if len(p.shape) > 1]
        return sum(local_elements(p, self.tp) for p in weights)

    @cached_property
    def forward_flops(self) -> float:
        """FLOPs of one forward on one device."""
        return sum(float(getattr(op, "flops", 0.0)) for op in self.ops)


def local_elements(param: Param, tp: int) -> int:
    """Elements of a parameter on one device."""
    return -(-param.elements // tp) if param.shard else param.elements


class Chunk(NamedTuple):
    """One model chunk: number `depth` of pp*vpp; stage depth % pp holds it as its virtual chunk depth // pp."""

    depth: int
    stage: int
    virtual: int
    layers: int
    embedding: bool
    head: bool


class Assembly:
    """The parts of a job and the chunks that hold them."""

    def __init__(self, job: Job) -> None:
        """Build the op lists once; everything else reads them."""
        self.job = job
        self.shard = shard_of(job)
        model, tp = job.model, job.parallelism.tp
        hidden = Tensor("x", self.shard.sequence_tokens * model.hidden_sz, self.shard.itemsize)
        nothing = Tensor("ids", 0.0, 0.0)
        embedding = embedding_ops(model, self.shard)
        self.boundary_bytes = float(hidden.bytes)
        """What one stage hands to the next [B]."""
        self.embedding = Part("embedding", embedding, nothing, last_output(embedding), tp)
        self.block = Part("block", block_ops(model, self.shard), hidden, "y", tp)
        self.head = Part("head", head_ops(model, self.shard), hidden, "", tp)

    @cached_property
    def chunks(self) -> list[Chunk]:
        """Model chunks in depth order."""
        pp, layers = self.job.parallelism.pp, self.job.layers_per_chunk
        last = len(layers) - 1
        return [Chunk(i, i % pp, i // pp, n, i == 0, i == last) for i, n in enumerate(layers)]

    @cached_property
    def stages(self) -> list[list[Chunk]]:
        """Chunks by stage, virtual chunks in order."""
        pp = self.job.parallelism.pp
        return [[c for c in self.chunks if c.stage == stage] for stage in range(pp)]

    @property
    def tied_copy(self) -> bool:
        """Whether the last stage holds its own copy of a tied embedding."""
        return self.job.model.tie_embeddings and self.job.parallelism.pp > 1

    @cached_property
    def head_params(self) -> list[Param]:
        """Parameters of the head on its stage: a tied head on the embedding's own stage has no weight of its own."""
        if self.job.model.tie_embeddings and not self.tied_copy:
            return [p for p in self.head.params if p.name != "head.weight"]
        return self.head.params

    def chunk_params(self, chunk: Chunk) -> list[list[Param]]:
        """Parameters of a chunk, part by part in depth order."""
        parts = [self.embedding.params] if chunk.embedding else []
        parts += [self.block.params] * chunk.layers
        return [*parts, self.head_params] if chunk.head else parts

    def local_params(self, chunk: Chunk) -> int:
        """Parameters of a chunk on one device."""
        total = chunk.layers * self.block.n_params
        total += self.embedding.n_params if chunk.embedding else 0
        return total + (sum(local_elements(p, self.block.tp) for p in self.head_params) if chunk.head else 0)


def last_output(ops: list[Op]) -> str:
    """The tensor that a part hands on: the last storage its ops make for others."""
    return next(op.outputs[-1].name for op in reversed(ops) if op.outputs)
