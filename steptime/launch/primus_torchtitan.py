"""Primus over torchtitan: its YAML as torchtitan's TOML, with the defaults and the model's file of Primus.

Source: AMD-AGI/Primus@fd1eeabb primus/configs/modules/torchtitan/pre_trainer.yaml (the defaults),
primus/configs/models/torchtitan/ (a model's name, flavor and converters),
primus/backends/torchtitan/models/deepseek_v3/__init__.py (the classic attention).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from steptime.base.config import ConfigError, near, show
from steptime.base.document import parse_mapping
from steptime.launch.beside import Beside
from steptime.launch.devices import told
from steptime.launch.keys import load_table
from steptime.launch.named_models import preset_of
from steptime.launch.reading import Env, Reading, Sets
from steptime.launch.torchtitan.flavors import models
from steptime.launch.torchtitan.job_config import read_torchtitan

_FLOAT8 = "-fp8"
"""The end of a model's file that adds torchao's float8 to the one without it."""


def read_over_torchtitan(
    path: str, overrides: Mapping[str, Any], name: str, env: Env, sets: Sets, beside: Beside | None
) -> Reading:
    """The job of `overrides`, which hold sections of torchtitan's config, with the model's file `name`.

    Raises:
        ConfigError: as `read_torchtitan`, or an unknown model.
    """
    table = load_table("primus").raw
    tree: dict[str, Any] = {key: dict(section) for key, section in overrides.items() if isinstance(section, dict)}
    older = "batch_size" in tree.get("training", {})
    for key, value in table["older_torchtitan" if older else "torchtitan"].items():
        section, _, word = key.partition(".")
        tree[section] = {word: value} | tree.get(section, {})
    said = _model_file(path, name, table, sets, beside) | tree.get("model", {})
    model = _model(said, tree["primus_turbo"], name, table)
    shown = {"name", "flavor"} if model is None and "name" in said else set()
    tree["model"] = {key: said[key] for key in (*sorted(shown), "converters") if said.get(key)}
    return read_torchtitan(path, _toml(tree), env, ({} if model is None else {"model": model}) | dict(sets or {}))


def _model_file(path: str, name: str, table: Mapping[str, Any], sets: Sets, beside: Beside | None) -> dict[str, Any]:
    """The section `model` of the model's file, without the converter that stands for Primus-Turbo.

    Raises:
        ConfigError: the file is not in the repository of the job, and its name is not a known one.
    """
    text = beside.text(f"primus/configs/models/torchtitan/{name}.yaml") if beside else None
    bare = name.removesuffix(_FLOAT8)
    known: dict[str, list[str]] = table["torchtitan_models"]
    if text is not None:
        found = dict(parse_mapping(text, f"{name}.yaml").get("model") or {})
    elif bare in known:
        family, flavor = known[bare]
        found = {"name": family, "flavor": flavor, "converters": ["quantize.linear.float8"] if bare != name else []}
    elif preset_of(bare) or told(sets, "model") is not None:
        found = {}
    else:
        raise ConfigError(
            f"{path}: modules.pre_trainer.model: not among the models of Primus (got {show(name)})"
            f"{near(bare, known)}; or add --set model=NAME"
        )
    return found | {"converters": [word for word in found.get("converters") or [] if word != "primus_turbo"]}


def _model(said: Mapping[str, Any], turbo: Mapping[str, Any], name: str, table: Mapping[str, Any]) -> Any:
    """The model section of a plan where the flavor is not torchtitan's own: a preset, or another attention; else None."""
    classic = table["classic_attention"].get(str(said.get("flavor")))
    switched = turbo.get("enable_primus_turbo") and turbo.get("use_classic_attention")
    if classic and switched and said.get("name") == "deepseek_v3":
        return dict(models()["deepseek_v3"][said["flavor"]]) | classic | {"attention": {"kind": "gqa"}}
    return preset_of(name.removesuffix(_FLOAT8))


def _toml(tree: Mapping[str, Any]) -> str:
    """A tree as TOML, whose scalars and lists are JSON's; what has no value is left out."""
    return "".join(_lines(tree, ""))


def _lines(tree: Mapping[str, Any], above: str) -> list[str]:
    found = []
    for key, value in tree.items():
        dotted = above + json.dumps(str(key))
        if isinstance(value, dict):
            found += _lines(value, f"{dotted}.")
        elif value is not None:
            found.append(f"{dotted} = {json.dumps(value)}\n")
    return found
