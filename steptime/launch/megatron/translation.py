"""Megatron's settings as a plan: one translation for all sources.

Adapters over frozen weights: LoRA of ms-swift, NeMo, Megatron-Bridge and MindSpeed-LLM. Source of their shapes:
NVIDIA-NeMo/Megatron-Bridge src/megatron/bridge/peft/lora.py (one pair of matrices for each of linear_qkv, linear_proj,
linear_fc1, linear_fc2); of what tensor parallelism splits: model/lora_split.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from steptime.base.config import ConfigError, build
from steptime.job.edit import read_model
from steptime.launch.devices import SET_DEVICES, told
from steptime.launch.job_keys import JobKeys
from steptime.launch.keys import KeyTable, read_keys
from steptime.launch.megatron.expert_layers import capacity, has_experts, trained_with
from steptime.launch.megatron.model_section import data_section, has_own_vocabulary, model_section
from steptime.launch.megatron.parallelism_section import layout_section
from steptime.launch.megatron.performance_section import OLDER, performance_section
from steptime.launch.megatron.releases import plain
from steptime.launch.reading import Reading, Sets
from steptime.launch.trainers.adapters import lora_section
from steptime.launch.trainers.figures import WHOLE
from steptime.model.model import Model

_BACKENDS = ("", "flash", "fused", "unfused", "local", "auto")
"""AttnBackend's numbers (megatron/core/enums.py)."""
_OF_CORE = {"megatron-core", "nemo", "megatron-bridge"}
"""Profiles whose layers may run under torch's fully_shard (src/megatron/bridge/training/setup.py of Megatron-Bridge too)."""
_TRAINED = "adapters over frozen weights ({}): every weight is counted as trained"


def object_keys(
    said: Mapping[str, Any],
    table: KeyTable,
    source: str,
    sets: Sets,
    *,
    defaults: Mapping[str, Any] | None = None,
    defaults_of: str = "",
) -> JobKeys:
    """The fields of Megatron-Core's config objects, by dotted names as Megatron-Bridge and NeMo write them, as settings.

    `defaults` (with their owner) override the table's own. Sources: megatron-core 0.16.1 transformer/transformer_config.py,
    model_parallel_config.py, distributed/distributed_data_parallel_config.py, optimizer/optimizer_config.py; NVIDIA-NeMo/
    Megatron-Bridge src/megatron/bridge/training/mixed_precision.py and comm_overlap.py, whose sections are put over the model's,
    the optimizer's and ddp's.
    """
    given = [item._replace(value=plain(item.value)) for item in read_keys(said, table)]
    keys = JobKeys(source, table, given, defaults=defaults, defaults_of=defaults_of, sets=sets)
    groups = "num_query_groups"  # the parser's default does not apply to a field
    grouped = groups in keys.values or groups in keys.defaults
    keys.put("group_query_attention", grouped and keys.get(groups) is not None)
    if keys.on("optimizer.use_distributed_optimizer"):
        keys.put("use_distributed_optimizer", value=True, by="optimizer.use_distributed_optimizer")
    if keys.get("attention_backend") is None:  # "auto" chooses (AttnBackend's default)
        keys.put("attention_backend", "auto")
    # data without a mask is the default of a container (Megatron-Bridge training/config.py, GPTDatasetConfig) and of NeMo
    has_mask = keys.get("dataset.skip_getting_attention_mask_from_dataset") is False
    keys.put("create_attention_mask_in_dataloader", has_mask)
    backend = re.fullmatch(r".*\((\d)\)", str(keys.get("attention_backend")))
    if backend and int(backend[1]) < len(_BACKENDS):
        keys.put("attention_backend", _BACKENDS[int(backend[1])])
    elif re.fullmatch(r"\w+", word := str(keys.get("attention_backend"))) and word not in _BACKENDS:
        keys.put("attention_backend", "auto")  # equal to none of AttnBackend's members (language_module.py)
        keys.without_effect("attention_backend", "no member of AttnBackend: TransformerEngine chooses the backend")
    return keys


def _model_of(said: Any) -> Model | None:
    """A preset's model or a section's; None where something is wrong with it, which is told with the whole plan."""
    try:
        return build(Model, read_model(said))
    except ConfigError:
        return None


_BY_NAME = "the model"
_OF_FLAGS = {"megatron-core", "megatron-deepspeed"}
"""Profiles of flags; elsewhere a model that has a name also brings how it is trained."""


def _of_model(keys: JobKeys) -> None:
    """What the rest of a plan needs from a model given by name: layers, experts, the kinds of attention and of activation."""
    said = told(keys.sets, "model")
    if said is None or (model := _model_of(said)) is None:
        return
    experts = model.moe
    sizes: dict[str, Any] = {"num_layers": model.n_layers, "num_experts": experts and experts.n_experts}
    sizes["multi_latent_attention"] = model.attention.kind == "mla" or None
    if experts is not None and experts.shared_expert_inter_sz:
        sizes["moe_shared_expert_intermediate_size"] = experts.shared_expert_inter_sz
    for key, size in sizes.items():
        if size is not None and keys.get(key) is None:
            keys.put(key, size, by=_BY_NAME)
    if model.activation == "relu2" and not model.glu:
        keys.put("squared_relu", value=True, by=_BY_NAME)


