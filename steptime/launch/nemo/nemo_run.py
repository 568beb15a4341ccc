"""NeMo 2.0: recipes as nemo-run writes them, or by name with what is set over them, translated to Megatron-Core's names."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from copy import deepcopy
from functools import reduce
from typing import Any

from steptime.base.config import ConfigError, near, show
from steptime.base.document import scalar
from steptime.job.edit import put
from steptime.launch.devices import told
from steptime.launch.job_keys import JobKeys
from steptime.launch.keys import flatten, is_costly, load_table, rule_of, spelled, table_file
from steptime.launch.megatron.translation import object_keys, plan_of
from steptime.launch.nemo.callbacks import callback_settings, note_callbacks, overlap_defaults
from steptime.launch.nemo.models import changed, class_preset, classes, kernels
from steptime.launch.nemo.targets import CLASS, NemoConfig, class_of, methods_of, other_class_of, simplify
from steptime.launch.python.config_functions import CALLED
from steptime.launch.python.config_values import CLASS as CALL
from steptime.launch.python.config_values import Computed, merged, syntax_of
from steptime.launch.reading import LaunchFlag, Reading, Sets


def read_two(config: NemoConfig) -> Reading:
    """A recipe as a config.

    Raises:
        ConfigError: it is only a part of one, or a setting is not known.
    """
    path, tree, devices, sets, *_ = config
    if not isinstance(tree.get("trainer"), dict):
        raise ConfigError(f"{path}: returns no recipe with a trainer; give the function that returns the whole recipe")
    said = _said(path, tree, _with_plugin(path, tree["trainer"], sets), sets)
    config_class = class_of(_section(tree, "model").get("config")).rpartition(".")[2]
    if config_class not in classes() and (preset := class_preset(config_class)) and told(sets, "model") is None:
        sets = {"model": changed(path, preset, said, "model.config", sets), **(sets or {})}
    named = told(sets, "model") is not None or "model.class" in said
    fields = kernels(config_class) if named else _fields(path, config_class, said)
    defaults = {f"model.config.{key}": value for key, value in fields.items()}
    keys = object_keys(said, load_table("nemo2"), path, sets, defaults=defaults, defaults_of=config_class)
    _put_over(keys, said)
    note_callbacks(keys)
    precision = str(keys.get("mixed_precision.precision") or "32").lower()
    keys.put("bf16", "bf16" in precision)
    keys.put("fp16", precision.startswith(("16", "fp16")))
    if keys.get("trainer.devices") is not None and keys.values.get("trainer.num_nodes") is not None:
        devices = keys.count("trainer.devices") * keys.count("trainer.num_nodes")
    return plan_of(keys, config.profile("nemo"), devices)


def _with_plugin(path: str, trainer: Mapping[str, Any], sets: Sets) -> dict[str, Any]:
    """The trainer's settings with a precision plugin that is read: a plain bf16 one where the user gives the precision.

    Raises:
        ConfigError: what the plugin sets is not known, and the user gives no precision.
    """
    plugin = plugin_of(trainer.get("plugins"))
    if plugin is not None and not (isinstance(plugin, Mapping) and "precision" in plugin):
        if told(sets, "performance.precision") is None:
            what = f"trainer.plugins is {show(plugin).strip(chr(39))}, not read"
            raise ConfigError(f"{path}: {what}; add --set performance.precision=NAME")
        plugin = table_file("nemo2_recipes")["all"]["trainer"]["plugins"]
    return {**trainer, "plugins": plugin} if "plugins" in trainer else {**trainer}


def _put_over(keys: JobKeys, said: Mapping[str, Any]) -> None:
    """The defaults of the precision plugin and of the overlap callback; these also override ddp's own settings."""
    put: dict[str, tuple[str, Any]] = {
        "accumulate_allreduce_grads_in_fp32": ("trainer.plugins.grad_reduce_in_fp32", True)
    }
    if said.get("trainer.plugins.fp8"):
        older = "trainer.plugins.fp8_params"  # NeMo up to 2.2, and 2.4
        put["fp8_param_gather"] = (older if older in said else "trainer.plugins.fp8_param_gather", False)
    put |= overlap_defaults(keys)
    for key, (name, value) in put.items():
        keys.defaults[key] = (name, value)
        if key in keys.values and keys.names[key] != name:
            keys.put(key, value, by=name)


