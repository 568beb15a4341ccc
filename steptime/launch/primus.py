"""Primus: the arguments of Megatron-LM, or the config of torchtitan, in YAML."""

from __future__ import annotations

import re
from typing import Any

from steptime.base.config import ConfigError, show
from steptime.base.document import parse_mapping
from steptime.launch.keys import flatten, load_table
from steptime.launch.megatron.sources import from_arguments
from steptime.launch.named_models import preset_of
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.primus_torchtitan import read_over_torchtitan
from steptime.launch.reading import Env, Reading, Sets


def read_primus(path: str, text: str, env: Env, sets: Sets, nearby: NearbyFiles | None = None) -> Reading:
    """The framework's settings under modules.pre_trainer.overrides, and its model's file, or the model of that name."""
    tree = parse_mapping(_filled(text, env), path)
    modules = tree.get("modules")
    trainer = modules.get("pre_trainer") if isinstance(modules, dict) else None
    if not isinstance(trainer, dict):
        raise ConfigError(f"{path}: modules.pre_trainer is missing; not a Primus training config")
    overrides = trainer.get("overrides") or {}
    if not isinstance(overrides, dict):
        raise ConfigError(f"{path}: modules.pre_trainer.overrides: expected a mapping (got {show(overrides)})")
    framework = trainer.get("framework", "megatron")
    if framework not in ("megatron", "torchtitan"):
        raise ConfigError(
            f"{path}: modules.pre_trainer.framework {framework}: only megatron's and torchtitan's are read"
        )
    name = str(trainer.get("model", "")).removesuffix(".yaml")
    if framework == "torchtitan":
        return read_over_torchtitan(path, trainer, name, env, sets, nearby)
    preset = preset_of(name)
    both = _model_file(f"{name}.yaml", env, nearby) | overrides
    said = {key: str(value) for key, value in flatten(both).items() if value is not None}
    own = load_table("primus").raw["own_models"]
    with_own = {"preset": preset} | own["with"] if re.search(own["names"], name) else preset
    model = {"model": with_own} if preset and "num_layers" not in said else {}
    return from_arguments(said, path, sets=model | dict(sets or {}), table="primus")


def _filled(text: str, env: Env) -> str:
    """The text with ${NAME:default} replaced by the variable or the default."""
    return re.sub(r"\$\{(\w+):([^}]*)\}", lambda found: (env or {}).get(found[1], found[2]), text)


def _model_file(
    name: str,
    env: Env,
    nearby: NearbyFiles | None,
    above: tuple[str, ...] = (),
    known: dict[str, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """The arguments in a model's file and in those that it extends, where they are in the repository of the job.

    The last one, language_model.yaml, has the defaults, which are in the table. `above`: the files that extend it; `known`: what
    those read so far say.

    Raises:
        ConfigError: a file that another one extends was not found, or extends itself.
    """
    file = f"primus/configs/models/megatron/{name}"
    if nearby is None or name == "language_model.yaml" or (not above and nearby.text(file) is None):
        return {}
    known = {} if known is None else known
    if name in known:
        return known[name]
    if name in above:
        raise ConfigError(f"{above[-1]}: extends: {name} extends itself")
    found = parse_mapping(_filled(nearby.needed(file, f"{(*above, name)[-2 if above else -1]}: extends"), env), name)
    below: dict[str, Any] = {}
    bases = found.pop("extends", None) or []
    for base in bases if isinstance(bases, list) else [bases]:
        if not isinstance(base, str):
            raise ConfigError(f"{name}: extends: expected names of files (got {show(base)})")
        below |= _model_file(base, env, nearby, (*above, name), known)
    known[name] = below | found
    return known[name]
