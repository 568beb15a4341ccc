"""The model of a recipe of Megatron-Bridge: that of its provider, or of the recipe's name."""

from __future__ import annotations

import re
from typing import Any

from steptime.launch.config_values import CLASS
from steptime.launch.named_models import preset_of
from steptime.launch.nemo.nemo_run import class_preset, classes


def model_of(section: Any) -> tuple[str | None, dict[str, Any]]:
    """The preset of a model from the repository of its provider, or what the provider's class sets (GPTProvider175B)."""
    if not isinstance(section, dict):
        return None, {}
    given = [name for name in section.get("_args_", []) if isinstance(name, str)]
    provider = str(section.get(CLASS)).rpartition(".")[2]
    named = re.sub(r"(?:Model)?Provider$", "", re.sub(r"(?:Model)?Provider(?=\d)|Model(?=\d)", "Config", provider))
    fields = {f"model.{key}": value for key, value in classes().get(named, {}).items()}
    presets = (preset_of(name) for name in given)
    return next((found for found in (*presets, None if fields else class_preset(named)) if found), None), fields


def model_of_name(base: str) -> str | None:
    """The preset that the name of a recipe's function begins with."""
    return preset_of(re.split(r"_(?:pretrain|sft|peft|finetune|config|base)", re.sub("llama3[12]", "llama3", base))[0])
