"""Programs of NeMo 2.0 over a recipe in a variable, or with objects of their own for llm.train, as functions that can be read."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from steptime.base.config import ConfigError
from steptime.job.edit import put
from steptime.launch.devices import told
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.nemo.models import class_preset, classes, kernels, with_own_class
from steptime.launch.nemo.nemo_run import plugin_of, read_two
from steptime.launch.nemo.targets import CLASS as TARGET
from steptime.launch.nemo.targets import NemoConfig, class_of
from steptime.launch.python import config_values as syntax
from steptime.launch.python.config_functions import read_function
from steptime.launch.python.config_values import CLASS, FUNCTION, Computed, dotted
from steptime.launch.reading import Reading, Sets
from steptime.launch.vocabulary import entries_of

GIVE_LOG = "give the log that prints the job's config"
_RECIPES = ({"pretrain_recipe"}, {"finetune_recipe"})
_SWITCHES = {"store_true": True, "store_false": False}
"""Action of an argument -> its value where it is given."""
_READ = (ast.Assign, ast.AnnAssign, ast.If, ast.Expr)


def as_function(path: str, text: str) -> str:
    """The program with one function more, which returns the recipe that its main part keeps in a variable; "" without one.

    Of the main part only the statements on which the recipe depends are kept, and its arguments have their defaults.

    Raises:
        ConfigError: it sets the recipe in a loop, by setattr or the like.
    """
    module = syntax.syntax_of(text)
    for body in main_parts(module):
        if name := next((found for node in body if (found := _kept_in(node))), ""):
            kept = on_which({name}, body)
            if other := next((node for node in body if node not in kept and sets_part(name, node)), None):
                what = "sets the recipe in a way that is not read"
                raise ConfigError(f"{path}: line {other.lineno} {what}; {GIVE_LOG}")
            return syntax.with_function(text, *with_arguments(arguments_of(module), kept), f"return {name}")
    return ""


def with_arguments(arguments: Mapping[str, Any], kept: Iterable[ast.stmt]) -> list[str]:
    """Statements of a main part after one that gives its arguments their values."""
    return [f"args = {arguments!r}", *map(ast.unparse, kept)]


def main_parts(module: ast.Module) -> Iterator[list[ast.stmt]]:
    """The statements of the module, of `if __name__ == ...`, and of `main` and the functions that it calls with nothing."""
    called = {"main"}
    for node in reversed(module.body):
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            called |= {ast.unparse(part).removesuffix("()") for part in node.body}
            yield node.body
        elif isinstance(node, ast.FunctionDef) and node.name in called:
            yield node.body
    yield module.body


def _kept_in(node: ast.stmt) -> str:
    """The variable to which a statement assigns a recipe."""
    if not isinstance(node, ast.Assign) or len(node.targets) > 1 or not isinstance(node.targets[0], ast.Name):
        return ""
    parts = (part for part in ast.walk(node) if isinstance(part, ast.expr))
    return node.targets[0].id if any({*dotted(part)[-1:]} in _RECIPES for part in parts) else ""


def on_which(names: set[str], body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements that set variables, or what they need for these; not the arguments, which are given by name."""
    needed, kept = set(names), list[ast.stmt]()
    for node in reversed(body):
        targets = [target for part in ast.walk(node) for target in getattr(part, "targets", [])]
        targets += [node.target] if isinstance(node, ast.AnnAssign) else []
        sets = {(dotted(target) or [""])[0] for target in _each(targets)}
        call = node.value if isinstance(node, ast.Expr) else None
        sets |= {(dotted(call.func) or [""])[0]} if isinstance(call, ast.Call) else set()
        if isinstance(node, _READ) and sets & needed and "parse_args" not in ast.unparse(node):
            kept.insert(0, node)
            needed |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return kept


def sets_part(name: str, node: ast.stmt) -> bool:
    """Whether a statement that is not kept sets a part of a variable."""
    parts = [part for part in ast.walk(node) if not isinstance(part, ast.For | ast.comprehension)]
    targets = [target for part in parts for target in [*getattr(part, "targets", []), getattr(part, "target", None)]]
    called = [part for part in parts if isinstance(part, ast.Call) and dotted(part.func) == ["setattr"] and part.args]
    set_ = [*(target for target in targets if isinstance(target, ast.expr)), *(call.args[0] for call in called)]
    return any(dotted(part)[:1] == [name] for part in _each(set_))


