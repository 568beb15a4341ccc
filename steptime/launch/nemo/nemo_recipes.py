"""NeMo 2.0's own pretraining recipes by their names, and what a program or a command line sets over one."""

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
from steptime.launch.config_functions import CALLED
from steptime.launch.config_values import CLASS as CALL
from steptime.launch.config_values import Computed, syntax_of
from steptime.launch.keys import FOLDER
from steptime.launch.nemo.targets import CLASS

BASE = re.compile(r"(?:^|\.)(\w+)\.pretrain_recipe$")
"""A call of a recipe, as programs write it: llm.llama3_8b.pretrain_recipe."""
_TUNED = "performance_mode"


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
        if ".pretrain_recipe" in ast.unparse(function) and isinstance(function.body[-1], ast.Return)
    ]
    return found[0] if len(found) == 1 else ""


def by_target(node: Any) -> Any:
    """run.Config(Class, field=...) in the form of a recipe's YAML; values known only at run time are left out."""
    if isinstance(node, list):
        return [by_target(item) for item in node]
    if isinstance(node, Computed):
        mixed = re.fullmatch(r"(?:\w+\.)*(\w+_mixed)\(\)", node.code)
        if mixed and mixed[1] in _table()["mixed"]:
            return _table()["all"]["trainer"]["plugins"] | _table()["mixed"][mixed[1]]
        return node.code if re.fullmatch(r"[A-Za-z_][\w.]*", node.code) else None
    if not isinstance(node, dict):
        return node
    if re.fullmatch(r"(?:run\.)?(Config|Partial)", str(node.get(CALL))):
        args: list[Any] = [*(node.get("_args_") or []), None, None]
        config = {"config": args[1]} if isinstance(args[1], dict) else {}  # of a model: its first argument
        node = {
            CLASS: str(by_target(args[0])),
            **config,
            **{key: item for key, item in node.items() if key != "_args_"},
        }
    return {key: by_target(item) for key, item in node.items() if key not in {CALL, CALLED}}


def over_recipe(path: str, name: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's config with its arguments (num_nodes, num_gpus_per_node) and the sections set over it.

    Raises:
        ConfigError: the recipe is not known, or has settings for performance that are not.
    """
    table = _table()
    if name not in table["recipes"]:
        known = near(name, table["recipes"])
        raise ConfigError(f"{path}: recipe {name} is not known{known}; give the log that prints the job's config")
    if said.get(_TUNED) not in (None, False):
        raise ConfigError(f"{path}: {_TUNED} of recipe {name} is not known; give the log that prints the job's config")
    tree: dict[str, Any] = deepcopy(table["all"])
    for key, value in table["recipes"][name].items():
        put(tree, table["names"][key], value)
    for argument, key in (("num_nodes", "trainer.num_nodes"), ("num_gpus_per_node", "trainer.devices")):
        if said.get(argument) is not None:
            put(tree, key, said[argument])
    sections = {key: item for key, item in said.items() if key in {"trainer", "model", "data", "optim"}}
    return _merged(tree, {key: item for key, item in sections.items() if isinstance(item, dict)})


def _merged(tree: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A config with other values over its own; a section that names its class replaces the whole one."""
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(tree.get(key), dict) and CLASS not in value
        tree[key] = _merged(tree[key], value) if both else value
    return tree


def of_command_line(path: str, flags: list[tuple[str, Any]]) -> dict[str, Any]:
    """The config of `nemo llm pretrain --factory "NAME(num_nodes=2)" trainer.devices=8 ...`.

    Raises:
        ConfigError: it names no recipe that is known.
    """
    factory = str(next((value for key, value in flags if key == "factory"), ""))
    called = re.fullmatch(r"(\w+)(?:\((.*)\))?", factory, re.DOTALL)
    if called is None:
        raise ConfigError(
            f"{path}: nemo llm pretrain without --factory NAME; give the log that prints the job's config"
        )
    arguments = re.findall(r"(\w+)\s*=\s*([^,]+)", called[2] or "")
    said: dict[str, Any] = {key: scalar(value.strip("'\" ")) for key, value in arguments}
    for key, value in flags:
        if "." in key:
            put(said, key, value)
    return over_recipe(path, called[1], said)
