"""NeMo 2.0: a recipe as nemo-run writes it, translated to Megatron-Core's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from steptime.base.config import ConfigError, near, show
from steptime.base.document import parse_mapping, read_source
from steptime.launch.devices import told
from steptime.launch.job_keys import JobKeys
from steptime.launch.keys import FOLDER, flatten, load_table
from steptime.launch.megatron.translation import object_keys, plan_of
from steptime.launch.named_models import preset_of
from steptime.launch.nemo.over_preset import changed
from steptime.launch.nemo.targets import NemoConfig, class_of, methods_of, simplify
from steptime.launch.reading import Reading

_BUCKET = 128 * 1024 * 1024
"""Elements (nemo/lightning/pytorch/callbacks/megatron_comm_overlap.py, _get_optimizer_overlap_cfgs)."""
_OVERLAP = "MegatronCommOverlapCallback"


def read_two(config: NemoConfig) -> Reading:
    """A recipe as a config."""
    path, tree, devices, sets, *_ = config
    said = _said(path, tree, dict(tree["trainer"]))
    config_class = class_of(_section(tree, "model").get("config")).rpartition(".")[2]
    if config_class not in classes() and (preset := class_preset(config_class)) and told(sets, "model") is None:
        sets = {"model": changed(path, preset, said, "model.config", sets), **(sets or {})}
    fields = {} if told(sets, "model") is not None else _fields(path, config_class, said)
    defaults = {f"model.config.{key}": value for key, value in fields.items()}
    keys = object_keys(said, load_table("nemo2"), path, sets, defaults=defaults, defaults_of=config_class)
    _put_over(keys, said)
    precision = str(keys.get("mixed_precision.precision") or "32").lower()
    keys.put("bf16", "bf16" in precision)
    keys.put("fp16", precision.startswith(("16", "fp16")))
    if keys.get("trainer.devices") is not None and keys.values.get("trainer.num_nodes") is not None:
        devices = keys.count("trainer.devices") * keys.count("trainer.num_nodes")
    return plan_of(keys, config.profile("nemo"), devices)


def _put_over(keys: JobKeys, said: Mapping[str, Any]) -> None:
    """The defaults of the precision plugin and of the overlap callback; these also override ddp's own settings."""
    put: dict[str, tuple[str, Any]] = {
        "accumulate_allreduce_grads_in_fp32": ("trainer.plugins.grad_reduce_in_fp32", True)
    }
    if said.get("trainer.plugins.fp8"):
        put["fp8_param_gather"] = ("trainer.plugins.fp8_param_gather", True)
    callback = f"trainer.callbacks.{_OVERLAP}"
    if any(name.startswith(callback) for name in said):
        virtual = keys.get("virtual_pipeline_model_parallel_size")
        put["overlap_grad_reduce"] = (f"{callback}.overlap_grad_reduce", True)
        put["overlap_param_gather"] = (f"{callback}.overlap_param_gather", True)
        put["overlap_p2p_comm"] = (f"{callback}.overlap_p2p_comm", virtual not in (None, 1))
        if keys.get("ddp_bucket_size") is None:
            put["ddp_bucket_size"] = (f"{callback}.bucket_size", _BUCKET)
    for key, (name, value) in put.items():
        keys.defaults[key] = (name, value)
        if key in keys.values and keys.names[key] != name:
            keys.put(key, value, by=name)


def _section(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """A section; empty where it is none."""
    found = tree.get(name)
    return found if isinstance(found, dict) else {}


def _said(path: str, tree: dict[str, Any], trainer: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys, the callbacks' by their classes."""
    strategy = trainer.pop("strategy", None) or {}
    if isinstance(strategy, str) or not isinstance(strategy, dict):
        raise ConfigError(f"{path}: trainer.strategy: expected MegatronStrategy's settings (got {show(strategy)})")
    callbacks = trainer.pop("callbacks", None) or []
    ddp = strategy.get("ddp")
    if isinstance(ddp, str):
        strategy = {key: value for key, value in strategy.items() if key != "ddp"}
        if ddp != "megatron":
            raise ConfigError(f"{path}: trainer.strategy.ddp: {ddp!r} is not modeled; only Megatron's own DDP is")
    rest = {key: value for key, value in tree.items() if key not in {"trainer", "_target_", "_partial_", "fn"}}
    said = flatten({key: simplify(value) for key, value in rest.items() if value is not None})
    said |= flatten({"trainer": simplify(trainer)})
    for item in callbacks if isinstance(callbacks, list) else []:
        name = class_of(item).rpartition(".")[2] or "callback"
        said |= flatten({"trainer": {"callbacks": {name: simplify(item) if name == _OVERLAP else "..."}}})
    return said | methods_of(tree) | flatten({"trainer": {"strategy": simplify(strategy)}})


@cache
def classes() -> dict[str, dict[str, Any]]:
    """The settings that each class of a model's config makes."""
    return _of_families("classes")


@cache
def bases() -> dict[str, dict[str, Any]]:
    """The settings that each class without sizes makes."""
    return _of_families("bases")


def _of_families(part: str) -> dict[str, dict[str, Any]]:
    raw = parse_mapping(*read_source(FOLDER / "nemo2_models.yaml"))
    found = {}
    for name, fields in raw[part].items():
        own = {key: value for key, value in fields.items() if key != "family"}
        found[name] = raw["families"][fields["family"]] | own
    return found


def class_preset(name: str) -> str | None:
    """The preset that a class of a model's config is named after: Qwen25Config7B, MixtralConfig8x7B, Qwen2Config1P5B."""
    family, _, size = name.lower().replace("_", "-").partition("config")
    family = re.sub(r"(?<=\D\d)(?=\d$)", ".", family).removesuffix("moe")
    family = family.removesuffix("2407")
    size = {"500m": "0.5b", "600m": "0.6b"}.get(size, size.replace("p", "."))
    return preset_of(f"{family}-{size}".strip("-"))


def _fields(path: str, name: str, said: Mapping[str, Any]) -> dict[str, Any]:
    if name in classes():
        return classes()[name]
    if {"model.config.num_layers", "model.config.hidden_size"} <= said.keys():
        if name in bases():
            return bases()[name]
        if {"model.config.normalization", "model.config.gated_linear_unit"} <= said.keys():
            return {}  # a class of its own that says what its family is
    what = f"unknown class (got {show(name)})" if name else "has no class name"
    raise ConfigError(f"{path}: model.config: {what}; add --set model=NAME{near(name, classes()) if name else ''}")
