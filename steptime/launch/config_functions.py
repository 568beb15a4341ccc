"""A Python function that returns a config, read by its syntax and never run.

What can be read: calls with literal keyword arguments (a config object), literals, arithmetic, module constants,
`config = other()`, `config.a.b = literal`, `dataclasses.replace(config, a=...)` and `return`. A value that is computed stands
as `Computed`, and only matters where somebody needs it; a statement that could change the config unseen (a loop, an if) is an
error.
"""

from __future__ import annotations

import ast
import operator
import re
import warnings
from copy import deepcopy
from typing import Any, NamedTuple

from steptime.base.config import ConfigError, near

CLASS = "_class_"
"""The key under which a config object names its class; `_args_` holds its positional arguments."""
CALLED = "_called_"
"""The key under which a config lists the calls that it is given to."""
_DEPTH = 20
_INERT = (ast.Import, ast.ImportFrom, ast.Assert, ast.Pass, ast.FunctionDef)
Tree = dict[str, Any]


class Computed(NamedTuple):
    """A value that only running the code would tell."""

    line: int
    code: str


def split_path(path: str) -> tuple[str, str]:
    """The file and the function of FILE.py:FUNCTION; "" where no function is named.

    >>> split_path("a/config_registry.py:llama3_8b"), split_path("job.toml")
    (('a/config_registry.py', 'llama3_8b'), ('job.toml', ''))
    """
    file, colon, name = path.rpartition(":")
    return (file, name) if colon and file.endswith(".py") else (path, "")


