"""Megatron-Bridge's recipes in Python: a function that changes another recipe's config, read by its syntax."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from steptime.base.config import ConfigError
from steptime.launch.config_functions import CALLED, CLASS, Computed, read_function
from steptime.launch.keys import flatten, load_table
from steptime.launch.megatron.config_objects import object_keys
from steptime.launch.megatron.translation import plan_of
from steptime.launch.named_models import preset_of
from steptime.launch.reading import LaunchFlag, Reading

_PRECISIONS = {
    "bf16": {}, "fp8": {"fp8": "hybrid", "fp8_recipe": "delayed"}, "fp8_ds": {"fp8": "hybrid", "fp8_recipe": "delayed"},
    "fp8_cs": {"fp8": "hybrid", "fp8_recipe": "tensorwise"}, "fp8_sc": {"fp8": "hybrid", "fp8_recipe": "blockwise"},
    "fp8_mx": {"fp8": "e4m3", "fp8_recipe": "mxfp8"}, "nvfp4": {"fp4": "e2m1", "fp4_recipe": "nvfp4"},
}  # fmt: skip
"""Words of Megatron-Bridge's perf recipes -> fields of its mixed precision (training/mixed_precision.py)."""


def read_recipe(path: str, file: str, text: str, function: str, sets: Mapping[str, Any] | None) -> Reading:
    """A function that returns a ConfigContainer (FILE.py:FUNCTION) as a config; its model and length may be the base recipe's.

    Raises:
        ConfigError: one line per problem: no such function, or what only the base recipe says and nobody sets.
    """
    name, tree = read_function(file, text, function, "ConfigContainer", r"_config$|^\w+_recipe$")
    base = str(tree.pop(CLASS))
    called = tree.pop(CALLED, [])
    preset = preset_of(
        re.split(r"_(?:pretrain|sft|peft|finetune|config|base)", re.sub("llama3[12]", "llama3", base))[0]
    )
    mixed = tree.pop("mixed_precision", None)
    word = (mixed.get("_args_") or [None])[0] if isinstance(mixed, dict) else mixed
    low = _PRECISIONS.get(re.sub(r"^bf16_with_|_mixed$", "", str(word)) if word else "bf16", {})
    said = flatten({key: _plain(section) for key, section in tree.items() if key != "env_vars"})
    said |= {f"mixed_precision.{key}": value for key, value in ({"bf16": True} | low).items()}
    model = {} if preset is None or "model.num_layers" in said else {"model": preset}
    table = load_table("megatron_bridge")
    length = re.search(r"_(\d+)k_", base)
    lengths = [size for family, size in table.raw["lengths"].items() if base.startswith(family)]
    defaults: dict[str, Any] = {
        "ddp.overlap_grad_reduce": True,
        "ddp.overlap_param_gather": True,
        "ddp.use_distributed_optimizer": True,
    }
    if length or lengths:
        defaults["dataset.seq_length"] = int(length[1]) * 1024 if length else lengths[0]
    keys = object_keys(
        said,
        table,
        path,
        model | dict(sets or {}),
        defaults=defaults,
        defaults_of="its recipes",
    )
    if preset is None and not model and "num_layers" not in keys.values and "model" not in (sets or {}):
        raise ConfigError(f"{path}: its model is that of {base}(), which is not in the file; add --set model=NAME")
    keys.beside_flags.append(
        LaunchFlag(f"{base}()", preset or "", "approximated", "what it sets beside the model is not read")
    )
    keys.beside_flags += [LaunchFlag(call, "", "approximated", "what it sets is not read") for call in called]
    devices = re.search(r"_(\d+)gpus?_", name)
    return plan_of(keys, "megatron-bridge", int(devices[1]) if devices else None)


def _plain(node: Any) -> Any:
    """Sections without the names of their classes, and without what only a run would tell."""
    if not isinstance(node, dict):
        return node
    return {
        key: _plain(item)
        for key, item in node.items()
        if key not in {CLASS, "_args_"} and not isinstance(item, Computed)
    }
