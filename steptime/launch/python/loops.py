"""The rounds of a loop in a config function: over known items, or over the layers of a config, which are alike."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from steptime.launch.python.config_values import CLASS, Computed, dotted, failed
from steptime.launch.python.operators import MOST_ITEMS

Value = Callable[[ast.expr], Any]


def items_of(node: ast.expr, value: Value) -> list[Any] | None:
    """What a loop runs over: a list, range(), enumerate(), zip() or the items() of a mapping; None where it is not known."""
    called = dotted(node.func) if isinstance(node, ast.Call) else []
    if isinstance(node, ast.Call) and called == ["range"]:
        ends = [value(item) for item in node.args]
        known = 0 < len(ends) <= 3 and all(type(end) is int for end in ends) and ends[2:] != [0]
        return list(range(*ends)) if known and len(range(*ends)) <= MOST_ITEMS else None
    if isinstance(node, ast.Call) and called in (["enumerate"], ["zip"]):
        each = [found for item in node.args if (found := items_of(item, value)) is not None]
        if len(each) < len(node.args) or (called == ["enumerate"] and (len(each) != 1 or node.keywords)):
            return None
        pairs = enumerate(each[0]) if called == ["enumerate"] else zip(*each, strict=False)
        return [list(item) for item in pairs]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "items":
        owner = value(node.func.value)
        return [list(item) for item in owner.items()] if isinstance(owner, dict) and CLASS not in owner else None
    found = value(node)
    return list(found) if type(found) in {list, tuple} else None


def rounds(path: str, node: ast.For, names: Mapping[str, Any], value: Value) -> list[tuple[Any, list[ast.stmt]]]:
    """Each item with the body to run.

    An item that is a part of a config (`config.layers`, `(config.a, config.b)`, layers that a call makes) stands in the body in
    place of the name.

    Raises:
        ConfigError: what it runs over is neither.
    """
    items = items_of(node.iter, value)
    if items is not None and not any(isinstance(item, Computed) for item in items):
        return [(item, node.body) for item in items]
    parts = node.iter.elts if isinstance(node.iter, ast.Tuple | ast.List) else [node.iter]
    paths = [dotted(part) for part in parts]
    if not isinstance(node.target, ast.Name) or not all(_is_part(path, names) for path in paths):
        raise failed(path, node, "cannot be evaluated statically")
    return [(None, [_In(node.target.id, part).visit(deepcopy(each)) for each in node.body]) for part in parts]


def _is_part(path: list[str], names: Mapping[str, Any]) -> bool:
    """Whether a dotted name is a config, or inside one."""
    owner = names.get(path[0]) if path else None
    return isinstance(owner, dict) and (len(path) > 1 or CLASS in owner)


class _In(ast.NodeTransformer):
    """A name's uses with an expression in its place."""

    def __init__(self, name: str, part: ast.expr) -> None:
        self.name, self.part = name, part

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """The expression for the name itself."""
        return self.part if node.id == self.name else node
