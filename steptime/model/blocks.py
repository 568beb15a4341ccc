"""A model as ops: its layers in depth order, embedding and head, and their parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, get_args

from steptime.base.num import ceil
from steptime.model import embedding_and_head
from steptime.model.attention import attention_ops
from steptime.model.mlp import mlp_ops
from steptime.model.model import LayerKind, LayerRun, Model
from steptime.model.ops import Op, Param
from steptime.model.shard import Shard
from steptime.software.performance import Software, load_software

__all__ = ["LAYERS", "Layer", "block_ops", "embedding_ops", "head_ops", "layers", "n_params", "params", "params_of"]


def block_ops(model: Model, shard: Shard) -> list[Op]:
    """One dense transformer layer, from tensor "x" to "y"."""
    return [*attention_ops(model, shard), *mlp_ops(model, shard)]


def moe_layer_ops(model: Model, shard: Shard) -> list[Op]:
    """One transformer layer with experts, from tensor "x" to "y"."""
    from steptime.model.moe import moe_ops

    return [*attention_ops(model, shard), *moe_ops(model, shard)]


def mamba_layer_ops(model: Model, shard: Shard) -> list[Op]:
    """One Mamba layer, from tensor "x" to "y"."""
    from steptime.model.mamba import mamba_ops

    return mamba_ops(model, shard)


def expert_layer_ops(model: Model, shard: Shard) -> list[Op]:
    """Experts only, from tensor "x" to "y"."""
    from steptime.model.moe import moe_ops

    return moe_ops(model, shard, x="x")


LAYERS: dict[str, Callable[[Model, Shard], list[Op]]] = {
    "dense": block_ops,
    "moe": moe_layer_ops,
    "mamba": mamba_layer_ops,
    "attention": partial(attention_ops, out="y"),
    "mlp": partial(mlp_ops, x="x"),
    "experts": expert_layer_ops,
}
"""Every kind of layer by name: its ops, from tensor "x" to "y". Rare kinds are imported when they are used."""


class Layer(NamedTuple):
    """A kind of layer in one model: the function that makes its ops, and the model with this layer's widths."""

    kind: str
    model: Model

    def ops(self, shard: Shard) -> list[Op]:
        """One layer's ops, from tensor "x" to "y"."""
        return tuned(self.model, LAYERS[self.kind](self.model, shard), shard)


def tuned(model: Model, ops: list[Op], shard: Shard) -> list[Op]:
    """The ops of a part as the model trains them: with adapters, its own parameters are frozen."""
    if model.lora is None:
        return ops
    from steptime.model.lora_ops import adapted

    return adapted(ops, model.lora, model, shard)


def layers(model: Model) -> list[tuple[Layer, int]]:
    """The layers in depth order: equal neighbors joined with their count; equal runs share one `Layer`."""
    known: dict[tuple[object, ...], Layer] = {}
    of_run: dict[tuple[int, bool], Layer] = {}
    found: list[tuple[Layer, int]] = []
    for run, count, full in sights(model):
        if (id(run), full) not in of_run:
            key = (run.kind, full, *run.widths.items())
            known[key] = of_run[id(run), full] = known.get(key) or layer_of(model, run, full=full)
        layer = of_run[id(run), full]
        if found and found[-1][0] is layer:
            found[-1] = (layer, found[-1][1] + count)
        else:
            found.append((layer, count))
    return found


def last_output(ops: list[Op]) -> str:
    """The output tensor of a part: the last storage that its ops make and do not read."""
    return next(op.outputs[-1].name for op in reversed(ops) if op.outputs)


def ends_in_bf16(every: list[tuple[Layer, int]], start: int, end: int) -> Iterator[tuple[Layer, int, bool]]:
    """Layers in depth order with their count, and whether a recipe leaves them in bf16: `start` first and `end` last ones.

    Source: megatron-core 0.16.1 fp8_utils.py, is_first_last_bf16_layer.
    """
    left, at = sum(count for _, count in every), 0
    for layer, count in every:
        first = min(max(start - at, 0), count)
        last = min(max(count + end - left, 0), count - first)
        for n, in_bf16 in ((first, True), (count - first - last, False), (last, True)):
            if n:
                yield layer, n, in_bf16
        left, at = left - count, at + count


def layer_of(model: Model, run: LayerRun, *, full: bool) -> Layer:
    """A layer of a run, with the model's widths or its own; `full`: with attention to all positions."""
    changes: dict[str, object] = {**run.widths, "layers": None} if run.widths or model.layers else {}
    if full:
        everywhere = model.attention.model_copy(update={"window": None})
        changes |= {"attention": everywhere, "linear_attention": None}
    return Layer(run.kind, model.model_copy(update=changes) if changes else model)


