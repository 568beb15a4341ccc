"""NeMo 1.x: a hydra config with its references resolved, translated to Megatron-Core's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from steptime.base.config import ConfigError
from steptime.launch.devices import of_name, states_devices, taken, told
from steptime.launch.interpolate import resolve
from steptime.launch.job_keys import JobKeys
from steptime.launch.keys import flatten, load_table
from steptime.launch.megatron.translation import object_keys, plan_of
from steptime.launch.named_models import preset_of
from steptime.launch.nemo.targets import NemoConfig
from steptime.launch.reading import OTHER_MODEL, Reading

_APEX = "distributed_fused_adam"
_PARTS = ("preprocessor", "encoder", "decoder", "generator", "unet", "mm_cfg", "language_model")
"""Sections of NeMo 1's models of speech, images, translation and classification; a GPT has its sizes in the model itself."""
_GRIFFIN = "megatron_griffin"
"""The name of a whole config of examples/nlp/language_modeling/megatron_griffin_pretraining.py."""
_CONVERTED = {"model.mcore_gpt": True, "model.transformer_engine": True}
"""Of a checkpoint that NeMo's converters write (examples/nlp/language_modeling/conf/megatron_llama_config.yaml since 1.22)."""


def read_one(config: NemoConfig) -> Reading:
    """A hydra config as a config.

    Raises:
        ConfigError: it is of a model with other parts than a GPT's.
    """
    path, tree, devices, sets, *_ = config
    if tree.get("name") == _GRIFFIN:
        raise ConfigError(f"{path}: name {_GRIFFIN}: recurrent layers, {OTHER_MODEL}; not modeled")
    if part := next((part for part in _PARTS if isinstance(tree["model"].get(part), dict)), ""):
        raise ConfigError(f"{path}: model.{part}: {OTHER_MODEL}; not modeled")
    tree = resolve(tree, config.variables)
    own = "base_config" in tree["model"]
    table = load_table("mlperf_nemo" if own else "nemo1")
    by_path = _of_checkpoint(tree["model"]) if told(sets, "model") is None else None
    if named := _named_model(tree["model"], table.raw.get("models") or {}) or (by_path and {"model": by_path}):
        sets = named | dict(sets or {})
    said = (_CONVERTED if by_path else {}) | flatten(tree)
    if not own and said.get("model.optim.name") is None:
        what = "model.optim has no name: a part of a config that hydra composes"
        raise ConfigError(f"{path}: {what}; give the composed one, or the log that prints it")
    if said.get("model.encoder_seq_length") is None and (longest := said.get("model.data.train_ds.max_seq_length")):
        said["model.encoder_seq_length"] = longest  # of fine-tuning, whose model is in a checkpoint
    apex = said.get("model.optim.name") == _APEX
    keys = object_keys(said, table, path, sets, defaults=table.raw[_APEX] if apex else {})
    keys.without_value |= _unset(keys)
    if by_path:
        what = "with the layers that NeMo's converters choose (Megatron-Core's with TransformerEngine)"
        keys.notes.append(f"model {by_path}, from the path of its checkpoint (model.restore_from_path), {what}")
    lengths = [said.get(key) for key in ("model.encoder_seq_length", "model.data.seq_length")]
    if None not in lengths and lengths[0] != lengths[1]:
        # megatron_gpt_model.py, build_train_valid_test_datasets: the length of its samples is that of the data section
        instead = f"from the data section, not encoder_seq_length {lengths[0]}"
        keys.notes.append(f"sequences of {lengths[1]} tokens, {instead}")
    if layers := load_table("nemo1").raw["other_layers"].get(str(said.get("model.name"))):
        keys.leave_out("model.name", layers)
    software = config.profile(_in_megatron_words(keys))
    if isinstance(keys.get("trainer.devices"), int) and keys.values.get("trainer.num_nodes") is not None:
        devices = keys.count("trainer.devices") * keys.count("trainer.num_nodes")
    elif devices is None and not states_devices(sets) and (devices := of_name(path)):
        keys.notes.append(taken(devices, "the name of the file"))
    reading = plan_of(keys, software, devices)
    if apex and keys.get("model.optim.bucket_cap_mb") is not None:
        reading.config["parallelism"]["bucket_size_mb"] = keys.count("model.optim.bucket_cap_mb")
    return reading


