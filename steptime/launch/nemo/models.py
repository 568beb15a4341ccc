"""The model of a config of NeMo 2.0 or Megatron-Bridge: by its class, its provider, a recipe's name, and what is set over it."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from steptime.base.config import ConfigError, build, show
from steptime.job.edit import read_model
from steptime.launch.devices import told
from steptime.launch.keys import KeyTable, rule_of, spelled, table_file
from steptime.launch.named_models import preset_of
from steptime.launch.nemo.bridge_table import RECIPES
from steptime.launch.nemo.targets import CLASS as TARGET
from steptime.launch.nemo.targets import class_of
from steptime.launch.python.config_values import CLASS, Computed, dotted, last_name, syntax_of
from steptime.launch.reading import Sets
from steptime.model.model import Model


@cache
def classes(part: str = "classes") -> dict[str, dict[str, Any]]:
    """The settings that each class of a model's config makes; `part` "bases": each class without sizes."""
    raw = table_file("nemo2_models")
    return {
        name: raw["families"][fields["family"]] | {key: value for key, value in fields.items() if key != "family"}
        for name, fields in raw[part].items()
    }


def kernels(name: str) -> dict[str, Any]:
    """What a class sets of kernels, experts' dispatch and padding, of whatever size its model is; empty for an unknown one."""
    table: dict[str, dict[str, Any]] = table_file("nemo2_models")["kernels"]
    longest = max((begun for begun in table if name.startswith(begun)), key=len, default="")
    own = (classes() | classes("bases")).get(name) or table.get(longest, {})
    names = {field for fields in table.values() for field in fields}
    return {field: value for field, value in own.items() if field in names}


def class_preset(name: str) -> str | None:
    """The preset that a class of a model's config is named after: Qwen25Config7B, MixtralConfig8x7B, Qwen2Config1P5B."""
    family, _, size = name.lower().replace("_", "-").partition("config")
    family = re.sub(r"(?<=\D\d)(?=\d$)", ".", family).removesuffix("moe")
    family = family.removesuffix("2407")
    size = {"500m": "0.5b", "600m": "0.6b"}.get(size, size.replace("p", "."))
    return preset_of(f"{family}-{size}".strip("-"))


def changed(path: str, preset: str, said: dict[str, Any], section: str, sets: Sets) -> Any:
    """A preset with what the recipe sets over it, in its section of the config.

    Raises:
        ConfigError: a size is known only at run time, or the recipe makes a model of another kind, and the user sets none.
    """
    changes: dict[str, Any] = {}
    listed = build(Model, read_model(preset))
    if (file := told(sets, "model.hf")) is not None:
        return {"hf": file}
    if told(sets, "model") is not None:
        return preset
    table = table_file("nemo2_models")
    _same_kind(path, preset, listed, {key: said.get(f"{section}.{key}") for key in table["kinds"]}, section)
    for name, field in table["fields"].items():
        key = f"{section}.{name}"
        if isinstance(value := said.get(key), Computed) and told(sets, f"model.{field}") is None:
            raise ConfigError(f"{path}: {key} is computed ({value.code}); add --set model.{field}=N")
        if value is None or isinstance(value, Computed):
            continue
        part, _, last = field.rpartition(".")
        if part:
            changes[part] = changes.get(part, getattr(listed, part).model_dump(exclude_unset=True)) | {last: value}
        else:
            changes[field] = value
    return {"preset": preset} | changes if changes else preset


def _same_kind(path: str, preset: str, listed: Model, said: dict[str, Any], section: str) -> None:
    """Refuse fields that say more than other sizes of a preset's kind of model."""
    for name, value in said.items():
        if value is None or isinstance(value, Computed) or _as_listed(name, value, listed):
            continue
        what = f"{section}.{name}: another kind of model than {preset} (got {show(value)})"
        raise ConfigError(f"{path}: {what}; add --set model=NAME, or --set model.hf=CONFIG.json")