def sights(model: Model) -> Iterator[tuple[LayerRun, int, bool]]:
    """The layers in depth order, their count, and whether their attention is full in a model with windows."""
    runs = [(run, run.repeat) for run in model.layers] if model.layers is not None else pattern(model)
    attention, linear, layer = model.attention, model.linear_attention, 0
    for run, count in runs:
        if linear is None and (attention.window is None or attention.window_pattern is None):
            yield run, count, False
            continue
        for _ in range(count):
            yield run, 1, not (linear or attention).at(layer)
            layer += 1


HYBRID: dict[str, LayerKind] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "experts"}
"""Letters of Megatron's hybrid patterns (megatron/core/ssm/mamba_hybrid_layer_allocation.py, Symbols)."""


_RUNS: dict[str, LayerRun] = {kind: LayerRun.model_construct(kind=kind) for kind in get_args(LayerKind)}
"""One layer of each kind, with the model's own widths."""


def pattern(model: Model) -> list[tuple[LayerRun, int]]:
    """The layers of a model without a list of layers, with counts: from its hybrid pattern, its experts, or all dense."""
    if model.hybrid_pattern is not None:
        return [(_RUNS[HYBRID[letter]], 1) for letter in model.hybrid_pattern]
    moe = model.moe
    if moe is None:
        return [(_RUNS["dense"], model.n_layers)]
    return [(_RUNS["moe" if moe.at(layer) else "dense"], 1) for layer in range(model.n_layers)]


def embedding_ops(model: Model, shard: Shard) -> list[Op]:
    """Token ids to the first block's "x"; without `max_positions` the position table has one row per token of a sequence."""
    ops = embedding_and_head.embedding_ops(model, shard, model.max_positions or ceil(shard.kv_seq))
    if model.lora is None:
        return ops
    from steptime.model.lora_ops import adapted, without_backward

    return without_backward(adapted(ops, model.lora, model, shard))


def head_ops(model: Model, shard: Shard) -> list[Op]:
    """Final norm, logits and cross entropy, from the last block's "x"; multi-token prediction adds its modules between them."""
    if not model.mtp:
        return tuned(model, embedding_and_head.head_ops(model, shard), shard)
    from steptime.model import mtp

    inside = mtp.inside(shard)
    return mtp.head_ops(model, shard, embedding_ops(model, inside), ahead(model).ops(inside))


def ahead(model: Model) -> Layer:
    """The layer of a multi-token prediction module: the last one's kind, with attention before a layer of experts only.

    Nemotron 3's mtp_hybrid_override_pattern is "*E" (NVIDIA-NeMo/Megatron-Bridge nemotron_h_provider.py, Nemotron3SuperProvider).
    """
    last = layers(model)[-1][0]
    return last._replace(kind="moe") if last.kind == "experts" else last


def params_of(ops: list[Op]) -> list[Param]:
    """The parameters that a list of ops owns, in order."""
    return [p for op in ops for p in op.params if not p.shared]


def params(model: Model, shard: Shard) -> list[Param]:
    """Every parameter tensor of the model, layers repeated, without a tied head."""
    head = [p for p in params_of(head_ops(model, shard)) if not (model.tie_embeddings and p.vocab)]
    inside = [p for layer, count in layers(model) for p in params_of(layer.ops(shard)) * count]
    return [*params_of(embedding_ops(model, shard)), *head, *inside]


def n_params(
    model: Model, seqlen: int | None = None, *, trained: bool = False, software: Software | None = None
) -> int:
    """Unique parameters of the whole model, or those of them that are trained.

    The vocabulary is unpadded, a tied embedding counted once, adapters by projection; where `software` is given, with its fused
    projections.

    `seqlen`: rows of a learned position table that does not say its `max_positions`, as in a job of such sequences.

    Raises:
        ValueError: the number of learned positions is unknown.
    """
    positions = model.max_positions or seqlen
    if model.learned_positions and positions is None:
        raise ValueError("model.max_positions: required to count the learned positions; set it, or seqlen")
    whole = Shard(
        1.0,
        1.0,
        float(positions or 0),
        1.0,
        sp=False,
        vocab=model.vocab_sz,
        software=software or load_software("megatron-core" if model.lora is None else "torch"),
    )
    return int(sum(p.elements for p in params(model, whole) if p.trained or not trained))


def n_trained(model: Model, seqlen: int, software: Software) -> int:
    """Parameters that are trained, adapters with the software's fused projections."""
    return n_params(model, seqlen, trained=True, software=software)
