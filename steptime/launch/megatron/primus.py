"""Primus: Megatron-LM's arguments in YAML."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from steptime.base.config import ConfigError, show
from steptime.base.document import parse_mapping
from steptime.launch.keys import flatten
from steptime.launch.megatron.sources import from_arguments
from steptime.launch.named_models import preset_of
from steptime.launch.reading import Reading


def read_primus(path: str, text: str, env: Mapping[str, str] | None, sets: Mapping[str, Any] | None) -> Reading:
    """Megatron-LM's arguments under modules.pre_trainer.overrides, and a model by the name of its file."""
    tree = parse_mapping(re.sub(r"\$\{(\w+):([^}]*)\}", lambda found: (env or {}).get(found[1], found[2]), text), path)
    modules = tree.get("modules")
    trainer = modules.get("pre_trainer") if isinstance(modules, dict) else None
    if not isinstance(trainer, dict):
        raise ConfigError(f"{path}: modules.pre_trainer is missing; not a Primus training")
    overrides = trainer.get("overrides") or {}
    if not isinstance(overrides, dict):
        raise ConfigError(f"{path}: modules.pre_trainer.overrides: expected a mapping (got {show(overrides)})")
    if trainer.get("framework", "megatron") != "megatron":
        raise ConfigError(f"{path}: modules.pre_trainer.framework {trainer['framework']}: only megatron's is read")
    preset = preset_of(str(trainer.get("model", "")).removesuffix(".yaml"))
    said = {key: str(value) for key, value in flatten(overrides).items() if value is not None}
    model = {"model": preset} if preset and "num_layers" not in said else {}
    return from_arguments(said, path, sets=model | dict(sets or {}), table="primus")
