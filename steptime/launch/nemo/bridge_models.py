"""The model of a recipe of Megatron-Bridge: that of its provider, or of the recipe's name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from steptime.base.config import ConfigError
from steptime.launch.config_values import CLASS, Computed
from steptime.launch.devices import told
from steptime.launch.keys import KeyTable, rule_of, spelled
from steptime.launch.named_models import preset_of
from steptime.launch.nemo.nemo_run import class_preset, classes
from steptime.launch.reading import Sets


def model_of(section: Any) -> tuple[str | None, dict[str, Any]]:
    """The preset of a model from the repository of its provider, or what the provider's class sets (GPTProvider175B)."""
    if not isinstance(section, dict):
        return None, {}
    given = [name for name in section.get("_args_", []) if isinstance(name, str)]
    provider = str(section.get(CLASS)).rpartition(".")[2]
    named = re.sub(r"(?:Model)?Provider$", "", re.sub(r"(?:Model)?Provider(?=\d)|Model(?=\d)", "Config", provider))
    # qwen_provider.py: heads as Hugging Face's models have them, unlike NeMo 2's classes
    sizes = {} if named.startswith("Qwen2") else classes().get(named, {})
    fields = {f"model.{key}": value for key, value in sizes.items()}
    presets = (preset_of(name) for name in given)
    return next((found for found in (*presets, None if fields else class_preset(named)) if found), None), fields


def model_of_name(base: str) -> str | None:
    """The preset that the name of a recipe's function begins with."""
    return preset_of(re.split(r"_(?:pretrain|sft|peft|finetune|config|base)", re.sub("llama3[12]", "llama3", base))[0])


def is_provided(path: str, section: Any, unknown: bool) -> bool:
    """Whether a recipe's model is made by one of the framework's providers, not a config of Megatron-Core.

    Raises:
        ConfigError: the model is `unknown`, and its provider has settings of its own (models/gemma/gemma3_provider.py).
    """
    maker = str(section.get(CLASS)) if isinstance(section, dict) else ""
    own = re.search(r"(\w*Provider\w*)$", maker)
    if unknown and own and own[1] != "GPTModelProvider":
        raise ConfigError(f"{path}: its model is a {own[1]}, whose own settings are not known; add --set model=NAME")
    return bool(own or re.search(r"from_hf_pretrained|to_megatron_provider", maker))


_SIZES = {*(f"parallelism.{axis}" for axis in ("tp", "pp", "cp")), "data.gbs", "data.microbatch_sz", "data.seqlen"}


def ask_for_sizes(
    path: str, said: Mapping[str, Any], unread: Mapping[str, Computed], table: KeyTable, sets: Sets
) -> None:
    """Refuse a degree, a batch or a length that is computed: that of the base recipe is another one.

    Raises:
        ConfigError: one line for each that the user does not set.
    """
    of = {key: rule.note for key in (*said, *unread) if (rule := rule_of(spelled(key, table), table))}
    asked = {key: of[key] for key in unread if of.get(key) in _SIZES - {of[key] for key in said if key in of}}
    lines = [
        f"{path}: {key} is computed ({unread[key].code}); add --set {plan}=N"
        for key, plan in asked.items()
        if told(sets, plan) is None
    ]
    if lines:
        raise ConfigError(lines)
