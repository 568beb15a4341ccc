"""A Python function that returns a config, read by its syntax and never run.

What can be read: calls with literal keyword arguments (a config object), functions of the same module and of modules in the same
folder, literals, arithmetic, module constants, `config.a.b = literal`, loops, an `if` whose test is known, `replace(config,
a=...)` and `return`. A computed value is `Computed`, and matters only where it is needed, as what an unread statement sets.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any, Self

from steptime.base.config import ConfigError, near
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.python import call_arguments as calls
from steptime.launch.python import config_values as values
from steptime.launch.python.config_values import CLASS, Computed, computed, dotted, failed
from steptime.launch.python.loops import items_of, rounds
from steptime.launch.python.module_names import DEEPEST, PythonModule
from steptime.launch.python.operators import MOST_ITEMS, bounded, key_text, operated

CALLED = "_called_"
"""The key under which a config lists the calls that it is given to and that are not followed."""
_MOST_STATEMENTS = 20_000
_KEPT = {"model_registry", "nvfp4_bf16_tail_fqns"}
"""Functions of torchtitan whose arguments tell what they return."""
_INERT = (ast.Import, ast.ImportFrom, ast.Assert, ast.Pass, ast.FunctionDef)
Tree = dict[str, Any]


class _RaisedError(ConfigError):
    """An exception that the code itself raises."""

    def __init__(self, path: str, node: ast.Raise) -> None:
        super().__init__(str(failed(path, node, "cannot be evaluated statically")))
        self.kind = values.last_name(getattr(node.exc, "func", node.exc or node))

    def is_caught(self, by: ast.expr | None) -> bool:
        """Whether an `except` of these names catches it, as far as names tell."""
        names = {"Exception"} if by is None else {values.last_name(part) for part in ast.walk(by)}
        return bool(names & {self.kind, "Exception", "BaseException"})


def read_function(
    path: str, text: str, name: str, returns: str, bases: str = "", nearby: NearbyFiles | None = None
) -> tuple[str, Tree]:
    """The function's own name, and the config that it returns, as nested mappings.

    `name`: the function; "" takes the only one of the file whose annotation ends in `returns`. `bases`: the pattern of functions
    whose configs, where they are not in the modules `nearby` the file, are taken as unknown objects.

    Raises:
        ConfigError: no Python, no such function, or a statement that cannot be evaluated statically.
    """
    steps = iter(range(_MOST_STATEMENTS))
    reader = _FunctionReader(path, values.parsed(path, text), nearby or NearbyFiles(), bases, steps)
    offered = [key for key, found in reader.functions.items() if values.ends(found.returns, returns)]
    if not name:
        if len(offered) != 1:
            what = "several config functions" if offered else f"no function that returns {returns}"
            ordered = sorted(offered, key=lambda key: "debug" in key)
            listed = f": {', '.join(ordered)}" if offered else ""
            raise ConfigError(f"{path}: {what}{listed}; add the function to the path: {path}:FUNCTION")
        name = offered[0]
    if (found := reader.find(name)) is None:
        raise ConfigError(f"{path}: no function {name!r}{near(name, offered or reader.functions)}")
    owner, function = found
    tree = owner.call(function, 0)
    if not isinstance(tree, dict) or CLASS not in tree:
        raise ConfigError(f"{path}:{function.lineno}: {name} does not return a config that can be read")
    return function.name, bounded(tree)


class _FunctionReader(PythonModule):
    """The functions of one module, followed; every statement that is run counts."""

    def __init__(self, path: str, module: ast.Module, nearby: NearbyFiles, bases: str, steps: Iterator[int]) -> None:
        super().__init__(path, module, nearby)
        self.bases, self.statements = bases, steps

    def of_file(self, path: str, module: ast.Module) -> Self:
        """A reader of another module."""
        return type(self)(path, module, self.nearby, self.bases, self.statements)

    def call(
        self, function: ast.FunctionDef, depth: int, args: Sequence[Any] = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        """What a function returns; an argument that is not given and has no default is `Computed`."""
        if depth > DEEPEST:
            raise ConfigError(f"{self.path}:{function.lineno}: {function.name} is recursive")
        defaults = {name: self.value(node, {}, depth + 1) for name, node in calls.default_nodes(function)}
        names = calls.bound(function, defaults, args, keywords or {})
        return self.block(function.body, names, depth)[1]

    def block(self, body: Sequence[ast.stmt], names: Tree, depth: int) -> tuple[bool, Any]:
        """Run statements in order: whether one of them returns, and what."""
        for node in body:
            if next(self.statements, None) is None:
                raise failed(self.path, node, f"more than {_MOST_STATEMENTS:,} statements to follow")
            if isinstance(node, ast.Return):
                return True, self.value(node.value, names, depth) if node.value else None
            if isinstance(node, ast.If) and not isinstance(test := self.value(node.test, names, depth), Computed):
                done, found = self.block(node.body if test else node.orelse, names, depth)
                if done:
                    return True, found
            elif isinstance(node, ast.Raise):
                raise _RaisedError(self.path, node)
            elif isinstance(node, ast.Try) and len(node.handlers) == 1 and not node.finalbody:
                try:
                    done, found = self.block([*node.body, *node.orelse], names, depth)
                except _RaisedError as error:
                    if not error.is_caught(node.handlers[0].type):
                        raise
                    done, found = self.block(node.handlers[0].body, names, depth)
                if done:
                    return True, found
            else:
                self.run(node, names, depth)
        return False, None

    def run(self, node: ast.stmt, names: Tree, depth: int) -> None:
        """One statement that does not return: an assignment, a call, or one that changes no config."""
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            self.assign(node.target, self.value(node.value, names, depth), names)
        elif isinstance(node, ast.Assign):
            found = self.value(node.value, names, depth)
            for target in node.targets:
                self.assign(target, found, names)
        elif isinstance(node, ast.For):
            for item, body in rounds(self.path, node, names, lambda part: self.value(part, names, depth)):
                if body is node.body:
                    self.assign(node.target, item, names)
                if self.block(body, names, depth)[0]:
                    raise failed(self.path, node, "cannot be evaluated statically")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and self.changes(node.value):
            self.effect(node.value, names, depth)
        elif self.bases and isinstance(node, ast.If) and not any(isinstance(n, ast.Return) for n in ast.walk(node)):
            self.maybe(node, names)
        elif not isinstance(node, _INERT) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            raise failed(self.path, node, "cannot be evaluated statically")

    def maybe(self, node: ast.If, names: Tree) -> None:
        """A branch whose condition is unknown: everything it sets becomes `Computed`."""
        test = ast.unparse(node.test)  # a literal alone would be read as the value
        for inner in ast.walk(node):
            if isinstance(inner, ast.Assign):
                for target in inner.targets:
                    if len(path := dotted(target)) > 1 and path[0] not in names:
                        raise failed(self.path, node, "cannot be evaluated statically")
                    with suppress(ConfigError):  # an attribute of what it has set before
                        self.assign(target, Computed(inner.lineno, f"{ast.unparse(inner.value)} if {test}"), names)
            elif isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Call):
                values.note_call(inner.value, names, CALLED)

    def changes(self, node: ast.Call) -> bool:
        """Whether a call may change a config: a list that grows, a function that can be followed, or any of a repository's."""
        last = dotted(node.func)[-1:]
        grows = bool(self.bases) or last in (["append"], ["extend"], ["setattr"])
        return grows or self.find(".".join(dotted(node.func))) is not None

    def effect(self, node: ast.Call, names: Tree, depth: int) -> None:
        """The effect of a call: a function that changes a config, or a list that grows."""
        path = dotted(node.func)
        if path == ["setattr"] and (target := values.attribute_set(node, lambda part: self.value(part, names, depth))):
            self.assign(target, self.value(node.args[2], names, depth), names)
            return
        owner = self.value(node.func.value, names, depth) if isinstance(node.func, ast.Attribute) else None
        if isinstance(owner, Computed) and path[-1:] == ["append"] and isinstance(names.get(path[0]), dict):
            owner = values.grown(names[path[0]], path[1:-1])
        if isinstance(owner, list) and node.args and isinstance(node.func, ast.Attribute):
            given = self.value(node.args[0], names, depth)
            owner += given if node.func.attr == "extend" and isinstance(given, list) else [given]
            if len(owner) > MOST_ITEMS:
                raise failed(self.path, node, "a list longer than any job's")
            return
        with suppress(*([ConfigError] if self.bases else [])):  # followed as far as it can be
            if self.find(".".join(dotted(node.func))):
                self.value(node, names, depth)
                return
        values.note_call(node, names, CALLED)

    def assign(self, target: ast.expr, found: Any, names: Tree) -> None:
        """`name = ...`, `name.a.b = ...`, or several names at once."""
        if isinstance(target, ast.Tuple):
            for item, value in zip(target.elts, values.spread(found, len(target.elts)), strict=True):
                self.assign(item, value, names)
            return
        if isinstance(target, ast.Subscript) and isinstance(key := self.value(target.slice, names, 0), str):
            owner = self.value(target.value, names, 0)
            if isinstance(owner, dict):
                owner[key] = found
                return
        path = dotted(target)
        if not path:
            raise failed(self.path, target, "cannot be evaluated statically")
        if len(path) == 1:
            names[path[0]] = found
            return
        owner = names.get(path[0])
        for part in path[1:-1]:
            owner = owner.setdefault(part, {}) if isinstance(owner, dict) else None
        if not isinstance(owner, dict):
            raise failed(self.path, target, "sets an attribute of an object that cannot be read")
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
            if depth <= DEEPEST and (found := self.owner(node.id)) and found[1] in found[0].constants:
                return found[0].value(found[0].constants[found[1]], {}, depth + 1)
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(item, names, depth) for item in node.elts]
        if isinstance(node, ast.Attribute) and (known := values.attribute(node, names)) is not None:
            return known[0]
        if isinstance(node, ast.Call):
            return self.config(values.whole_call(node), names, depth)
        return self.worked_out(node, names, depth)

    def worked_out(self, node: ast.expr, names: Tree, depth: int) -> Any:
        """Arithmetic, comparisons, `and` and `or`, a conditional or a subscript of known values."""
        if isinstance(node, ast.Dict):
            keys = [None if key is None else key_text(self.value(key, names, depth)) for key in node.keys]
            found = calls.unpacked([*zip(keys, (self.value(item, names, depth) for item in node.values), strict=True)])
            return computed(node) if found is None else found
        if isinstance(node, ast.IfExp):
            test = self.value(node.test, names, depth)
            chosen = node.body if test else node.orelse
            return computed(node) if isinstance(test, Computed) else self.value(chosen, names, depth)
        if isinstance(node, ast.ListComp) and (items := self.listed(node, names, depth)) is not None:
            return items
        if isinstance(node, ast.FormattedValue) and node.conversion < 0 and node.format_spec is None:
            return self.value(node.value, names, depth)
        parts = [self.value(item, names, depth) for item in ast.iter_child_nodes(node) if isinstance(item, ast.expr)]
        if not parts or not all(isinstance(part, int | float | str | bool | list | dict | None) for part in parts):
            return computed(node)
        try:
            return operated(node, parts)
        except (TypeError, ValueError, ArithmeticError, KeyError):
            return computed(node)

    def listed(self, node: ast.ListComp, names: Tree, depth: int) -> list[Any] | None:
        """`[f(x) for x in items]`; None where it has conditions, or its items are not known."""
        (part, *more), target = node.generators, node.generators[0].target
        if more or part.ifs or not isinstance(target, ast.Name):
            return None
        items = items_of(part.iter, lambda inner: self.value(inner, names, depth))
        return None if items is None else [self.value(node.elt, names | {target.id: item}, depth) for item in items]

    def config(self, node: ast.Call, names: Tree, depth: int) -> Any:
        """A call: a function of the module, a copy with changes, or a config object."""
        if dotted(getattr(node.func, "func", node)) == ["getattr"]:  # getattr(module, "name")()
            node = calls.calling(node, self.value(node.func, names, depth))
        called = calls.called_in(node, names)
        if isinstance(node.func, ast.Attribute) and node.func.attr in {"lower", "upper"}:
            text = self.value(node.func.value, names, depth)
            return getattr(text, node.func.attr)() if isinstance(text, str) else computed(node)
        if not called and self.bases:  # a method of another call's result
            given = [item for inner in ast.walk(node) if isinstance(inner, ast.Call) for item in inner.args]
            return {CLASS: computed(node).code, "_args_": [self.value(item, names, depth) for item in given]}
        keywords = calls.unpacked([(item.arg, self.value(item.value, names, depth)) for item in node.keywords])
        if not called or keywords is None:
            return computed(node)
        args = [self.value(item, names, depth) for item in node.args]
        said = {"_args_": args} if args else {}
        if (found := self.find(called)) is not None:
            words = self.bases and args and all(isinstance(item, str) for item in args)  # enough by themselves
            with suppress(*([ConfigError] if words else [])):
                result = found[0].call(found[1], depth + 1, args, keywords)
                unknown = isinstance(result, Computed) or (isinstance(result, dict) and result.get("_args_") == [])
                if not words or not unknown:
                    return result
        owner = names.get(called.partition(".")[0]) if called.endswith("_provider") else None
        if isinstance(owner, dict):  # the model of a repository
            return {CLASS: called, "_args_": list(owner.get("_args_", [])), **keywords}
        if called in {"getattr", "hasattr", "isinstance"} and len(args) >= 2:
            return calls.of_module(called, node, args, self.imports) or values.looked_up(called, node, args)
        if called in values.CASTS and not keywords:
            return values.cast(called, node, args)
        if called == "list" and len(args) == 1 and isinstance(args[0], list) and not keywords:
            return list(args[0])
        copies = (last := called.rpartition(".")[2]) in {"replace", "deepcopy"}
        if copies and len(args) == 1 and isinstance(args[0], dict):
            return deepcopy(args[0]) | keywords
        if last == "cast" and len(args) == 2 and self.imports.get(called) == ("typing.py", "cast"):
            return args[1]
        if self.bases and re.search(self.bases, called):
            return {CLASS: called, **said, **keywords}
        if last[:1].isupper() or keywords or (self.bases and (args or last.endswith("_mixed"))) or called in _KEPT:
            return {CLASS: called, **said, **keywords}
        return computed(node)
