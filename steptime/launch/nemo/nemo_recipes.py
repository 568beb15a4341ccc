"""NeMo 2.0's own recipes by their names, and what a program or a command line sets over one."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from typing import Any

from steptime.base.config import ConfigError, near
from steptime.base.document import parse_mapping, read_source, scalar
from steptime.job.edit import put
from steptime.launch.config_values import syntax_of
from steptime.launch.keys import FOLDER
from steptime.launch.nemo.targets import CLASS

BASE = re.compile(r"(?:^|\.)(\w+)\.(pretrain|finetune)_recipe$")
"""A call of a recipe, as programs write it: llm.llama3_8b.pretrain_recipe; its model, and what it does."""
_TUNED = ("performance_mode", "packed_sequence")
"""Arguments with which recipes have settings that the table does not have."""


@cache
def _table() -> dict[str, Any]:
    return parse_mapping(*read_source(FOLDER / "nemo2_recipes.yaml"))


def of_first_releases(text: str) -> str:
    r"""A recipe with run.Config and run.Partial for those of the first releases' own llm/utils.py; not for a class of the file.

    >>> of_first_releases("class Config:\n    x = Partial(f)")
    'class Config:\n    x = run.Partial(f)'
    """
    named = [name for name in ("Config", "Partial") if not re.search(rf"(?m)^\s*class {name}\b", text)]
    return re.sub(rf"(?<![\w.])({'|'.join(named)})(?=[\[(:])", r"run.\1", text) if named else text


def base_function(text: str) -> str:
    """The one function of a program that returns what a recipe makes; "" where there is none, or several."""
    functions = [node for node in syntax_of(text).body if isinstance(node, ast.FunctionDef)]
    found = [
        function.name
        for function in functions
        if re.search(r"\.(?:pretrain|finetune)_recipe\b", ast.unparse(function))
        and isinstance(function.body[-1], ast.Return)
    ]
    return found[0] if len(found) == 1 else ""


_ARGUMENTS = {
    "num_nodes": "trainer.num_nodes", "num_gpus_per_node": "trainer.devices", "seq_length": "data.seq_length",
}  # fmt: skip
"""Arguments of recipes -> what they set."""


def over_recipe(path: str, name: str, said: Mapping[str, Any], kind: str = "pretrain") -> dict[str, Any]:
    """A recipe's config with its arguments and the sections set over it.

    Raises:
        ConfigError: the recipe is not known, or has settings for performance, or adapters, that are not.
    """
    table = _table()
    recipes = table["recipes"] if kind == "pretrain" else table["finetune"]["recipes"]
    give = "give the log that prints the job's config"
    if name not in recipes:
        raise ConfigError(f"{path}: recipe {name} of {kind} is not known{near(name, recipes)}; {give}")
    if tuned := next((key for key in _TUNED if said.get(key) not in (None, False)), ""):
        raise ConfigError(f"{path}: {tuned} of recipe {name} is not known; {give}")
    tree: dict[str, Any] = deepcopy(table["all"])
    settings: dict[str, Any] = recipes[name]
    if kind == "finetune":
        tree["trainer"]["strategy"].pop("ddp")  # of which the recipe says nothing
        method = str(said.get("peft_scheme", "lora")).lower()
        if method not in {"none", "lora"}:
            raise ConfigError(
                f"{path}: peft_scheme {method} of recipe {name}: adapters other than LoRA are not modeled; {give}"
            )
        own = {key: value for key, value in settings.items() if key not in {"full", "lora"}}
        settings = table["finetune"]["all"] | own | (settings.get("full" if method == "none" else method) or {})
        tree |= {"peft": {"_target_": "nemo.collections.llm.peft.LoRA"}} if method == "lora" else {}
    for key, value in settings.items():
        put(tree, table["names"][key], value)
    for argument, key in _ARGUMENTS.items():
        if said.get(argument) is not None:
            put(tree, key, said[argument])
    sections = {key: item for key, item in said.items() if key in {"trainer", "model", "data", "optim", "peft"}}
    return _merged(tree, {key: item for key, item in sections.items() if isinstance(item, dict)})


def _merged(tree: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A config with other values over its own; a section that names its class replaces the whole one."""
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(tree.get(key), dict) and CLASS not in value
        tree[key] = _merged(tree[key], value) if both else value
    return tree


def of_command_line(path: str, kind: str, flags: list[tuple[str, Any]]) -> dict[str, Any]:
    """The config of `nemo llm pretrain --factory "NAME(num_nodes=2)" trainer.devices=8 ...`; `kind`: pretrain, or finetune.

    Raises:
        ConfigError: it names no recipe that is known.
    """
    factory = str(next((value for key, value in flags if key == "factory"), ""))
    called = re.fullmatch(r"(\w+)(?:\((.*)\))?", factory, re.DOTALL)
    if called is None:
        raise ConfigError(f"{path}: nemo llm {kind} without --factory NAME; give the log that prints the job's config")
    arguments = re.findall(r"(\w+)\s*=\s*([^,]+)", called[2] or "")
    said: dict[str, Any] = {key: scalar(value.strip("'\" ")) for key, value in arguments}
    for key, value in flags:
        if "." in key:
            put(said, key, value)
    return over_recipe(path, called[1], said, kind)
