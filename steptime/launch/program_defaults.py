"""Literal defaults of a training program's own arguments, read by ast."""

from __future__ import annotations

import ast
from typing import Any

from steptime.launch.config_values import syntax_of

_SWITCHES = {"store_true": False, "store_false": True}
"""Action of argparse -> its default."""


def defaults_in(code: str) -> dict[str, Any]:
    """Argument -> default, of `add_argument("--name", default=N)`, of switches and of the fields of dataclasses; only literals.

    A name with two defaults in one program counts as unknown. A TRL SFTConfig brings its own max_length.

    >>> defaults_in('p.add_argument("--max-seq-len", type=int, default=512)')
    {'max_seq_len': 512}
    """
    found: dict[str, list[Any]] = {}
    for node in ast.walk(syntax_of(code)):
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    _add(found, item.target.id, _default(item.value))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            flags = [_literal(argument) for argument in node.args]
            name = next((flag for flag in flags if isinstance(flag, str) and flag.startswith("--")), None)
            said = {keyword.arg: _literal(keyword.value) for keyword in node.keywords}
            if name:
                default = said.get("default", _SWITCHES.get(str(said.get("action"))))
                _add(found, name.lstrip("-").replace("-", "_"), default)
    return {name: values[0] for name, values in found.items() if len(set(map(str, values))) == 1}


def _add(found: dict[str, list[Any]], name: str, value: Any) -> None:
    if isinstance(value, str | int | float):
        found.setdefault(name, []).append(value)


def _default(value: ast.expr | None) -> Any:
    """A field's default: itself, or that of `field(default=...)`."""
    if isinstance(value, ast.Call):
        return next((_literal(keyword.value) for keyword in value.keywords if keyword.arg == "default"), None)
    return _literal(value)


def _literal(node: ast.expr | None) -> Any:
    try:
        return None if node is None else ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