def _each(targets: list[ast.expr]) -> list[ast.expr]:
    """Targets of an assignment, those of a tuple one by one."""
    parts = (target.elts if isinstance(target, ast.Tuple | ast.List) else [target] for target in targets)
    return [part for each in parts for part in each]


def arguments_of(module: ast.Module) -> dict[str, Any]:
    """Argument -> its literal default; None without one, unless it is required."""
    found: dict[str, Any] = {}
    for name, said in syntax.options_in(module):
        action = syntax.literal(said.get("action"))
        usual = ast.Constant(not _SWITCHES[action] if action in _SWITCHES else None)
        default = said.get("default", usual)
        plain = action in _SWITCHES or "action" not in said
        if plain and "required" not in said and isinstance(default, ast.Constant):
            found[name] = default.value
    return found


def put_vocabulary(path: str, tree: dict[str, Any], sets: Sets) -> None:
    """The vocabulary of the tokenizer that a program puts over a recipe's: its data's (nemo/collections/llm/api.py, pretrain).

    Raises:
        ConfigError: that tokenizer is not known.
    """
    data, model = tree.get("data"), tree.get("model")
    own = data.get("tokenizer") if isinstance(data, dict) else None
    config = model.get("config") if isinstance(model, dict) else None
    if not isinstance(own, Mapping) or "vocab_size" in (config if isinstance(config, dict) else {}):
        return
    names = (own.get(key) for key in ("pretrained_model_name", "model_name", "tokenizer_model"))
    name = str(next(filter(None, names), ""))
    files = [str(own[key]) for key in ("vocab_file", "tokenizer_model") if own.get(key)]
    found = entries_of(name, files) or (entries_of("", [name]) if name else None)
    if found is not None:
        put(tree, "model.config.vocab_size", found[0])
    elif told(sets, "model.vocab_sz") is None and told(sets, "model") is None:
        what = f"vocabulary size unknown (tokenizer {name or 'of its own'})"
        raise ConfigError(f"{path}: {what}; add --set model.vocab_sz=N")


_CALLS = (["llm", "train"], ["llm", "pretrain"], ["api", "train"], ["api", "pretrain"])
"""nemo/collections/llm/api.py: from random weights, all of them trained."""
_SECTIONS = ("model", "data", "trainer", "optim")
_DATA = {"seq_length": 2048, "micro_batch_size": 4, "global_batch_size": 8}
_GPT2 = ("MockDataModule", "PreTrainingDataModule")
"""Modules with these sizes where a program states none, and with GPT-2's tokenizer (nemo/collections/llm/gpt/data/mock.py and
pre_training.py)."""
_VOCABULARY = 50257


def read_train_call(path: str, file: str, text: str, sets: Sets, nearby: NearbyFiles) -> Reading | None:
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
    module = syntax.syntax_of(text)
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
        rest = (part for part in before if part not in kept)
        if other := next((part for part in rest if any(sets_part(name, part) for name in names - {"args"})), None):
            what = "sets the job in a way that is not read"
            raise ConfigError(f"{path}: line {other.lineno} {what}; {GIVE_LOG}")
        said = ", ".join(f"{key}={ast.unparse(value)}" for key, value in given.items())
        statements = with_arguments(arguments_of(module), kept)
        return syntax.with_function(text, *statements, f"return run.Partial(llm.train, {said})")
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
        raise ConfigError(f"{path}: {missing[0]} of llm.train is not read; {GIVE_LOG}")
    model, data, trainer = found["model"], found["data"], found["trainer"]
    known = str(data.get(TARGET)).rpartition(".")[2] in _GPT2
    if known:
        found["data"] = _DATA | data
    elif absent := [key for key in _DATA if key not in data]:
        raise ConfigError(f"{path}: data: {absent[0]} is that of a module of its own; {GIVE_LOG}")
    config = model.get("config")
    if isinstance(config, dict) and told(sets, "model.vocab_sz") is None and told(sets, "model") is None:
        if not known or data.get("tokenizer") is not None:
            raise ConfigError(f"{path}: vocabulary size unknown (tokenizer of its own); add --set model.vocab_sz=N")
        name = class_of(config).rpartition(".")[2]
        own = kernels(name).get("make_vocab_size_divisible_by") == 1  # a vocabulary of the class's own
        if (name in classes() and not own) or class_preset(name) is None:
            config.setdefault("vocab_size", _VOCABULARY)
    if "plugins" in trainer:
        trainer["plugins"] = plugin_of(tree["trainer"]["plugins"])
    return found | {"trainer": {"num_nodes": 1} | trainer}
