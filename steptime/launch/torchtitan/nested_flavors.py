"""Flavors of Llama in the registry of a fork, as releases since 2026 write them: `Llama3Model.Config(...)` of nested configs.

Source: pytorch/torchtitan torchtitan/models/llama3/__init__.py (llama3_configs) and models/common (compute_ffn_hidden_dim).
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from steptime.launch.config_values import syntax_of

_SIZES = frozenset({"dim", "n_layers", "vocab_size", "n_heads", "n_kv_heads", "hidden_dim", "head_dim"})
_TIES = "enable_weight_tying"
_WITHIN = frozenset({"layer", "layers", "attention", "feed_forward"})
"""Arguments whose own arguments are sizes."""
_OTHER = frozenset(
    {"rope", "norm", "tok_embeddings", "output", "attention_norm", "ffn_norm", "attn_backend", "rope_backend"}
)
_OTHER |= {"lm_head", "mask_type", "attn_mask_type", "fuse_qkv", "max_seq_len"}
"""Arguments that follow from the sizes, or change none."""
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
}
Values = dict[str, Any]


def nested_sizes(code: str, flavor: str, *, ties: bool = False) -> Values | None:
    """The sizes of a flavor by torchtitan's names, multiple_of and ffn_dim_multiplier too; None where not all are literal.

    `ties`: the family's configs have enable_weight_tying, which is then given too.

    >>> nested_sizes('c = {"1B": Model.Config(dim=64, n_layers=2, attention=A.Config(n_heads=4))}', "1B")
    {'dim': 64, 'n_layers': 2, 'n_heads': 4}
    """
    tree = syntax_of(code)
    pairs = [
        (key.value, value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant)
    ]
    said = next((value for name, value in pairs if name == flavor), None)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    known: Values = {}
    named = said.func if isinstance(said, ast.Call) and not said.args and not said.keywords else said
    for _ in range(_DEPTH):  # a function that returns what another one returns with other arguments
        if not isinstance(named, ast.Name) or (function := functions.get(named.id)) is None:
            break
        given = said.keywords if isinstance(said, ast.Call) else []
        known = _assigned(function, {item.arg or "": _number(item.value, known) for item in given})
        said = next((node.value for node in function.body if isinstance(node, ast.Return)), None)
        named = said.func if isinstance(said, ast.Call) and not said.args else None
    if not isinstance(said, ast.Call) or getattr(said.func, "attr", "") != "Config":
        return None
    found: Values = {}
    return found if _gather(said, known, found, _SIZES | {_TIES} if ties else _SIZES) else None


_DEPTH = 3
"""Functions that are followed one inside another."""


def _assigned(function: ast.FunctionDef, given: Values) -> Values:
    """Literal variables of a function, and the arguments that it is given."""
    found: Values = dict(given)
    for node in function.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = _number(node.value, found)
    return found


def _gather(call: ast.Call, known: Values, found: Values, sizes: frozenset[str]) -> bool:
    """Add the sizes of a config and of the configs in it; whether all of its arguments are known."""
    for keyword in call.keywords:
        name, value = keyword.arg or "", keyword.value
        if name in _WITHIN:
            if not isinstance(value, ast.Call) or not _gather(value, known, found, sizes):
                return False
        elif name == "hidden_dim" and getattr(getattr(value, "func", None), "id", "") == "compute_ffn_hidden_dim":
            parts = {part.arg or "": _number(part.value, known) for part in getattr(value, "keywords", [])}
            if None in parts.values() or not parts.keys() <= {"multiple_of", "ffn_dim_multiplier"}:
                return False
            found |= parts
        elif name in sizes:
            if (number := _number(value, known)) is None or found.get(name, number) != number:
                return False
            found[name] = number
        elif name not in _OTHER:
            return False
    return True


def _number(node: ast.expr, known: Values) -> Any:
    """A number, a variable of one, or simple arithmetic of both; None otherwise."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.BinOp) and (applied := _ARITHMETIC.get(type(node.op))) is not None:
        left, right = _number(node.left, known), _number(node.right, known)
        return applied(left, right) if left is not None and right else None
    return None
