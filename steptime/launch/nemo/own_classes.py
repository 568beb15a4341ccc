"""Classes of a model's config that a program of NeMo 2.0 defines itself, over one of NeMo's."""

from __future__ import annotations

import ast
from typing import Any

from steptime.base.config import ConfigError
from steptime.launch.config_values import dotted, syntax_of
from steptime.launch.devices import told
from steptime.launch.nemo.targets import CLASS, class_of
from steptime.launch.reading import Sets

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
        name = (dotted(own[name].bases[0]) or [""])[-1]
    return tree | {"model": model | {"config": fields | config | {CLASS: name}}}


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
    return found if any((dotted(item) or [""])[-1] == "dataclass" for item in decorators) else {}


def _computed(path: str, node: ast.stmt, what: str) -> ConfigError:
    return ConfigError(f"{path}: line {node.lineno}: {what}; add --set model=NAME")


def _sets_fields(function: ast.FunctionDef) -> bool:
    stored = (
        item for item in ast.walk(function) if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store)
    )
    return any(isinstance(item.value, ast.Name) and item.value.id == "self" for item in stored)