def _as_listed(name: str, value: Any, listed: Model) -> bool:
    """Whether a field is as the preset has it."""
    if name == "moe_layer_freq":  # a list has 0 for a dense layer (megatron/core/models/gpt/gpt_layer_specs.py)
        dense = value.count(0) if isinstance(value, list) else 0 if value == 1 else None
        return bool(dense == (listed.moe.n_dense_layers if listed.moe else 0))
    own: Any = listed
    for part in table_file("nemo2_models")["kinds"][name].split("."):
        own = getattr(own, part, None)
    if name == "multi_latent_attention":
        return bool(value) == bool(own == "mla")
    return bool(str(value).lower() == str(own).lower() if isinstance(own, str | bool) else bool(value) == bool(own))


_DEEPEST = 10


def with_own_class(path: str, text: str, tree: dict[str, Any], sets: Sets) -> dict[str, Any]:
    """The job with its model's config as one of the class that the program's own class derives from, and of its fields.

    Raises:
        ConfigError: a field of the class is computed, and the user gives no model.
    """
    model = tree.get("model")
    config = model.get("config") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(config, dict) or told(sets, "model") is not None:
        return tree
    own = {node.name: node for node in syntax_of(text).body if isinstance(node, ast.ClassDef)}
    name, fields = class_of(config).rpartition(".")[2], dict[str, Any]()
    if name not in own:
        return tree
    for _ in range(_DEEPEST):
        if name not in own or not own[name].bases:
            break
        fields = _fields_of(path, own[name]) | fields
        name = last_name(own[name].bases[0])
    return tree | {"model": model | {"config": fields | config | {TARGET: name}}}


def _fields_of(path: str, node: ast.ClassDef) -> dict[str, Any]:
    """The fields that a dataclass sets: literals, and functions by their names; a class that is none has those of its base."""
    found: dict[str, Any] = {}
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name in {"__init__", "__post_init__"} and _sets_fields(item):
            raise _computed(path, item, f"{item.name} sets fields")
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name) or item.value is None:
            continue
        if dotted(item.value):
            found[item.target.id] = ast.unparse(item.value)
            continue
        try:
            found[item.target.id] = ast.literal_eval(item.value)
        except ValueError:
            raise _computed(path, item, f"{item.target.id} is computed") from None
    decorators = [item.func if isinstance(item, ast.Call) else item for item in node.decorator_list]
    return found if "dataclass" in map(last_name, decorators) else {}


def _computed(path: str, node: ast.stmt, what: str) -> ConfigError:
    return ConfigError(f"{path}: line {node.lineno}: {what}; add --set model=NAME")


def _sets_fields(function: ast.FunctionDef) -> bool:
    stored = (
        item for item in ast.walk(function) if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store)
    )
    return any(isinstance(item.value, ast.Name) and item.value.id == "self" for item in stored)


def model_of(section: Any) -> tuple[str | None, dict[str, Any]]:
    """The preset of a model from the repository of its provider, or what the provider's class sets (GPTProvider175B)."""
    if not isinstance(section, dict):
        return None, {}
    given = [name for name in section.get("_args_", []) if isinstance(name, str)]
    provider = str(section.get(CLASS)).rpartition(".")[2]
    named = re.sub(r"(?:Model)?Provider$", "", re.sub(r"(?:Model)?Provider(?=\d)|Model(?=\d)", "Config", provider))
    # qwen_provider.py: heads as Hugging Face's models have them, unlike NeMo 2's classes
    sizes = (
        {} if named.startswith("Qwen2") else classes().get(named) or table_file(RECIPES)["providers"].get(provider, {})
    )
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
    left = {key: plan for key, plan in asked.items() if told(sets, plan) is None}
    if lines := [f"{path}: {key} is computed ({unread[key].code}); add --set {plan}=N" for key, plan in left.items()]:
        raise ConfigError(lines)
