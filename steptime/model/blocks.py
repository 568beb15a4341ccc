"""A model as ops: its layers, its two ends, and the parameters that these own."""

from __future__ import annotations

from steptime.base.num import ceil
from steptime.model import embedding_and_head
from steptime.model.attention import attention_ops
from steptime.model.embedding_and_head import head_ops
from steptime.model.mlp import mlp_ops
from steptime.model.model import Model
from steptime.model.ops import Op, Param
from steptime.model.shard import Shard
from steptime.software.performance import load_software

__all__ = ["block_ops", "embedding_ops", "head_ops", "n_params", "params", "params_of"]


def block_ops(model: Model, shard: Shard) -> list[Op]:
    """One transformer block, from tensor "x" to "y"."""
    return [*attention_ops(model, shard), *mlp_ops(model, shard)]


def embedding_ops(model: Model, shard: Shard) -> list[Op]:
    """Token ids to the first block's "x"; without `max_positions` the position table has one row per token of a sequence."""
    return embedding_and_head.embedding_ops(model, shard, model.max_positions or ceil(shard.kv_seq))


def params_of(ops: list[Op]) -> list[Param]:
    """The parameters that a list of ops owns, in order."""
    return [p for op in ops for p in op.params]


def params(model: Model, shard: Shard) -> list[Param]:
    """Every parameter tensor of the model, blocks repeated, a tied head left out."""
    ends = [*params_of(embedding_ops(model, shard)), *params_of(head_ops(model, shard))]
    ends = [p for p in ends if not (model.tie_embeddings and p.name == "head.weight")]
    return ends + params_of(block_ops(model, shard)) * model.n_layers


def n_params(model: Model) -> int:
    """Unique parameters of the whole model, vocabulary unpadded, a tied embedding once.

    Learned positions without `max_positions` are counted with none: a Job fills in its sequence length.
    """
    whole = Shard(
        1.0,
        1.0,
        float(model.max_positions or 0),
        1.0,
        sp=False,
        vocab=model.vocab_sz,
        software=load_software("megatron-core"),
    )
    return sum(p.elements for p in params(model, whole))