def _unset(keys: JobKeys) -> dict[str, str]:
    """What to do about each key whose value is a variable that is not set and has no default."""
    asked: dict[str, str] = {}
    for item in keys.given:
        if names := dict.fromkeys(re.findall(r"\$\{oc\.env:(\w+)\}", str(item.value))):
            unset, fix = " and ".join(f"${name}" for name in names), " ".join(f"{name}=..." for name in names)
            what = f"{unset} not set; write {fix} before the command, or give the file that sets it with --with FILE"
            asked[item.key] = f"{item.name}: {what}"
    return asked


def _named_model(model: Mapping[str, Any], presets: Mapping[str, str]) -> dict[str, Any]:
    """The model of a config that names one (MLPerf's base_config), with the number of layers put over its own."""
    preset = presets.get(str(model.get("base_config")))
    attributes = model.get("overwritten_attributes")
    layers = attributes.get("num_layers") if isinstance(attributes, Mapping) else None
    return {"model": {"preset": preset} | ({"n_layers": layers} if layers else {})} if preset else {}


def _of_checkpoint(model: Mapping[str, Any]) -> str | None:
    """The preset that a part of the checkpoint's path names with its size, of a config that has no sizes of its own.

    >>> _of_checkpoint({"restore_from_path": "${base_results_dir}/llama2_7b/convert_nemo/results/megatron_llama.nemo"})
    'llama2-7b'
    """
    parts = [] if "num_layers" in model else str(model.get("restore_from_path")).split("/")
    sized = [part.removesuffix(".nemo") for part in parts if re.search(r"\d[bB](?![a-zA-Z])", part)]
    return next((preset for part in reversed(sized) if (preset := preset_of(part))), None)


def _in_megatron_words(keys: JobKeys) -> str:
    """Translate NeMo 1's own names to Megatron-Core's; returns the profile."""
    function, gated = keys.word("model.activation")
    precision = str(keys.get("model.precision") or keys.get("trainer.precision")).lower()
    bf16, fp16 = "bf16" in precision, precision.startswith(("16", "fp16"))
    core = keys.on("model.mcore_gpt") or keys.on("model.transformer_engine")
    # TransformerEngine's fused kernels take 16-bit values only (pytorch/attention/dot_product_attention/utils.py)
    flash = keys.on("model.use_flash_attention") or (keys.on("model.transformer_engine") and (bf16 or fp16))
    apex = keys.get("model.optim.name") == _APEX
    put = {
        "normalization": keys.word("model.normalization"),
        "activation_func": function,
        "gated_linear_unit": gated,
        "bf16": bf16,
        "fp16": fp16,
        "optimizer": "adam",
        "use_distributed_optimizer": keys.word("model.optim.name") == 1
        or keys.on("optimizer.use_distributed_optimizer"),
        "accumulate_allreduce_grads_in_fp32": str(keys.get("model.optim.grad_sync_dtype")) in {"fp32", "32"},
        # Apex's distributed Adam keeps of the master weights what bf16 drops (megatron_base_model.py, configure_optimizers)
        "use_precision_aware_optimizer": apex and bf16,
        "attention_backend": "flash" if flash else "unfused",
        "fp8": "hybrid" if keys.on("model.fp8") else None,
    }
    if keys.on("model.fp4"):
        put["fp4"] = "e2m1"
    for key, value in put.items():
        keys.put(key, value)
    if keys.on("model.fp8") and not (bf16 or fp16):
        keys.leave_out("model.fp8", f"products in fp8 of a model in precision {precision}")
    if not apex:
        keys.without_effect("model.optim.bucket_cap_mb", f"only with {_APEX}")
    if (bf16 or fp16) and not keys.on("model.megatron_amp_O2"):
        keys.approximate("model.megatron_amp_O2", "autocast over fp32 parameters; counted as half-precision parameters")
    return "nemo" if core else "nemo-2022"
