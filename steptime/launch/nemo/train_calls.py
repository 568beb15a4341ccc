"""Programs of NeMo 2.0 that give objects of their own to llm.train(model=..., data=..., trainer=..., optim=...)."""

from __future__ import annotations

import ast
from typing import Any

from steptime.base.config import ConfigError
from steptime.launch.config_functions import read_function
from steptime.launch.config_values import CLASS, Computed, dotted, syntax_of
from steptime.launch.devices import told
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.nemo.nemo_programs import FUNCTION, arguments_of, main_parts, on_which, sets_part, with_function
from steptime.launch.nemo.nemo_run import class_preset, classes, read_two
from steptime.launch.nemo.own_classes import with_own_class
from steptime.launch.nemo.targets import CLASS as TARGET
from steptime.launch.nemo.targets import NemoConfig, class_of
from steptime.launch.reading import Reading, Sets

_CALLS = (["llm", "train"], ["llm", "pretrain"], ["api", "train"], ["api", "pretrain"])
"""nemo/collections/llm/api.py: from random weights, all of them trained."""
_SECTIONS = ("model", "data", "trainer", "optim")
_DATA = {"seq_length": 2048, "micro_batch_size": 4, "global_batch_size": 8}
_GPT2 = ("MockDataModule", "PreTrainingDataModule")
"""Modules with these sizes where a program states none, and with GPT-2's tokenizer (nemo/collections/llm/gpt/data/mock.py and
pre_training.py)."""
_VOCABULARY = 50257


def read_train_call(path: str, file: str, text: str, sets: Sets, nearby: NearbyFiles | None) -> Reading | None:
    """The job of a program that calls llm.train; None where there is no such call.

    Raises:
        ConfigError: what it gives to the call cannot be read.
    """
    if not (program := as_train_call(file, text)):
        return None
    _, tree = read_function(file, program, FUNCTION, "run.Partial", "$^", nearby)
    reading = read_two(NemoConfig(path, with_own_class(path, text, as_recipe(path, tree, sets), sets), None, sets, ""))
    reading.config.setdefault("notes", []).append("arguments of the program that are not given have its defaults")
    return reading


def as_train_call(path: str, text: str) -> str:
    """The program with one function more, which returns what it gives to llm.train; "" where there is no such call.

    Raises:
        ConfigError: it sets one of these objects in a way that is not read.
    """
    module = syntax_of(text)
    for body in main_parts(module):
        found = [(node, call) for node in body if (call := _train_call(node)) is not None]
        if len(found) != 1:
            continue
        node, call = found[0]
        given = {item.arg: item.value for item in call.keywords if item.arg in _SECTIONS}
        names = {part.id for value in given.values() for part in ast.walk(value) if isinstance(part, ast.Name)}
        before = body[: body.index(node)]
        kept = on_which(names, before)
        names |= {part.id for statement in kept for part in ast.walk(statement) if isinstance(part, ast.Name)}
        others = (
            part for part in before if part not in kept and any(sets_part(name, part) for name in names - {"args"})
        )
        if other := next(others, None):
            what = "sets the job in a way that is not read"
            raise ConfigError(f"{path}: line {other.lineno} {what}; give the log that prints the job's config")
        said = ", ".join(f"{key}={ast.unparse(value)}" for key, value in given.items())
        return with_function(text, arguments_of(module), kept, f"run.Partial(llm.train, {said})")
    return ""


def _train_call(node: ast.stmt) -> ast.Call | None:
    """The call, where a statement is one that names the model and the trainer."""
    call = node.value if isinstance(node, ast.Expr | ast.Assign) else None
    if not isinstance(call, ast.Call) or dotted(call.func)[-2:] not in _CALLS:
        return None
    return call if {"model", "data", "trainer"} <= {item.arg for item in call.keywords} else None


def by_class(node: Any) -> Any:
    """Objects in the form of a recipe's YAML; what is known only at run time as its code."""
    if isinstance(node, Computed):
        return node.code
    if isinstance(node, list):
        return [by_class(item) for item in node]
    if not isinstance(node, dict):
        return node
    args = [item for item in node.get("_args_") or [] if isinstance(item, dict)]
    own = {TARGET: str(node[CLASS])} | ({"config": args[0]} if args else {}) if CLASS in node else {}
    rest = {key: item for key, item in node.items() if key not in {CLASS, "_args_"}}
    return {key: item if key == TARGET else by_class(item) for key, item in (own | rest).items()}


def as_recipe(path: str, tree: dict[str, Any], sets: Sets) -> dict[str, Any]:
    """What llm.train is given, as a recipe's tree with the defaults of NeMo's data modules and of Lightning's Trainer.

    Raises:
        ConfigError: one of them is no object that can be read, or the sizes or the vocabulary are those of its own data module.
    """
    found = {key: by_class(tree[key]) for key in _SECTIONS if key in tree}
    if missing := [key for key in ("model", "data", "trainer") if not isinstance(found.get(key), dict)]:
        raise ConfigError(f"{path}: {missing[0]} of llm.train is not read; give the log that prints the job's config")
    model, data, trainer = found["model"], found["data"], found["trainer"]
    known = str(data.get(TARGET)).rpartition(".")[2] in _GPT2
    if known:
        found["data"] = _DATA | data
    elif absent := [key for key in _DATA if key not in data]:
        raise ConfigError(
            f"{path}: data: {absent[0]} is that of a module of its own; give the log that prints the job's config"
        )
    config = model.get("config")
    if isinstance(config, dict) and told(sets, "model.vocab_sz") is None and told(sets, "model") is None:
        if not known or data.get("tokenizer") is not None:
            raise ConfigError(f"{path}: vocabulary size unknown (tokenizer of its own); add --set model.vocab_sz=N")
        name = class_of(config).rpartition(".")[2]
        if name in classes() or class_preset(name) is None:
            config.setdefault("vocab_size", _VOCABULARY)
    plugins = trainer.get("plugins")
    if isinstance(plugins, list) and len(plugins) == 1:
        trainer["plugins"] = plugins[0]
    return found | {"trainer": {"num_nodes": 1} | trainer}