def _as_trained(keys: JobKeys, said: Any) -> Any:
    """A preset with what flags say of its training, where none gives sizes: the router's losses, a capacity, more depths."""
    if not isinstance(said, str) or (model := _model_of(said)) is None or keys.names.get("num_layers") != _BY_NAME:
        return said
    more: dict[str, Any] = {}
    if model.moe is not None:
        more["moe"] = model.moe.model_dump(exclude_unset=True) | trained_with(keys)
    if depths := keys.whole("mtp_num_layers", least=0):
        more |= {"mtp": depths, "mtp_repeated": keys.on("mtp_use_repeated_layer")}
    return {"preset": said} | more if more else said


def _with_capacity(keys: JobKeys, said: Any) -> Any:
    """A preset, or one with changes, with the capacity that the job gives its experts."""
    found = capacity(keys)
    named = isinstance(said, str) or (isinstance(said, Mapping) and "preset" in said)
    if not found or not named or (model := _model_of(said)) is None or model.moe is None:
        return said
    section = {"preset": said} if isinstance(said, str) else dict(said)
    return section | {"moe": model.moe.model_dump(exclude_unset=True) | found}


def _adapter_section(keys: JobKeys, model: Any, layout: dict[str, Any], precision: str) -> dict[str, Any] | None:
    """The `lora` of a plan's model; None where every weight is trained, or is counted so."""
    usual = keys.table.raw.get("adapters") or {}
    by = usual.get("by", "peft_method")
    method = "lora" if by != "peft_method" and keys.get(by) else str(keys.get("peft_method") or "none")
    method = method.lower().rpartition(".")[2]
    if method in WHOLE or method == "none":
        keys.put("peft_method", None)
        return None
    if method != "lora":
        keys.leave_out("peft_method", _TRAINED.format(method))
        return None
    found = _model_of(model)
    others = found and (found.moe or found.mtp or found.layers or found.hybrid_pattern or found.linear_attention)
    why = "with layers other than dense ones" if found and (others or found.attention.kind != "gqa") else ""
    why = why if precision in {"bf16", "fp16", "fp32"} else f"in {precision}"
    if why:  # not modeled (job/layer_rules.py)
        keys.leave_out(by, _TRAINED.format(f"LoRA {why}"))
        return None
    said = {name: keys.get(f"lora_{name}") for name in ("rank", "targets", "dropout")}
    section, unknown = lora_section(said, usual)
    if unknown:
        keys.leave_out("lora_targets", f"adapters of {', '.join(unknown)}")
    if not section["targets"]:
        return None
    section["rank"] = keys.whole("lora_rank") or section["rank"]
    return section | ({"split": usual["split"]} if "split" in usual and layout.get("tp", 1) != 1 else {})


def plan_of(keys: JobKeys, software: str, devices: int | None) -> Reading:
    """The plan of a job on this number of devices (None: not given) with the defaults of a software profile.

    Raises:
        ConfigError: one line per problem: missing or contradictory settings, values that Megatron does not take.
    """
    _of_model(keys)
    if keys.on("use_rotary_position_embeddings"):
        keys.put("position_embedding_type", "rope", by=keys.name("use_rotary_position_embeddings"))
    if keys.on("use_torch_fsdp2") and software.partition("@")[0] in _OF_CORE:
        software = "megatron-core-fsdp2"
    if software.partition("@")[0] in OLDER and has_experts(keys):
        keys.leave_out("num_experts", "mixture of experts of older releases and DeepSpeed")
        keys.put("num_experts", None)
    layout = layout_section(keys, devices)
    performance = performance_section(keys, layout, software)
    model = told(keys.sets, "model")
    if isinstance(model, str) and has_own_vocabulary(keys):
        fix = "else add --set model.vocab_sz=N"
        keys.notes.append(f"vocabulary not set, that of {model} assumed: the file's own tokenizer is not known; {fix}")
    model = _as_trained(keys, model) if software in _OF_FLAGS else _with_capacity(keys, model)
    if model is None:
        model = model_section(keys)
    if adapters := _adapter_section(keys, model, layout, str(performance.get("precision", "bf16"))):
        model = ({"preset": model} if isinstance(model, str) else model) | {"lora": adapters}
    data = data_section(keys, layout.get("dp"))
    config: dict[str, Any] = {"model": model, "parallelism": layout, "performance": performance, "data": data}
    open_keys = {
        "parallelism.dp": f"number of devices unknown; {SET_DEVICES}",
        "model.vocab_sz": "vocabulary size unknown; add --set model.vocab_sz=N",
        "data.gbs": "global batch size unknown; add --set data.gbs=N",
        "data.seqlen": "sequence length unknown; add --set data.seqlen=N",
    }
    if "dp" not in layout and "microbatch_sz" in data:  # then one micro-batch on each replica
        del open_keys["data.gbs"]
    if "model" in keys.left_open or "preset" in model:
        del open_keys["model.vocab_sz"]
    return keys.reading(config, open_keys)