def _section(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """A section; empty where it is none."""
    found = tree.get(name)
    return found if isinstance(found, dict) else {}


def _said(path: str, tree: dict[str, Any], trainer: dict[str, Any], sets: Sets) -> dict[str, Any]:
    """Dotted keys, the callbacks' by their classes."""
    strategy = trainer.pop("strategy", None) or {}
    if isinstance(strategy, str) or not isinstance(strategy, dict):
        raise ConfigError(f"{path}: trainer.strategy: expected MegatronStrategy's settings (got {show(strategy)})")
    callbacks = trainer.pop("callbacks", None) or []
    ddp = strategy.get("ddp")
    if isinstance(ddp, str):
        strategy = {key: value for key, value in strategy.items() if key != "ddp"}
        if ddp != "megatron":
            raise ConfigError(f"{path}: trainer.strategy.ddp: {ddp!r} is not modeled; only Megatron's own DDP is")
    rest = {key: value for key, value in tree.items() if key not in {"trainer", "_target_", "_partial_", "fn"}}
    said = flatten({key: simplify(value) for key, value in rest.items() if value is not None})
    said |= flatten({"trainer": simplify(trainer)})
    said |= callback_settings(callbacks, sets)
    return said | methods_of(tree) | other_class_of(tree) | flatten({"trainer": {"strategy": simplify(strategy)}})


def _fields(path: str, name: str, said: Mapping[str, Any]) -> dict[str, Any]:
    if name in classes():
        return classes()[name]
    if {"model.config.num_layers", "model.config.hidden_size"} <= said.keys():
        if name in classes("bases"):
            return classes("bases")[name]
        if {"model.config.normalization", "model.config.gated_linear_unit"} <= said.keys():
            return kernels(name)  # a class of its own that says what its family is
    what = f"unknown class (got {show(name)})" if name else "has no class name"
    raise ConfigError(f"{path}: model.config: {what}; add --set model=NAME{near(name, classes()) if name else ''}")


BASE = re.compile(r"(?:^|\.)(\w+)\.(pretrain|finetune)_recipe$")
"""A call of a recipe, as programs write it: llm.llama3_8b.pretrain_recipe; its model, and what it does."""
_TUNED = ("performance_mode", "packed_sequence")
"""Arguments with which recipes have settings that the table does not have."""


def of_first_releases(text: str) -> str:
    r"""A recipe with run.Config and run.Partial for those of the first releases' own llm/utils.py; not for a class of the file.

    >>> of_first_releases("class Config:\n    x = Partial(f)")
    'class Config:\n    x = run.Partial(f)'
    """
    named = [name for name in ("Config", "Partial") if not re.search(rf"(?m)^\s*class {name}\b", text)]
    return re.sub(rf"(?<![\w.])({'|'.join(named)})(?=[\[(:])", r"run.\1", text) if named else text


def with_adapters(text: str) -> str:
    """A recipe that chooses its adapters by a word, with the mapping that it imports (NeMo collections/llm/peft/__init__.py)."""
    return f"{text}\n{_ADAPTERS}" if re.search(r"\bimport\b.*\bPEFT_STR2CLS\b", text) else text


_ADAPTERS = """
PEFT_STR2CLS = {
    "LoRA": LoRA, "lora": LoRA, "DoRA": DoRA, "dora": DoRA, "CanonicalLoRA": CanonicalLoRA, "canonical_lora": CanonicalLoRA,
}
"""


def base_function(text: str) -> str:
    """The one function of a program that returns what a recipe makes; "" where there is none, or several."""
    functions = [node for node in syntax_of(text).body if isinstance(node, ast.FunctionDef)]
    returning = (function for function in functions if isinstance(function.body[-1], ast.Return))
    made = re.compile(r"\.(?:pretrain|finetune)_recipe\b")
    found = [function.name for function in returning if made.search(ast.unparse(function))]
    return found[0] if len(found) == 1 else ""


def by_target(node: Any) -> Any:
    """run.Config(Class, field=...) in the form of a recipe's YAML; values known only at run time are left out."""
    if isinstance(node, list):
        return [by_target(item) for item in node]
    if isinstance(node, Computed):
        table = table_file("nemo2_recipes")
        mixed = re.fullmatch(r"(?:\w+\.)*(\w+_mixed)\(\)", node.code)
        if mixed and mixed[1] in table["mixed"]:
            return table["all"]["trainer"]["plugins"] | table["mixed"][mixed[1]]
        return node.code if re.fullmatch(r"[A-Za-z_][\w.]*", node.code) else None
    if not isinstance(node, dict):
        return node
    if re.fullmatch(r"(?:run\.)?(Config|Partial)", str(node.get(CALL))):
        args: list[Any] = [*(node.get("_args_") or []), None, None]
        config = {"config": args[1]} if isinstance(args[1], dict) else {}  # of a model: its first argument
        node = {
            CLASS: str(by_target(args[0])),
            **config,
            **{key: item for key, item in node.items() if key != "_args_"},
        }
    fields = {key: item for key, item in node.items() if key not in {CALL, CALLED}}
    return {key: plugin_of(item) if key == "plugins" else by_target(item) for key, item in fields.items()}


def plugin_of(node: Any) -> Any:
    """The fields of a precision plugin, alone or in a list; where a call makes it that is not read, the code of that.

    >>> plugin_of([Computed(1, "bf16_mixed()")])["precision"], plugin_of(Computed(1, "args.precision"))
    ('bf16-mixed', 'args.precision')
    >>> plugin_of({CALL: "bf16_mixed", "grad_reduce_in_fp32": False})["grad_reduce_in_fp32"]
    False
    """
    node = node[0] if isinstance(node, list) and len(node) == 1 else node
    found = by_target(node)
    made = by_target(Computed(0, f"{node[CALL]}()")) if isinstance(node, dict) and CALL in node else None
    if isinstance(made, dict):
        return made | found
    if isinstance(node, Computed):
        return found if isinstance(found, dict) else node.code
    unread = isinstance(node, dict) and CALL in node and "precision" not in node
    return f"{node[CALL]}(...)" if unread else found


_ARGUMENTS = {
    "num_nodes": "trainer.num_nodes", "num_gpus_per_node": "trainer.devices", "seq_length": "data.seq_length",
}  # fmt: skip
"""Arguments of recipes -> what they set."""
_SIZES = ("parallelism.tp", "parallelism.pp", "parallelism.cp", "parallelism.vpp", "parallelism.ep", "data.", "model.")
"""Keys of a plan that are asked for where they are computed, or their beginnings."""
_DEVICES = ("trainer.num_nodes", "trainer.devices")
_KEPT = {"model", "trainer", "trainer.plugins"}
"""Keys that are asked for elsewhere."""


def without_computed(path: str, tree: dict[str, Any], sets: Sets) -> list[LaunchFlag]:
    """Take values known only at run time out of what a program sets over a recipe; the result tells of those that cost.

    Raises:
        ConfigError: a size, a degree or a batch is computed, and the user sets none, or what the recipe itself depends on is.
    """
    table, found, lines = load_table("nemo2"), list[LaunchFlag](), list[str]()
    for argument, key in _ARGUMENTS.items():
        if isinstance(tree.get(argument), Computed):
            put(tree, key, tree.pop(argument))
    computed = {key: value for key, value in flatten(tree).items() if isinstance(value, Computed) and key not in _KEPT}
    for key, value in computed.items():
        rule, what = rule_of(spelled(key, table), table), f"{path}: {key} is computed ({value.code})"
        size = rule.note if rule is not None and rule.note.startswith(_SIZES) else ""
        if key in _DEVICES:
            put(tree, key, None)  # the number of devices is asked for
        elif key in {*_TUNED, "peft_scheme"}:
            lines.append(f"{what}; give the log that prints the job's config")
        elif size and told(sets, size) is None and told(sets, "model") is None:
            lines.append(f"{what}; add --set {size}=N")
        elif size or by_target(value) is None:
            *above, last = key.split(".")
            reduce(lambda section, name: section[name], above, tree).pop(last)
            if not size and is_costly(key, table):
                found.append(LaunchFlag(key, value.code, "approximated", "computed, and not read"))
    if lines:
        raise ConfigError(lines)
    return found


def over_recipe(path: str, name: str, said: Mapping[str, Any], kind: str = "pretrain") -> dict[str, Any]:
    """A recipe's config with its arguments and the sections set over it.

    Raises:
        ConfigError: the recipe is not known, or has settings for performance, or adapters, that are not.
    """
    table = table_file("nemo2_recipes")
    recipes = table["recipes"] if kind == "pretrain" else table["finetune"]["recipes"]
    give = "give the log that prints the job's config"
    if name not in recipes:
        raise ConfigError(f"{path}: recipe {name} of {kind} is not known{near(name, recipes)}; {give}")
    if tuned := next((key for key in _TUNED if said.get(key) not in (None, False)), ""):
        raise ConfigError(f"{path}: {tuned} of recipe {name} is not known; {give}")
    tree: dict[str, Any] = deepcopy(table["all"])
    settings: dict[str, Any] = recipes[name]
    if kind == "finetune":
        tree["trainer"]["strategy"].pop("ddp")  # of which the recipe says nothing
        method = str(said.get("peft_scheme", "lora")).lower()
        if method not in {"none", "lora"}:
            what = f"peft_scheme {method} of recipe {name}: adapters other than LoRA are not modeled"
            raise ConfigError(f"{path}: {what}; {give}")
        own = {key: value for key, value in settings.items() if key not in {"full", "lora"}}
        settings = table["finetune"]["all"] | own | (settings.get("full" if method == "none" else method) or {})
        tree |= {"peft": {"_target_": "nemo.collections.llm.peft.LoRA"}} if method == "lora" else {}
    for key, value in settings.items():
        put(tree, table["names"][key], value)
    for argument, key in _ARGUMENTS.items():
        if said.get(argument) is not None:
            put(tree, key, said[argument])
    sections = {key: item for key, item in said.items() if key in {"trainer", "model", "data", "optim", "peft"}}
    return merged(tree, {key: item for key, item in sections.items() if isinstance(item, dict)}, CLASS)


def of_command_line(path: str, kind: str, flags: list[tuple[str, Any]]) -> dict[str, Any]:
    """The config of `nemo llm pretrain --factory "NAME(num_nodes=2)" trainer.devices=8 ...`; `kind`: pretrain, or finetune.

    Raises:
        ConfigError: it names no recipe that is known.
    """
    factory = str(next((value for key, value in flags if key == "factory"), ""))
    called = re.fullmatch(r"(\w+)(?:\((.*)\))?", factory, re.DOTALL)
    if called is None:
        raise ConfigError(f"{path}: nemo llm {kind} without --factory NAME; give the log that prints the job's config")
    arguments = re.findall(r"(\w+)\s*=\s*([^,]+)", called[2] or "")
    said: dict[str, Any] = {key: scalar(value.strip("'\" ")) for key, value in arguments}
    for key, value in flags:
        if "." in key:
            put(said, key, value)
    return over_recipe(path, called[1], said, kind)
