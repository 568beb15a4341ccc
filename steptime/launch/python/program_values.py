"""Values that a training program takes from its arguments or its config, small expressions over them, and literal defaults."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.python.config_values import last_name, literal, options_in, syntax_of
from steptime.launch.python.operators import operated


class Argument(NamedTuple):
    """A value that a program takes from one of its own arguments."""

    name: str


class Expression(NamedTuple):
    """A test, a choice or a look-up with a default, over arguments: `not args.bf16`, `cfg.get("fp16", False)`."""

    code: str


def value_of(node: ast.expr) -> Any:
    """A literal, the argument that `args.name`, `name` or `args["name"]` is, an expression over such, or None."""
    if isinstance(node, ast.Attribute):
        return Argument(node.attr)
    if isinstance(node, ast.Name):
        return Argument(node.id)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return Argument(node.slice.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "split":
        return value_of(node.func.value)  # args.target_modules.split(",")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and value_of(node.operand) is True:
        return False
    if isinstance(node, ast.Call) and last_name(node.func) in {"is_bf16_supported", "is_bfloat16_supported"}:
        return True  # of every machine here
    found = literal(node)
    return Expression(ast.unparse(node)) if found is None and _is_read(node) else found


def _is_read(node: ast.expr) -> bool:
    """Whether a node is an expression that `solved` can read."""
    looked_up = isinstance(node, ast.Call) and last_name(node.func) == "get" and "environ" not in ast.unparse(node.func)
    return looked_up or isinstance(node, ast.BoolOp | ast.IfExp | ast.Compare | ast.UnaryOp)


def name_of(value: Any) -> str:
    """The argument that a value is, also with a default of its own; "" where it is none.

    >>> name_of(Argument("lr")), name_of(Expression("cfg.get('lr', 1)")), name_of(Expression("not args.lr"))
    ('lr', 'lr', '')
    """
    if isinstance(value, Argument):
        return value.name
    node = syntax_of(value.code).body[0] if isinstance(value, Expression) else None
    call = node.value if isinstance(node, ast.Expr) else None
    first = call.args[0] if isinstance(call, ast.Call) and call.args else None
    return str(first.value) if isinstance(first, ast.Constant) else ""


def solved(value: Any, given: Mapping[str, Any]) -> Any:
    """The literal that a value is with the given arguments; None where one of them has none.

    >>> solved(Expression("not args.bf16"), {"bf16": True}), solved(Expression("cfg.get('lora', False) and n"), {})
    (False, False)
    >>> solved(Argument("bf16"), {"bf16": True}), solved(Expression("16 if args.big else args.rank"), {"big": False})
    (True, None)
    >>> solved(Expression("args.rank > 8 and 2 * args.rank"), {"rank": 16}), solved(Expression("args.n > 8"), {})
    (32, None)
    """
    try:
        if isinstance(value, Argument):
            return given.get(value.name)
        if isinstance(value, Expression):
            (statement,) = syntax_of(value.code).body
            return _result(statement.value, given) if isinstance(statement, ast.Expr) else None
    except (KeyError, TypeError, ValueError, ArithmeticError, RecursionError):
        return None
    return value


_OF_TEXT = frozenset({"lower", "upper", "strip", "startswith", "endswith"})
"""Functions of a text that a program tests."""


def _result(node: ast.expr, given: Mapping[str, Any]) -> Any:
    """The value of a node.

    Raises:
        KeyError: it has none without a run.
    """
    if isinstance(node, ast.BoolOp):
        wanted = isinstance(node.op, ast.Or)
        for part in node.values[:-1]:
            if bool(found := _result(part, given)) is wanted:
                return found
        return _result(node.values[-1], given)
    if isinstance(node, ast.IfExp):
        return _result(node.body if _result(node.test, given) else node.orelse, given)
    if isinstance(node, ast.BinOp | ast.UnaryOp | ast.Compare):
        parts = (part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr))
        return operated(node, [_result(part, given) for part in parts])
    if isinstance(node, ast.Call) and last_name(node.func) == "get" and node.args:
        name = _result(node.args[0], {})
        return given[name] if name in given else _result(node.args[1], given) if len(node.args) > 1 else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _OF_TEXT:
        words = [_result(argument, given) for argument in node.args]
        return getattr(str(_result(node.func.value, given)), node.func.attr)(*words)
    value = value_of(node)
    if isinstance(value, Argument):
        return given[value.name]
    if isinstance(value, Expression) or (value is None and not isinstance(node, ast.Constant)):
        raise KeyError
    return value


def fulfilled(test: ast.expr, given: Mapping[str, Any]) -> bool | None:
    """Whether a test over arguments with these values is; None where one of them has none."""
    try:
        return bool(_result(test, given))
    except (KeyError, TypeError, ValueError, ArithmeticError, RecursionError):
        return None


_SWITCHES = {"store_true": False, "store_false": True}
"""Action of argparse -> its default."""


def file_of(program: str, nearby: NearbyFiles) -> str:
    """The file of a module (python -m finetune.train) in the repository or its src; else the program as it is."""
    stem = program.replace(".", "/")
    module = re.fullmatch(r"\w+(\.\w+)+", program) and not stem.endswith("/py")
    files = (f"{stem}.py", f"src/{stem}.py") if module else ()
    return next((file for file in files if nearby.text(file) is not None), program)


def defaults_in(code: str) -> dict[str, Any]:
    """Argument -> default, of `add_argument("--name", default=N)`, of switches and of the fields of dataclasses; only literals.

    A name with two defaults in one program counts as unknown. A TRL SFTConfig brings its own max_length.

    >>> defaults_in('p.add_argument("--max-seq-len", type=int, default=512)')
    {'max_seq_len': 512}
    """
    found: dict[str, list[Any]] = {}
    module = syntax_of(code)
    for node in ast.walk(module):
        for item in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                _add(found, item.target.id, _default(item.value))
    for name, said in options_in(module):
        usual = _SWITCHES.get(str(literal(said.get("action"))))
        _add(found, name, literal(said["default"]) if "default" in said else usual)
    return {name: values[0] for name, values in found.items() if len(set(map(str, values))) == 1}


def _add(found: dict[str, list[Any]], name: str, value: Any) -> None:
    if isinstance(value, str | int | float):
        found.setdefault(name, []).append(value)


def _default(value: ast.expr | None) -> Any:
    """A field's default: itself, or that of `field(default=...)`."""
    if isinstance(value, ast.Call):
        return next((literal(keyword.value) for keyword in value.keywords if keyword.arg == "default"), None)
    return literal(value)
