"""Python names and calls: where a name is imported from, which parameter an argument sets, mappings unpacked with `**`."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from steptime.launch.python.config_values import CLASS, Computed, dotted


def bound(
    function: ast.FunctionDef, defaults: Mapping[str, Any], args: Sequence[Any], keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """Parameter -> value; one that is not given and has no default is `Computed`, and `**name` holds what no other takes."""
    takes = function.args
    places = [item.arg for item in [*takes.posonlyargs, *takes.args]]
    names: dict[str, Any] = {
        item.arg: Computed(function.lineno, item.arg) for item in [*takes.posonlyargs, *takes.args, *takes.kwonlyargs]
    }
    own = {key: value for key, value in keywords.items() if key in names or takes.kwarg is None}
    names |= dict(defaults) | dict(zip(places, args, strict=False)) | own
    if takes.kwarg is not None:
        names[takes.kwarg.arg] = {key: value for key, value in keywords.items() if key not in own}
    return names


def called_in(node: ast.Call, names: Mapping[str, Any]) -> str:
    """The dotted name of what is called, or the class that it is a variable of: `provider_class()`; "" where it has none."""
    called = ".".join(dotted(node.func))
    value = names.get(called)
    return value.code if isinstance(value, Computed) and re.fullmatch(_CALLABLE, value.code) else called


_CALLABLE = r"[A-Z]\w+|\w+_(?:config|recipe)"
"""Names of classes, and of functions that return configs, which a variable may hold."""
_MODULE = "importlib.import_module"


def calling(node: ast.Call, function: Any) -> ast.Call:
    """A call of a function that another call returns: by its name, where that is known."""
    known = isinstance(function, Computed) and function.code.isidentifier()
    func = ast.copy_location(ast.Name(function.code), node) if known else node.func
    return ast.copy_location(ast.Call(func=func, args=node.args, keywords=node.keywords), node)


def of_module(called: str, node: ast.Call, args: Sequence[Any], imports: Imports) -> Computed | None:
    """The function `getattr(module, "name")` by its name, which becomes one that the module imports; None of other objects.

    The module is imported by `from a import b`, or is what importlib.import_module("a.b") returns.
    """
    owner, name = args[:2]
    first = node.args[0]
    module = ""
    if isinstance(owner, dict) and owner.get(CLASS) == _MODULE:
        module = str(*owner.get("_args_", [])[:1]).replace(".", "/")
    elif isinstance(first, ast.Name) and first.id in imports:
        file, own = imports[first.id]
        module = f"{file.removesuffix('.py')}/{own}"
    if called != "getattr" or not module or not isinstance(name, str) or not name.isidentifier():
        return None
    imports[name] = (f"{module}.py", name)
    return Computed(node.lineno, name)


def default_nodes(function: ast.FunctionDef) -> list[tuple[str, ast.expr]]:
    """The parameters of a function that have defaults, with the expressions of these."""
    takes = function.args
    places = [item.arg for item in [*takes.posonlyargs, *takes.args]]
    return [
        *zip(places[len(places) - len(takes.defaults) :], takes.defaults, strict=True),
        *((item.arg, node) for item, node in zip(takes.kwonlyargs, takes.kw_defaults, strict=True) if node),
    ]


def unpacked(parts: Sequence[tuple[str | None, Any]]) -> dict[str, Any] | None:
    """The mapping of `{"a": 1, **rest}` or `f(a=1, **rest)`, later values over earlier ones; None where a `rest` is not known."""
    found: dict[str, Any] = {}
    for key, value in parts:
        if key is not None:
            found[key] = value
        elif isinstance(value, dict) and CLASS not in value:
            found |= value
        else:
            return None
    return found


Imports = dict[str, tuple[str, str]]


def imported(module: ast.Module) -> Imports:
    """The names that a module imports from others: the file of that module, and the name in it."""
    return {
        alias.asname or alias.name: (f"{node.module.replace('.', '/')}.py", alias.name)
        for node in module.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def origin(name: str, imports: Imports) -> tuple[str, str] | None:
    """The file that defines an imported name and the name in it; `module.name` of an imported module too.

    >>> origin("llama3_8b.model", {"llama3_8b": ("recipes.py", "llama3_8b")})
    ('recipes/llama3_8b.py', 'model')
    """
    first, _, inner = name.partition(".")
    if first not in imports:
        return None
    file, own = imports[first]
    return (f"{file.removesuffix('.py')}/{own}.py", inner) if inner else (file, own)
