"""torchtitan: its TOML job configs, its config functions (read, never run), and logs that print the config."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from steptime.base.config import ConfigError, near
from steptime.launch.devices import devices_in, told
from steptime.launch.job_keys import JobKeys
from steptime.launch.keys import KeyTable, flatten, load_table, read_keys, rule_of, spelled
from steptime.launch.logs.printed_config import balanced, plain_lines
from steptime.launch.reading import LaunchFlag, Reading
from steptime.launch.torchtitan.config_functions import CLASS, Computed, Tree, read_function, split_path
from steptime.launch.torchtitan.flavors import flavor_of, from_log, known_models
from steptime.launch.torchtitan.plan_sections import config_of

_DUMP = re.compile(r"Running with (?:args|configs): (?=\{)")
_MESH = re.compile(r"Building device mesh with parallelism: (.*)")
_OLD_MESH = re.compile(r"Building \d-D device mesh with \[([^]]*)\], \[([\d, ]+)\]")
_PRESET = re.compile(r"#.*\bpreset for (\d+) \w+ GPUs", re.IGNORECASE)
_SECTIONS = {"job", "model", "training", "parallelism", "activation_checkpoint", "optimizer", "metrics", "checkpoint"}


def read_torchtitan(
    path: str, text: str, env: Mapping[str, str] | None = None, sets: Mapping[str, Any] | None = None
) -> Reading:
    """A JOB.toml, a log that prints the config, or a config function (FILE.py:FUNCTION) as a config.

    `env` may tell the number of devices (WORLD_SIZE, or NGPU and NNODES). `sets`: dotted keys that the user sets; what only
    they tell (parallelism.dp, model) is taken from them.

    Raises:
        ConfigError: one line per problem: no torchtitan config, keys that it does not have, a value that is computed, an unknown
            flavor, contradictory batch sizes, or nothing that tells the number of devices.
    """
    table = load_table("torchtitan")
    file, function = split_path(path)
    if file.endswith(".py"):
        tree, later, devices, model = *_function(file, text, function), None, None
    elif _is_log(text):
        tree, later, devices, model = _log(path, text)
    else:
        tree, later, devices, model = _toml(path, text), False, None, None
    said = flatten(tree)
    devices = devices or devices_in("", env) or _of_comment(said, text)
    _no_computed(file, said, table)
    defaults = dict(table.raw["functions"]) if later else {}
    table = table._replace(framework=defaults.pop("framework", table.framework))
    keys = JobKeys(path, table, read_keys(said, table, path), defaults=defaults, sets=sets)
    if devices is not None and told(sets, "parallelism.dp") is None:
        keys.beside_flags.append(LaunchFlag("devices", str(devices), "used", "parallelism.dp"))
    reading = keys.reading(config_of(keys, told(sets, "model") or model or flavor_of(keys), devices))
    version = re.search(r"torchtitan version: (\d+\.\d+\.\d+)", text)
    framework = f"torchtitan {version[1]}" if version and version[1] != "0.0.0" else table.framework
    return reading._replace(framework=framework)


# --- TOML ----------------------------------------------------------------------------------------------------------------


def _toml(path: str, text: str) -> Tree:
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML ({error}), nor a log that prints torchtitan's config") from None
    if not tree.keys() & {"training", "parallelism"} or not all(isinstance(tree[key], dict) for key in tree):
        raise ConfigError(f"{path}: not a torchtitan job config: no section training or parallelism")
    return tree


def _of_comment(said: Mapping[str, Any], text: str) -> int | None:
    """The devices that a comment names ("a preset for 64 A100 GPUs"), where the file leaves the degree open."""
    degrees = [value for key, value in said.items() if key.endswith("data_parallel_shard_degree")]
    found = _PRESET.search(text)
    return int(found[1]) if found and degrees in ([], [-1]) else None


# --- config functions ------------------------------------------------------------------------------------------------------


def _function(path: str, text: str, name: str) -> tuple[Tree, bool]:
    """The config of a function, in the words of the TOML files."""
    name, tree = read_function(path, text, name, "Trainer.Config")
    if isinstance(tree.get("model_spec"), dict) and "name" not in tree["model_spec"]:
        words = sorted(known_models(), key=len, reverse=True)
        folder = PurePath(path).parent.name
        named = next((word for word in words if name.startswith(f"{word}_")), name)
        tree["model_spec"]["name"] = folder if folder in words else named
    return as_toml(tree), True


def as_toml(tree: Tree) -> Tree:
    """The sections of a Trainer.Config by the names of the TOML files."""
    tree = {key: value for key, value in tree.items() if key != CLASS}
    spec = tree.pop("model_spec", None) or tree.pop("model", None)
    if isinstance(spec, dict):
        args = spec.get("_args_") or [None]
        kept = {
            "name": spec.get("name"),
            "flavor": spec.get("flavor", args[0]),
            "attn_backend": spec.get("attn_backend"),
        }
        tree["model"] = {key: value for key, value in kept.items() if value is not None}
    converters = tree.pop("model_converters", None)
    if isinstance(converters, dict) and converters.get("converters"):
        names = [
            item.get(CLASS, "a converter") if isinstance(item, dict) else item for item in converters["converters"]
        ]
        tree.setdefault("model", {})["converters"] = names
    checkpointing = tree.get("activation_checkpoint", {})
    if checkpointing is None:
        tree["activation_checkpoint"] = {"mode": "none"}
    elif isinstance(checkpointing, dict) and "mode" not in checkpointing:
        kind = re.match(r"(Full|Selective|MemoryBudget)AC", str(checkpointing.get(CLASS, "")))
        if kind:
            words = {"MemoryBudget": "memory_budget"}
            tree["activation_checkpoint"] = checkpointing | {"mode": words.get(kind[1], kind[1].lower())}
    if isinstance(tree.get("optimizer"), dict) and "InBackward" in str(tree["optimizer"].get(CLASS, "")):
        tree["optimizer"] = tree["optimizer"] | {"early_step_in_backward": True}
    if isinstance(tree.get("loss"), dict):
        tree["loss"] = {"class": str(tree["loss"].get(CLASS, "CrossEntropyLoss")).removesuffix(".Config")}
    return {key: _bare(value) for key, value in tree.items() if value is not None}


def _bare(value: Any) -> Any:
    return {key: _bare(item) for key, item in value.items() if key != CLASS} if isinstance(value, dict) else value


def _no_computed(path: str, said: Mapping[str, Any], table: KeyTable) -> None:
    problems = []
    for key, value in said.items():
        rule = rule_of(spelled(key, table), table)
        found = next(
            (item for item in (value if isinstance(value, list) else [value]) if isinstance(item, Computed)), None
        )
        if found is not None and (rule is None or rule.status != "irrelevant"):
            problems.append(
                f"{path}:{found.line}: {key}: computed ({found.code}); write the value out, or give a log of the job"
            )
    if problems:
        raise ConfigError(problems)


# --- logs ------------------------------------------------------------------------------------------------------------------


def _is_log(text: str) -> bool:
    return bool(_DUMP.search(text) or "[titan]" in text or "torchtitan.train" in text or _MESH.search(text))


def _log(path: str, text: str) -> tuple[Tree, bool, int | None, dict[str, Any] | None]:
    """Config, whether it is of a config function, devices, and the model that the log describes."""
    lines = plain_lines(text)
    text = "\n".join(lines)
    start = _DUMP.search(text)
    if start is None:
        raise ConfigError(
            f"{path}: the log does not print the job's config; run with job.print_config (print_args before 0.2, "
            "debug.print_config in config functions), or give the TOML"
        )
    dump = balanced(text, start.end())
    if dump is None:
        raise ConfigError(f"{path}: the printed config is cut off before its end; give the whole log")
    tree = _literal(path, dump)
    later = "model_spec" in tree
    if not later and not tree.keys() & _SECTIONS:
        raise ConfigError(f"{path}: the printed config is not torchtitan's{near('training', tree)}")
    return (as_toml(tree) if later else tree), later, _devices(text), from_log(path, text)


def _literal(path: str, dump: str) -> Tree:
    for read in (json.loads, ast.literal_eval):
        try:
            tree = read(dump)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        if isinstance(tree, dict):
            return tree
    raise ConfigError(
        f"{path}: the printed config is neither JSON nor a Python dict; lines of several ranks may be mixed"
    )


def _devices(text: str) -> int | None:
    """World size: the product of the mesh that torchtitan builds, else the launcher's."""
    product = 1
    if found := _MESH.search(text):
        for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
            degree = re.search(rf"\b{name}=(\d+)", found[1])
            product *= int(degree[1]) if degree else 1
        return product
    if old := _OLD_MESH.search(text):
        for each in old[2].split(","):
            product *= int(each)
        return product
    return devices_in(text)
