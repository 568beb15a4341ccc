"""OmegaConf's `${...}`: references to other keys, the environment, and the arithmetic that NeMo registers."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import Any

from steptime.base.document import scalar
from steptime.launch.reading import Env

_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_ROUNDS = 40
_NUMBERS: dict[str, Any] = {
    "multiply": operator.mul, "add": operator.add, "subtract": operator.sub, "divide": operator.floordiv, "div": operator.truediv,
    "int_div": operator.floordiv, "floor_div": operator.floordiv, "ceil_div": lambda a, b: -(-a // b), "gt": operator.gt,
    "lt": operator.lt, "eq": operator.eq, "neq": operator.ne, "le": operator.le, "ge": operator.ge,
}  # fmt: skip
"""Resolvers of two numbers (NeMo nemo/utils/exp_manager.py; MLPerf's train.py register more under these names)."""
_NONE = object()


def resolve(tree: dict[str, Any], env: Env = None) -> dict[str, Any]:
    """The tree with references filled in; what needs running (eval) stays as text.

    `${.x}` is a key of the same mapping, `${..x}` one of its parent; `${training.x}`, `${fine_tuning.x}` and `${peft.x}` are the
    launcher's names for `${x}` (NVIDIA/NeMo-Framework-Launcher launcher_scripts/conf); `${oc.env:NAME,default}` is a variable of
    `env`, else its default.

    >>> resolve({"a": {"b": 3, "c": "${multiply:4, ${.b}}", "d": "${oc.decode:${oc.env:TP,2}}"}, "e": "${a.c}"})
    {'a': {'b': 3, 'c': 12, 'd': 2}, 'e': 12}
    """
    return {key: _walk(value, tree, (key,), env or {}) for key, value in tree.items()}


def _walk(node: Any, tree: dict[str, Any], at: tuple[str, ...], env: Mapping[str, str]) -> Any:
    if isinstance(node, dict):
        return {key: _walk(value, tree, (*at, key), env) for key, value in node.items()}
    if isinstance(node, list):
        return [_walk(item, tree, at, env) for item in node]
    for _ in range(_ROUNDS):
        known = ((found, _value(found[1].strip(), tree, at, env)) for found in _REFERENCE.finditer(str(node)))
        known = (pair for pair in known if pair[1] is not _NONE and not isinstance(pair[1], dict | list))
        if not isinstance(node, str) or (first := next(known, None)) is None:
            return node
        found, value = first
        if found.span() == (0, len(node)):
            node = value
        else:
            node = node[: found.start()] + ("null" if value is None else str(value)) + node[found.end() :]
    return node


def _value(words: str, tree: dict[str, Any], at: tuple[str, ...], env: Mapping[str, str]) -> Any:
    """The value of one `${words}`; _NONE where it is known only at run time."""
    name, colon, rest = words.partition(":")
    if colon:
        return _resolved(name, [part.strip() for part in rest.split(",")], tree, env)
    dots = len(words) - len(words.lstrip("."))
    path = [*at[: len(at) - dots], *words[dots:].split(".")] if dots else _of_launcher(words.split("."), tree)
    found = _at(path, tree)
    return _from_top(found, path) if isinstance(found, str) else found


def _from_top(text: str, at: list[str]) -> str:
    """A text with its relative references as paths from the top: they are relative to its own key, wherever it is used.

    >>> _from_top("${data}/${.name}", ["run", "folder"])
    '${data}/${run.name}'
    """

    def absolute(found: re.Match[str]) -> str:
        dots = len(found[1]) - len(found[1].lstrip("."))
        return f"${{{'.'.join([*at[: len(at) - dots], found[1][dots:]])}}}" if dots else found[0]

    return _REFERENCE.sub(absolute, text)


def _of_launcher(path: list[str], tree: dict[str, Any]) -> list[str]:
    return path[1:] if path[0] in {"training", "fine_tuning", "peft"} and path[0] not in tree else path


def _at(path: list[str], tree: dict[str, Any]) -> Any:
    node: Any = tree
    for part in path:
        if not isinstance(node, dict) or part not in node:
            return _NONE
        node = node[part]
    return node


def _resolved(name: str, parts: list[str], tree: dict[str, Any], env: Mapping[str, str]) -> Any:
    """A resolver with its arguments, each of which is filled in already."""
    if name == "oc.env":
        return scalar(env[parts[0]]) if parts[0] in env else scalar(parts[1]) if len(parts) > 1 else _NONE
    if name == "oc.decode":
        return scalar(",".join(parts))
    if name == "oc.select":
        found = _at(parts[0].split("."), tree)
        return scalar(parts[1]) if found is _NONE and len(parts) > 1 else found
    values = [scalar(part.strip("'\"")) for part in parts]
    if name == "if" and len(values) == 3:
        return values[1] if values[0] else values[2]
    if name == "not" and len(values) == 1:
        return not values[0]
    if name in {"or", "and"}:
        return (any if name == "or" else all)(values)
    if name in {"eq", "neq"} and len(values) == 2:  # of words too, as oc.env gives them
        return (values[0] == values[1] or str(values[0]) == str(values[1])) == (name == "eq")
    if name not in _NUMBERS or len(values) != 2 or not all(isinstance(value, int | float) for value in values):
        return _NONE
    try:
        return _NUMBERS[name](*values)
    except ZeroDivisionError:
        return _NONE
