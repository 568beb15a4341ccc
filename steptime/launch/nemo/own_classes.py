"""Classes of a model's config that a program of NeMo 2.0 defines itself, over one of NeMo's."""

from __future__ import annotations

import ast
from typing import Any

from steptime.base.config import ConfigError
from steptime.launch.config_values import dotted, syntax_of
from steptime.launch.nemo.targets import CLASS, class_of

_DEEPEST = 10


def with_own_class(path: str, text: str, tree: dict[str, Any]) -> dict[str, Any]:
    """The job with its model's config as one of the class that the program's own class derives from, and of its fields.

    Raises:
        ConfigError: a field of the class is computed.
    """
    model = tree.get("model")
    config = model.get("config") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(config, dict):
        return tree
    own = {node.name: node for node in syntax_of(text).body if isinstance(node, ast.ClassDef)}
    name, fields = class_of(config).rpartition(".")[2], dict[str, Any]()
    for _ in range(_DEEPEST):
        if name not in own or not own[name].bases:
            break
        fields = _fields_of(path, own[name]) | fields
        name = (dotted(own[name].bases[0]) or [""])[-1]
    return tree | {"model": model | {"config": fields | config | {CLASS: name}}} if fields else tree


def _fields_of(path: str, node: ast.ClassDef) -> dict[str, Any]:
    """The fields that a class sets: literals, and functions by their names."""
    found: dict[str, Any] = {}
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name) or item.value is None:
            continue
        if dotted(item.value):
            found[item.target.id] = ast.unparse(item.value)
            continue
        try:
            found[item.target.id] = ast.literal_eval(item.value)
        except ValueError:
            raise ConfigError(
                f"{path}: line {item.lineno}: {item.target.id} is computed; add --set model=NAME"
            ) from None
    return found
