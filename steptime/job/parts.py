"""The parts of a model on one device: the embedding, a layer of each kind, the head."""

from __future__ import annotations

from dataclasses import field
from functools import cached_property
from typing import Any, NamedTuple

from steptime.base.num import Num
from steptime.base.recent import Recent
from steptime.base.records import record
from steptime.job.local_params import LocalParam, LocalParams, in_bf16_of
from steptime.model.blocks import embedding_ops, ends_in_bf16, head_ops, last_output, layers, params_of
from steptime.model.model import Model
from steptime.model.ops import Gemm, Op, Param, Tensor, tensor_bytes
from steptime.model.shard import Shard


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
    sequences: Num = 1.0
    """Of the head: sequences of a micro-batch that a loss in chunks cuts one by one."""
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
    def unsplit(self) -> list[Num]:
        """Elements of each parameter that tp does not split, in the same order."""
        return [p.elements for p in self.params if p.split_dim is None]

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
        found = [op for op in self.ops if isinstance(op, Gemm) and op.recipe and not op.recipe.of_experts]
        weights = [p for op in found for p in op.params if p.multiplies]
        return sum(p.local(self.tp, self.experts) for p in weights)


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
    parts: dict[tuple[int, bool], Part] = {}
    runs: list[tuple[Part, int]] = []
    for layer, count, in_bf16 in ends_in_bf16(every, *ends):
        key = id(layer), in_bf16
        if key not in parts:
            ops = layer.ops(in_bf16_of(shard) if in_bf16 else shard)
            parts[key] = Part(layer.kind, ops, hidden, "y", shard.tp, layer.model, experts, shard.ep)
        runs.append((parts[key], count))
    return Parts(
        Part("embedding", embedding, Tensor("ids", 0.0, 0.0), last_output(embedding), shard.tp, model),
        Part("head", head_ops(model, shard), hidden, "", shard.tp, last, experts, shard.ep, sequences_cut(shard)),
        runs,
        list(parts.values()),
        1.0 * hidden.bytes,
    )


def sequences_cut(shard: Shard) -> Num:
    """Sequences that a loss in chunks cuts one by one."""
    return 1.0 if shard.software.buffers.loss_by_token else shard.batch


PARTS: Recent[Parts] = Recent(16)
"""Parts of the last shards: a sweep of layouts or batches comes back to the same few degrees of tp, cp and ep."""


def shared_parts(shard: Shard, ends: tuple[int, int], model: Model) -> Parts:
    """The parts of plain numbers, built once for all jobs that have them; arguments as in `parts_of`."""
    return PARTS.of((shard, ends, model), lambda: parts_of(shard, ends, model))
