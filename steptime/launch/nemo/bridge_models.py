"""Models of Megatron-Bridge's recipes: that of a provider or of a recipe's name, and what is set over it."""

from __future__ import annotations

import re
from typing import Any

from steptime.base.config import ConfigError
from steptime.launch.config_values import CLASS, Computed
from steptime.launch.devices import told
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
    fields = {f"model.{key}": value for key, value in classes().get(named, {}).items()}
    presets = (preset_of(name) for name in given)
    return next((found for found in (*presets, None if fields else class_preset(named)) if found), None), fields


def model_of_name(base: str) -> str | None:
    """The preset that the name of a recipe's function begins with."""
    return preset_of(re.split(r"_(?:pretrain|sft|peft|finetune|config|base)", re.sub("llama3[12]", "llama3", base))[0])


def changed(path: str, preset: str, said: dict[str, Any], over: dict[str, str], sets: Sets) -> Any:
    """A preset with what the recipe sets over it, by the fields of the provider.

    Raises:
        ConfigError: a size is known only at run time, and the user sets none.
    """
    changes: dict[str, Any] = {}
    for key, field in over.items():
        if isinstance(value := said.get(key), Computed) and told(sets, "model") is told(sets, f"model.{field}") is None:
            raise ConfigError(f"{path}: {key} is computed ({value.code}); add --set model.{field}=N")
        if value is not None and not isinstance(value, Computed):
            changes[field] = value
    return {"preset": preset} | changes if changes else preset
