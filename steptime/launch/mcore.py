"""Settings of Megatron-Core, as Megatron-Bridge spells them (`model.`, `ddp.`, `optimizer.` ...), as a config.

Sources: megatron-core 0.16.1 transformer/transformer_config.py, model_parallel_config.py, distributed/
distributed_data_parallel_config.py, optimizer/optimizer_config.py; NVIDIA-NeMo/Megatron-Bridge src/megatron/bridge/training/
mixed_precision.py and comm_overlap.py, whose sections are put over the model's, the optimizer's and ddp's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from steptime.base.config import ConfigError
from steptime.launch.devices import data_parallel, told, told_whole
from steptime.launch.keys import Values
from steptime.launch.mcore_speed import Changes, performance_of

_NORMS = {"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"}
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "quick_gelu": "gelu",
    "relu": "relu",
    "squared_relu": "relu2",
}
_POSITIONS = {
    "rope": True,
    "yarn": True,
    "mrope": True,
    "learned_absolute": False,
    "none": False,
    "nope": False,
}
"""Whether they rotate queries and keys."""
_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


class Said(NamedTuple):
    """What a job says: settings by Megatron-Bridge's names, the profile, devices where told, and the user's own keys."""

    values: Values
    software: str
    devices: int | None
    sets: Mapping[str, Any] | None


def config_of(said: Said) -> tuple[dict[str, Any], Changes]:
    """The config, and the settings that turn out to be used otherwise, irrelevant or not modelled.

    Raises:
        ConfigError: a value that Megatron does not take, a model that is not modelled, or contradictory sizes.
    """
    values, changes = said.values, Changes()
    model = told(said.sets, "model") or model_of(values, said.sets, changes)
    config = {
        "model": model,
        "parallelism": parallelism_of(said, changes),
        "performance": {"software": said.software, **performance_of(values, changes)},
    }
    gbs, dp = values.whole("train.global_batch_size"), config["parallelism"]["dp"]
    micro = values.whole("train.micro_batch_size")
    if gbs % (micro * dp):
        raise values.fail(
            "train.global_batch_size",
            f"must be a multiple of micro_batch_size * data-parallel ranks = {micro} * {dp} (got {gbs})",
        )
    config["data"] = {"gbs": gbs, "seqlen": seqlen_of(values, said.sets), "microbatch_sz": micro}
    return config, changes


def seqlen_of(values: Values, sets: Mapping[str, Any] | None) -> int:
    """The sequence length: the data's, else the model's."""
    for key in ("dataset.sequence_length", "dataset.seq_length", "model.seq_length"):
        if values.get(key) is not None:
            return values.whole(key)
    if found := told_whole(sets, "data.seqlen"):
        return found
    raise values.fail("dataset.sequence_length", "missing; add --set data.seqlen=N")


def model_of(values: Values, sets: Mapping[str, Any] | None, changes: Changes) -> dict[str, Any]:
    """The model section.

    Raises:
        ConfigError: a mixture of experts, latent attention, or a vocabulary that nothing tells.
    """
    if values.get("model.num_moe_experts"):
        raise values.fail("model.num_moe_experts", "mixtures of experts are not modelled; only dense models are")
    if values.yes("model.multi_latent_attention"):
        raise values.fail(
            "model.multi_latent_attention", "latent attention is not modelled; only grouped-query attention is"
        )
    layers, hidden, heads = (
        values.whole(f"model.{name}") for name in ("num_layers", "hidden_size", "num_attention_heads")
    )
    glu, norm = values.yes("model.gated_linear_unit"), values.word("model.normalization", _NORMS)
    bias = values.yes("model.add_bias_linear")
    model: dict[str, Any] = {
        "n_layers": layers,
        "hidden_sz": hidden,
        "inter_sz": values.whole("model.ffn_hidden_size", 4 * hidden),
        "n_q_heads": heads,
        "n_kv_heads": values.whole("model.num_query_groups", heads),
        "head_dim": values.whole("model.kv_channels", hidden // heads),
        "vocab_sz": vocabulary(values, sets),
        "glu": glu,
        "activation": values.word("model.activation_func", _spellings(str(values.get("model.activation_func")))),
        "norm": norm,
        "bias": bias,
        "qkv_bias": bias or values.yes("model.add_qkv_bias"),
        "norm_bias": norm == "layernorm",
        "qk_norm": values.yes("model.qk_layernorm"),
        "tie_embeddings": values.yes("model.share_embeddings_and_output_weights"),
        "dropout": dropout_of(values, changes),
        "source": values.source,
    }
    if not bias and not model["dropout"]:  # torch's dropout of probability 0 returns its input
        changes["model.bias_dropout_fusion"] = (
            "irrelevant",
            "without bias and dropout both ways add the residual alone",
        )
    rotary = values.word("model.position_embedding_type", _POSITIONS)
    if str(values.get("model.position_embedding_type")) == "learned_absolute":
        return model | {"learned_positions": True, "rotary_embeds": False}
    return model | {"rotary_embeds": rotary}


def _spellings(said: str) -> dict[str, str]:
    """The activation functions by the path that a dump gives them."""
    path = said.rpartition(".")[0]
    return {f"{path}.{name}" if path else name: word for name, word in _ACTIVATIONS.items()}


def vocabulary(values: Values, sets: Mapping[str, Any] | None) -> int:
    """Rows of the embedding, before padding."""
    if (found := told_whole(sets, "model.vocab_sz")) is not None:
        return found
    for key in ("model.vocab_size", "tokenizer.vocab_size"):
        if values.get(key) is not None:
            return values.whole(key)
    raise values.fail(
        "model.vocab_size", "the vocabulary is the tokenizer's, and not in the file; add --set model.vocab_sz=N"
    )


def dropout_of(values: Values, changes: Changes) -> float:
    """The hidden dropout; attention's own where it differs is left out."""
    found = [values.get(f"model.{name}_dropout") for name in ("hidden", "attention")]
    hidden, attention = (float(rate) if isinstance(rate, int | float) else 0.0 for rate in found)
    if attention != hidden:
        changes["model.attention_dropout"] = ("unmodelled", f"attention's own dropout; taken as {hidden:g}")
    return hidden


