"""Values of Python expressions as far as they are known without running code: operators, dotted names, computed values."""

from __future__ import annotations

import ast
import operator
from typing import Any, NamedTuple


class Computed(NamedTuple):
    """A value that is known only by running the code."""

    line: int
    code: str


_OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.USub: operator.neg, ast.Not: operator.not_,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip


def operated(node: ast.expr, parts: list[Any]) -> Any:
    """One operator on values; powers are excluded, so that no value grows without bound.

    Raises:
        KeyError: an operator that is not read.
    """
    if isinstance(node, ast.BoolOp):
        found = parts[0]
        for part in parts[1:]:
            found = (found and part) if isinstance(node.op, ast.And) else (found or part)
        return found
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _OPERATORS[type(node.ops[0])](*parts)
    if isinstance(node, ast.UnaryOp | ast.BinOp):
        if (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Mult)
            and not all(isinstance(part, int | float) for part in parts)
        ):
            raise ValueError
        return _OPERATORS[type(node.op)](*parts)
    raise KeyError


def computed(node: ast.expr) -> Computed:
    """Mark a value as computed."""
    return Computed(node.lineno, " ".join(ast.unparse(node).split())[:60])


def dotted(node: ast.expr) -> list[str]:
    """The names of `a.b.c`; none where it is anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return [*owner, node.attr] if owner else []
    return []


def looked_up(called: str, node: ast.Call, args: list[Any]) -> Any:
    """The result of getattr, hasattr and isinstance where the config itself determines it."""
    owner, name = args[:2]
    if called == "isinstance":
        whole = not isinstance(owner, Computed) and ast.unparse(node.args[1]) == "str"
        return isinstance(owner, str) if whole else computed(node)
    if isinstance(owner, dict) and name in owner:
        return True if called == "hasattr" else owner[name]
    return computed(node)


def ends(node: ast.expr | None, words: str) -> bool:
    """Whether an annotation's name ends in `words`."""
    return node is not None and ast.unparse(node).strip("'\"").endswith(words)
