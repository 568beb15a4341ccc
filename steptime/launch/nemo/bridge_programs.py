"""Programs that give a config of Megatron-Bridge to pretrain(config=...) or finetune(config=...) in their main part."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, NamedTuple

from steptime.base.config import ConfigError
from steptime.launch.config_values import dotted, options_in, syntax_of
from steptime.launch.nemo.bridge_overrides import Overrides, overrides_in
from steptime.launch.nemo.nemo_programs import arguments_of, main_parts, on_which, sets_part, with_function

_STARTS = {"pretrain", "finetune"}
"""src/megatron/bridge/training/pretrain.py and finetune.py."""
_READS = {
    "print", "len", "str", "repr", "hasattr", "getattr", "isinstance", "info", "debug", "warning", "to_yaml", "print_yaml",
}  # fmt: skip
"""Calls that change no config."""
_SECTION = 2
"""Names in the path of a section: `config.model`."""


class BridgeProgram(NamedTuple):
    """A program that starts with a config."""

    text: str
    """The program with one function more, which returns that config before it is overridden."""
    overrides: Overrides | None


def as_bridge_program(path: str, text: str, said: Mapping[str, Any]) -> BridgeProgram | None:
    """The program by what it starts with; None where it starts none.

    Of the main part only the statements on which the config depends are kept. `said`: the arguments that it is given; the others
    have their defaults.

    Raises:
        ConfigError: it sets the config in a way that is not read, such as by a file of settings.
    """
    module = syntax_of(text)
    own = {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
    for body in main_parts(module):
        found = [(node, config) for node in body if (config := _started(node))]
        if len(found) != 1:
            continue
        node, name = found[0]
        overrides, before = overrides_in(module, body[: body.index(node)])
        names = _names_of(name, before)
        set_ = on_which(names, before)
        kept = [part for part in before if part in set_ or _followed(name, part, own)]
        for part in before:
            missed = part not in kept and any(sets_part(each, part) for each in names)
            if missed or (_given_away(names, part) and not _followed(name, part, own)):
                what = f"{path}: line {part.lineno} changes the config in a way that is not read"
                raise ConfigError(f"{what}; give the log that prints the job's config")
        if overrides and (late := next((part for part in kept if part.lineno > overrides.line), None)):
            what = f"{path}: line {late.lineno} sets the config after what is put over it"
            raise ConfigError(f"{what}; give the log that prints the job's config")
        options = {option for option, _ in options_in(module)}
        given = arguments_of(module) | {key: value for key, value in said.items() if key in options}
        return BridgeProgram(with_function(text, given, kept, name), overrides)
    return None


def _started(node: ast.stmt) -> str:
    """The variable that a statement gives to the training loop as its config."""
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or dotted(call.func)[-1:] not in [[start] for start in _STARTS]:
        return ""
    given = [*call.args[:1], *(item.value for item in call.keywords if item.arg in {"config", "cfg"})]
    return given[0].id if len(given) == 1 and isinstance(given[0], ast.Name) else ""


def _names_of(name: str, body: list[ast.stmt]) -> set[str]:
    """A config's variable, and those of its sections (`model = config.model`)."""
    found = {name}
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _is_section(found, node.value):
            found.add(node.targets[0].id)
    return found


def _is_section(names: set[str], node: ast.expr) -> bool:
    """Whether an expression is a config or one of its sections, which have values under them."""
    path = dotted(node)
    return path[:1] != [] and path[0] in names and len(path) <= _SECTION


def _given_away(names: set[str], node: ast.stmt) -> bool:
    """Whether a function that may change it is given a config or a section of it."""
    calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
    return any(
        _is_section(names, item)
        for call in calls
        if (dotted(call.func) or [""])[-1] not in _READS
        for item in _arguments(call)
    )


def _followed(name: str, node: ast.stmt, own: set[str]) -> bool:
    """Whether a statement only calls a function of the module with the whole config, which can be followed into it."""
    call = node.value if isinstance(node, ast.Expr | ast.Assign) else None
    if not isinstance(call, ast.Call) or (dotted(call.func) or [""])[-1] not in own:
        return False
    return [dotted(item) for item in _arguments(call) if _is_section({name}, item)] == [[name]]


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]