def parallelism_of(said: Said, changes: Changes) -> dict[str, Any]:
    """Degrees, ZeRO level, stages and buckets."""
    values = said.values
    tp, pp, cp = (
        values.whole(f"model.{name}_size")
        for name in ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
    )
    words = "tensor * pipeline * context parallel size"
    dp = data_parallel(values.source, tp * pp * cp, said.devices, said.sets, words)
    layout: dict[str, Any] = {"tp": tp, "pp": pp, "dp": dp, "zero_level": zero_level(values)}
    if tp > 1:
        layout["sp"] = values.yes("model.sequence_parallel")
    else:
        changes["model.sequence_parallel"] = ("irrelevant", "only with tensor parallelism")
    if cp > 1:
        layout |= {"cp": cp} | cp_comm_type(values, changes)
    if values.get("optimizer.use_distributed_optimizer"):
        changes["ddp.use_distributed_optimizer"] = ("irrelevant", "optimizer.use_distributed_optimizer says it")
    vpp = values.whole("model.virtual_pipeline_model_parallel_size", 1)
    if pp > 1:
        layout |= ({"vpp": vpp} if vpp > 1 else {}) | stages(values, pp, vpp, changes)
    group = values.get("model.microbatch_group_size_per_vp_stage")
    if vpp > 1 and group is not None and group != pp:
        changes["model.microbatch_group_size_per_vp_stage"] = ("unmodelled", f"groups of {group}; taken as pp = {pp}")
    if (replicas := values.whole("ddp.num_distributed_optimizer_instances", 1)) > 1:
        layout["replicas"] = replicas
    bucket = values.get("comm_overlap.bucket_size") or values.get("ddp.bucket_size")
    if bucket is not None:
        values.values["ddp.bucket_size"] = bucket
        itemsize = 4 if reduces_in_fp32(values) else 2
        layout["bucket_size_mb"] = values.whole("ddp.bucket_size") * itemsize / 1e6
    return layout


def reduces_in_fp32(values: Values) -> bool:
    """Whether main gradients are fp32: mixed_precision's word is put over ddp's."""
    return values.yes("mixed_precision.grad_reduce_in_fp32", default=values.yes("ddp.grad_reduce_in_fp32"))


def zero_level(values: Values) -> int:
    """The distributed optimizer is level 1; Megatron-FSDP shards as its strategy says."""
    if any(values.yes(key) for key in ("ddp.use_megatron_fsdp", "ddp.use_custom_fsdp", "dist.use_megatron_fsdp")):
        return int(values.word("ddp.data_parallel_sharding_strategy", _STRATEGIES))
    return int(values.yes("ddp.use_distributed_optimizer") or values.yes("optimizer.use_distributed_optimizer"))


def cp_comm_type(values: Values, changes: Changes) -> dict[str, Any]:
    """How context parallelism exchanges keys and values."""
    said = values.get("model.cp_comm_type")
    if said is None:
        return {}
    kinds = set(map(str, said)) if isinstance(said, list) else {str(said)}
    words = {"p2p": "p2p", "all_gather": "all_gather", "a2a": "a2a"}
    if len(kinds) > 1 or kinds == {"a2a+p2p"}:
        changes["model.cp_comm_type"] = ("unmodelled", "several kinds at once; taken as p2p")
        return {"cp_comm_type": "p2p"}
    values.values["model.cp_comm_type"] = kinds.pop()
    return {"cp_comm_type": values.word("model.cp_comm_type", words)}


def stages(values: Values, pp: int, vpp: int, changes: Changes) -> dict[str, Any]:
    """Layers per stage where they are uneven (transformer_config.py, num_layers_in_first_pipeline_stage)."""
    embedding, loss = (values.yes(f"model.account_for_{end}_in_pipeline_split") for end in ("embedding", "loss"))
    if embedding and loss:
        return {"embedding_and_loss_count_as_layers": True}
    if embedding != loss:
        end = "embedding" if embedding else "loss"
        changes[f"model.account_for_{end}_in_pipeline_split"] = ("unmodelled", "one end of two; taken as auto")
        return {"layers_per_stage": "auto"}
    ends = [values.get(f"model.num_layers_in_{end}_pipeline_stage") for end in ("first", "last")]
    if ends == [None, None]:
        return {}
    if vpp > 1:
        raise ConfigError(
            f"{values.source}: model.num_layers_in_first_pipeline_stage: uneven stages with virtual stages are not read; "
            "add --set parallelism.layers_per_stage"
        )
    layers = values.whole("model.num_layers") - sum(int(end) for end in ends if end is not None)
    middle = pp - sum(end is not None for end in ends)
    if middle < 1 or layers < middle or layers % middle:
        raise values.fail(
            "model.num_layers", f"the {layers} layers between the ends do not divide over {middle} stages"
        )
    first, last = ([] if end is None else [int(end)] for end in ends)
    return {"layers_per_stage": [*first, *[layers // middle] * middle, *last]}
