"""Operators of Python on known values; what would grow without bound is not worked out."""

from __future__ import annotations

import ast
import operator
from typing import Any

from steptime.launch.python.config_values import CLASS, Computed

_OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.USub: operator.neg, ast.Not: operator.not_,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
MOST_ITEMS = 100_000
"""Of a list or characters of a text; also bits of an integer."""


def operated(node: ast.expr, parts: list[Any]) -> Any:
    """One operator on values; powers are excluded, and what grows beyond `MOST_ITEMS`, so that no value grows without bound.

    Raises:
        KeyError: an operator that is not read.
        ValueError: a value larger than any job's.
    """
    if isinstance(node, ast.Compare | ast.Subscript) and any(map(_is_deep, parts)):
        raise ValueError
    if isinstance(node, ast.Subscript) or any(isinstance(part, dict) for part in parts):
        return _of_mapping(node, parts)
    sized = (part for part in parts if isinstance(part, int | str | list))
    if sum(part.bit_length() if isinstance(part, int) else len(part) for part in sized) > MOST_ITEMS:
        raise ValueError
    if isinstance(node, ast.JoinedStr) and all(type(part) in {str, int} for part in parts):
        return "".join(map(str, parts))
    if isinstance(node, ast.BoolOp):
        found = parts[0]
        for part in parts[1:]:
            found = (found and part) if isinstance(node.op, ast.And) else (found or part)
        return found
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _OPERATORS[type(node.ops[0])](*parts)
    if isinstance(node, ast.UnaryOp | ast.BinOp):
        numbers = all(isinstance(part, int | float) for part in parts)
        if isinstance(node.op, ast.Mult) and not numbers and not _is_repeated(parts):
            raise ValueError
        return _OPERATORS[type(node.op)](*parts)
    raise KeyError


def _of_mapping(node: ast.expr, parts: list[Any]) -> Any:
    """An item of a mapping or a list, or whether a mapping has a key.

    Raises:
        KeyError: an object, another operator, or no such item.
    """
    if not isinstance(node, ast.Subscript | ast.Compare) or len(parts) != 2:
        raise KeyError
    owner, key = parts if isinstance(node, ast.Subscript) else reversed(parts)
    if isinstance(owner, list) and type(key) is int and -len(owner) <= key < len(owner):
        return owner[key]
    if not isinstance(owner, dict) or CLASS in owner:
        raise KeyError
    items, key = {key_text(name): value for name, value in owner.items()}, key_text(key)
    if isinstance(node, ast.Compare):
        return {ast.In: key in items, ast.NotIn: key not in items}[type(node.ops[0])]
    return items[key]


def bounded(value: Any) -> Any:
    """A config without lists that hold themselves, or more than `MOST_ITEMS` with the lists in them: `Computed`.

    Raises:
        RecursionError: a config that holds itself.
    """
    if isinstance(value, dict):
        return {key: bounded(item) for key, item in value.items()}
    rest, seen = ([value], 0) if isinstance(value, list) else ([], 0)
    while rest and seen <= MOST_ITEMS:
        items = rest.pop()
        seen += len(items)
        rest += [item for item in items if isinstance(item, list)]
    return Computed(0, "a list longer than any job's") if rest else value


def key_text(key: Any) -> str:
    """A key of a mapping as text; a tuple of known values is a list."""
    return str([*key] if isinstance(key, tuple) else key)


def _is_deep(part: Any) -> bool:
    """Whether lists are more than two deep; comparing such, which may share their items, has no bound."""
    inner = [item for item in part if isinstance(item, list)] if isinstance(part, list) else []
    return any(isinstance(item, list) for items in inner for item in items)


def _is_repeated(parts: list[Any]) -> bool:
    """Whether a list, of at most lists of plain values, is repeated to no more than `MOST_ITEMS`."""
    lists = [part for part in parts if isinstance(part, list)]
    times = [part for part in parts if type(part) is int]
    inner = [item for part in lists for item in part if isinstance(item, list)]
    sizes = [len(part) for part in (*lists, *inner)]
    return len(lists) == len(times) == 1 and not any(map(_is_deep, lists)) and sum(sizes) * times[0] <= MOST_ITEMS
