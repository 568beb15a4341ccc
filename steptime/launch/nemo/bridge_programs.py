"""Programs that give a config of Megatron-Bridge to pretrain(config=...) or finetune(config=...) in their main part."""

from __future__ import annotations

import ast

from steptime.base.config import ConfigError
from steptime.launch.config_values import dotted, syntax_of
from steptime.launch.nemo.nemo_programs import FUNCTION, arguments_of, main_parts, on_which, sets_part

_STARTS = {"pretrain", "finetune"}
"""src/megatron/bridge/training/pretrain.py and finetune.py."""
_READS = {
    "print",
    "len",
    "str",
    "repr",
    "hasattr",
    "getattr",
    "isinstance",
    "info",
    "debug",
    "warning",
    "to_yaml",
    "print_yaml",
}
"""Calls that change no config."""


def as_bridge_program(path: str, text: str) -> str:
    """The program with one function more, which returns the config that it starts with; "" where it starts none.

    Of the main part only the statements on which the config depends are kept, and its arguments have their defaults.

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
        before = body[: body.index(node)]
        kept = on_which({name}, before)
        for part in before:
            if (part not in kept and sets_part(name, part)) or _given_away(name, part, own):
                what = f"{path}: line {part.lineno} changes the config in a way that is not read"
                raise ConfigError(f"{what}; give the log that prints the job's config")
        inside = [f"args = {arguments_of(module)!r}", *map(ast.unparse, kept), f"return {name}"]
        lines = "\n".join(f"    {line}" for part in inside for line in part.splitlines())
        return f"{text}\n\ndef {FUNCTION}():\n{lines}"
    return ""


def _started(node: ast.stmt) -> str:
    """The variable that a statement gives to the training loop as its config."""
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or dotted(call.func)[-1:] not in [[start] for start in _STARTS]:
        return ""
    given = [*call.args[:1], *(item.value for item in call.keywords if item.arg in {"config", "cfg"})]
    return given[0].id if len(given) == 1 and isinstance(given[0], ast.Name) else ""


def _given_away(name: str, node: ast.stmt, own: set[str]) -> bool:
    """Whether a function that is not of the module may change the config: it is an argument, and no copy is kept."""
    calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
    return any(
        isinstance(item, ast.Name) and item.id == name
        for call in calls
        if (dotted(call.func) or [""])[-1] not in _READS | own
        for item in [*call.args, *(keyword.value for keyword in call.keywords)]
    )