def read_function(path: str, text: str, name: str, returns: str, bases: str = "") -> tuple[str, Tree]:
    """The function's name, and the config that it returns, as nested mappings.

    `name`: the function; "" takes the only one of the file whose annotation ends in `returns`. `bases`: the pattern of functions
    of other files whose configs are taken as objects that nothing more is known of; calls that are given one are listed under
    `_called_`.

    Raises:
        ConfigError: no Python, no such function, or a statement that cannot be evaluated statically.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            module = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(f"{path}:{line or 1}: not valid Python ({getattr(error, 'msg', error)})") from None
    reader = _FunctionReader(path, module, bases)
    offered = [key for key, found in reader.functions.items() if _ends(found.returns, returns)]
    if not name:
        if len(offered) != 1:
            what = "several config functions" if offered else f"no function that returns {returns}"
            listed = f": {', '.join(offered[:8])}" if offered else ""
            raise ConfigError(f"{path}: {what}{listed}; name one as {path}:FUNCTION")
        name = offered[0]
    if name not in reader.functions:
        raise ConfigError(f"{path}: no function {name!r}{near(name, offered or reader.functions)}")
    tree = reader.call(reader.functions[name], 0)
    if not isinstance(tree, dict) or CLASS not in tree:
        raise ConfigError(f"{path}:{reader.functions[name].lineno}: {name} returns no config that can be read")
    return name, tree


def _ends(node: ast.expr | None, words: str) -> bool:
    return node is not None and ast.unparse(node).strip("'\"").endswith(words)


class _FunctionReader:
    """The functions and constants of one module."""

    def __init__(self, path: str, module: ast.Module, bases: str = "") -> None:
        self.path, self.bases = path, bases
        self.functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
        self.constants: dict[str, ast.expr] = {
            target.id: node.value
            for node in module.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    def fail(self, node: ast.stmt | ast.expr, problem: str) -> ConfigError:
        code = " ".join(ast.unparse(node).split())
        return ConfigError(
            f"{self.path}:{node.lineno}: {problem} ({code[:60]}); use literal values, or give a log or TOML of the job"
        )

    def call(self, function: ast.FunctionDef, depth: int) -> Any:
        """What a function without required arguments returns."""
        if depth > _DEPTH:
            raise ConfigError(f"{self.path}:{function.lineno}: {function.name} calls itself")
        names: Tree = {}
        for node in function.body:
            if isinstance(node, ast.Return):
                return self.value(node.value, names, depth) if node.value else None
            self.run(node, names, depth)
        return None

    def run(self, node: ast.stmt, names: Tree, depth: int) -> None:
        """One statement: an assignment, or one that changes no config."""
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            self.assign(node.target, self.value(node.value, names, depth), names)
        elif isinstance(node, ast.Assign):
            found = self.value(node.value, names, depth)
            for target in node.targets:
                self.assign(target, found, names)
        elif self.bases and isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            given = [names.get(item.id) for item in node.value.args if isinstance(item, ast.Name)]
            for found in given:
                if isinstance(found, dict):
                    found.setdefault(CALLED, []).append(" ".join(ast.unparse(node).split())[:60])
        elif not isinstance(node, _INERT) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            raise self.fail(node, "cannot be evaluated statically")

    def assign(self, target: ast.expr, found: Any, names: Tree) -> None:
        """`name = ...` or `name.a.b = ...`."""
        path = _dotted(target)
        if not path:
            raise self.fail(target, "cannot be evaluated statically")
        if len(path) == 1:
            names[path[0]] = found
            return
        owner = names.get(path[0])
        for part in path[1:-1]:
            owner = owner.setdefault(part, {}) if isinstance(owner, dict) else None
        if not isinstance(owner, dict):
            raise self.fail(target, "sets an attribute of something that cannot be read")
        owner[path[-1]] = found

    def value(self, node: ast.expr, names: Tree, depth: int) -> Any:
        """A literal, a config object, or `Computed`."""
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, MemoryError, RecursionError):
            pass
        if isinstance(node, ast.Name):
            if node.id in names:
                return names[node.id]
            if node.id in self.constants and depth <= _DEPTH:
                return self.value(self.constants[node.id], {}, depth + 1)
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(item, names, depth) for item in node.elts]
        if isinstance(node, ast.Attribute) and (path := _dotted(node)):
            found: Any = names.get(path[0])
            for part in path[1:]:
                found = found.get(part) if isinstance(found, dict) else None
            if found is not None:
                return found
        if isinstance(node, ast.Call):
            return self.config(node, names, depth)
        return self.worked_out(node, names, depth)

    def worked_out(self, node: ast.expr, names: Tree, depth: int) -> Any:
        """Arithmetic, comparisons, `and` and `or`, a choice or a mapping of values that can be read."""
        if isinstance(node, ast.Dict):
            if any(key is None for key in node.keys):
                return _computed(node)
            keys = [self.value(key, names, depth) for key in node.keys if key is not None]
            return dict(zip(map(str, keys), (self.value(item, names, depth) for item in node.values), strict=True))
        if isinstance(node, ast.IfExp):
            test = self.value(node.test, names, depth)
            return (
                _computed(node)
                if isinstance(test, Computed)
                else self.value(node.body if test else node.orelse, names, depth)
            )
        parts = [self.value(item, names, depth) for item in ast.iter_child_nodes(node) if isinstance(item, ast.expr)]
        if not parts or not all(isinstance(part, int | float | str | bool | list | None) for part in parts):
            return _computed(node)
        try:
            return _operated(node, parts)
        except (TypeError, ValueError, ArithmeticError, KeyError):
            return _computed(node)

    def config(self, node: ast.Call, names: Tree, depth: int) -> Any:
        """A call: another function of the module, a copy with changes, or the making of a config object."""
        called = ".".join(_dotted(node.func))
        if not called or any(keyword.arg is None for keyword in node.keywords):
            return _computed(node)
        keywords = {str(item.arg): self.value(item.value, names, depth) for item in node.keywords}
        args = [self.value(item, names, depth) for item in node.args]
        if called in self.functions and not args and not keywords:
            return self.call(self.functions[called], depth + 1)
        last = called.rpartition(".")[2]
        if last in {"replace", "deepcopy"} and len(args) == 1 and isinstance(args[0], dict):
            return deepcopy(args[0]) | keywords
        if self.bases and re.search(self.bases, called) and called not in self.functions:
            return {CLASS: called}
        if last[:1].isupper() or (
            called not in self.functions and (keywords or (self.bases and args) or called == "model_registry")
        ):
            return {CLASS: called, **({"_args_": args} if args else {}), **keywords}
        return _computed(node)


_OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.USub: operator.neg, ast.Not: operator.not_,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip


def _operated(node: ast.expr, parts: list[Any]) -> Any:
    """One operator on values; a power is none, so that nothing grows without limit.

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


def _computed(node: ast.expr) -> Computed:
    return Computed(node.lineno, " ".join(ast.unparse(node).split())[:60])


def _dotted(node: ast.expr) -> list[str]:
    """The names of `a.b.c`; none where it is anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value)
        return [*owner, node.attr] if owner else []
    return []
