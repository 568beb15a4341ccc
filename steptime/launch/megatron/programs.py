"""Programs over Megatron-LM beside a script: whether one trains."""

from __future__ import annotations

import ast
import re

from steptime.launch.beside import Beside
from steptime.launch.config_values import syntax_of

_TRAINS = re.compile(r"train(?!ed)|tune|sft|fit$|backward|main|run|launch|step$", re.IGNORECASE)
"""Names of functions that train, or that may call one that does."""


def does_not_train(program: str, beside: Beside | None) -> bool:
    """Whether a program in the repository imports Megatron's functions, and calls none that trains: it runs a model.

    False where the program is not there, or cannot be read.
    """
    code = beside.text(program) if beside is not None and program.endswith(".py") else None
    if code is None or not re.search(r"^\s*(?:from|import) megatron\b", code, re.MULTILINE):
        return False
    nodes = list(ast.walk(syntax_of(code)))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    called = {_name(node.func) for node in nodes if isinstance(node, ast.Call)} - own
    runs = any(isinstance(node, ast.Attribute) and node.attr == "no_grad" for node in nodes)
    return runs and not any(map(_is_training, called))


def _name(function: ast.expr) -> str:
    return str(getattr(function, "attr", "") or getattr(function, "id", ""))


def _is_training(name: str) -> bool:
    """Whether a function trains, which the one that makes the data sets does not.

    >>> [_is_training(name) for name in ("pretrain", "backward", "build_train_valid_test_datasets", "from_pretrained")]
    [True, True, False, False]
    """
    return bool(_TRAINS.search(name)) and not re.search(r"data|valid", name)
