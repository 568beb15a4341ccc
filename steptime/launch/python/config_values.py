"""Values of Python expressions as far as they are known without running code: operators, dotted names, computed values."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from steptime.base.config import ConfigError

FUNCTION = "_job"
"""Name of a function that is added to a program, to be read."""
CLASS = "_class_"
"""The key under which a config object names its class; `_args_` holds its positional arguments."""


class Computed(NamedTuple):
    """A value that is known only by running the code."""

    line: int
    code: str


_DIGITS = 30
"""Longest plain value that a call is worked out of."""


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


def last_name(node: ast.AST) -> str:
    """`c` of `a.b.c` or of `c`."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


def calls_in(tree: ast.AST, *names: str) -> list[ast.Call]:
    """The calls in a program; with names, those of functions that are called so."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [call for call in calls if not names or last_name(call.func) in names]


def whole_call(node: ast.Call) -> ast.Call:
    """A call of `partial(f, a=1)(b=2)` as that of f(a=1, b=2); any other one as it is."""
    inner = node.func
    if not isinstance(inner, ast.Call) or dotted(inner.func)[-1:] != ["partial"] or not inner.args:
        return node
    args, keywords = [*inner.args[1:], *node.args], [*inner.keywords, *node.keywords]
    return ast.copy_location(ast.Call(func=inner.args[0], args=args, keywords=keywords), node)


def attribute(node: ast.Attribute, names: dict[str, Any]) -> tuple[Any] | None:
    """The value of `a.b.c` among nested configs; None where it is not known."""
    first, *path = dotted(node) or [""]
    found: Any = names.get(first)
    for part in path:
        if not isinstance(found, dict) or part not in found:
            return None
        found = found[part]
    return (found,) if path else None


def attribute_set(node: ast.Call, value: Callable[[ast.expr], Any]) -> ast.Attribute | None:
    """What `setattr(config, name, ...)` sets, where the name is known."""
    name = value(node.args[1]) if len(node.args) == 3 else None
    return ast.copy_location(ast.Attribute(node.args[0], name, ast.Store()), node) if isinstance(name, str) else None


def failed(path: str, node: ast.stmt | ast.expr, problem: str) -> ConfigError:
    """What to raise for code that cannot be followed."""
    code = " ".join(ast.unparse(node).split())
    fix = "use literal values, or give a log or TOML of the job"
    return ConfigError(f"{path}:{node.lineno}: {problem} ({code[:60]}); {fix}")


def spread(found: Any, count: int) -> list[Any]:
    """The values of several targets at once: one each, or the same for all where they are not known."""
    return [*found] if isinstance(found, list | tuple) and len(found) == count else [found] * count


def looked_up(called: str, node: ast.Call, args: list[Any]) -> Any:
    """The result of getattr, hasattr and isinstance where the config itself determines it."""
    owner, name = args[:2]
    if called == "isinstance":
        whole = not isinstance(owner, Computed) and ast.unparse(node.args[1]) == "str"
        return isinstance(owner, str) if whole else computed(node)
    if isinstance(owner, dict) and name in owner:
        return True if called == "hasattr" else owner[name]
    return computed(node)


CASTS: dict[str, Callable[..., Any] | None] = {
    "int": int, "float": float, "bool": bool, "max": max, "min": min, "round": round, "os.environ.get": None, "os.getenv": None,
}  # fmt: skip
"""Python's own functions of plain values, by name; None: of the environment, which is not known."""


def cast(called: str, node: ast.Call, args: list[Any]) -> Any:
    """The result of one of CASTS where all of its arguments are known plain values."""
    function, plain = CASTS[called], all(isinstance(item, int | float | str) for item in args)
    if function is None or not plain or any(len(str(item)) > _DIGITS for item in args):
        return computed(node)
    try:
        return function(*args)
    except (TypeError, ValueError, ArithmeticError):
        return computed(node)


def ends(node: ast.expr | None, words: str) -> bool:
    """Whether an annotation's name ends in `words`."""
    return node is not None and ast.unparse(node).strip("'\"").endswith(words)


def constants_of(module: ast.Module) -> dict[str, ast.expr]:
    """The names that a module sets, with the expressions of their last values."""
    return {
        target.id: node.value
        for node in module.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }


def options_in(module: ast.Module) -> Iterator[tuple[str, dict[str | None, ast.expr]]]:
    """The options that a program gives to argparse, by their names in its namespace, with the keywords of each."""
    for node in calls_in(module, "add_argument"):
        flags = [str(flag.value) for flag in node.args if isinstance(flag, ast.Constant)]
        if name := next((flag for flag in flags if flag.startswith("--")), "").lstrip("-").replace("-", "_"):
            yield name, {keyword.arg: keyword.value for keyword in node.keywords}


def literal(node: ast.expr | None) -> Any:
    """The value of a literal; None of any other expression."""
    try:
        return None if node is None else ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


class _Assigned(ast.NodeTransformer):
    """`x += 1` as `x = x + 1`."""

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.Assign:
        """The assignment that a statement with an operator is."""
        read = ast.parse(ast.unparse(node.target), mode="eval").body
        value = ast.BinOp(left=read, op=node.op, right=node.value)
        assignment = ast.copy_location(ast.Assign(targets=[node.target], value=value), node)
        return ast.fix_missing_locations(assignment)


def parsed(path: str, text: str) -> ast.Module:
    """The syntax of a module.

    Raises:
        ConfigError: it is not Python.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            return _Assigned().visit(ast.parse(text))  # type: ignore[no-any-return]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(f"{path}:{line or 1}: not valid Python ({getattr(error, 'msg', error)})") from None


def syntax_of(code: str) -> ast.Module:
    """The syntax of a program that is read as far as it can be: empty where it is not Python, without Python's warnings on it."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def grown(owner: dict[str, Any], path: list[str]) -> list[Any] | None:
    """The list at a path of a config, which starts empty where the config does not set it; None where it is no list."""
    for part in path[:-1]:
        inner = owner.setdefault(part, {})
        if not isinstance(inner, dict):
            return None
        owner = inner
    found = owner.setdefault(path[-1], [])
    return found if isinstance(found, list) else None


def note_call(node: ast.Call, names: dict[str, Any], under: str) -> None:
    """Record a call that is not followed in the configs that it may change, under a key of theirs."""
    given = [names.get(item.id) for item in ast.walk(node) if isinstance(item, ast.Name)]
    for found in given:
        if isinstance(found, dict):
            found.setdefault(under, []).append(" ".join(ast.unparse(node).split())[:100])


def with_function(text: str, *statements: str) -> str:
    """A program with one function more, called `FUNCTION`, of those statements."""
    inside = "\n".join(f"    {line}" for statement in statements for line in statement.splitlines())
    return f"{text}\n\ndef {FUNCTION}():\n{inside}"


def merged(base: Mapping[str, Any], over: Mapping[str, Any], whole: str = CLASS) -> dict[str, Any]:
    """A config with fields set over it; a mapping with the key `whole`, an object, takes the place of one."""
    found = dict(base)
    for key, value in over.items():
        fields = isinstance(value, Mapping) and whole not in value and isinstance(found.get(key), Mapping)
        found[key] = merged(found[key], value, whole) if fields else value
    return found


def split_path(path: str) -> tuple[str, str]:
    """The file and the function of FILE.py:FUNCTION; "" where no function is named.

    >>> split_path("a/config_registry.py:llama3_8b"), split_path("job.toml")
    (('a/config_registry.py', 'llama3_8b'), ('job.toml', ''))
    """
    file, colon, name = path.rpartition(":")
    return (file, name) if colon and file.endswith(".py") else (path, "")
