"""torchtitan: its TOML job configs, its config functions (read, never run), and logs that print the config."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Mapping
from math import prod
from pathlib import PurePath
from typing import Any

from steptime.base.config import ConfigError, near
from steptime.launch.devices import devices_in, still_true, told, written
from steptime.launch.job_keys import JobKeys
from steptime.launch.keys import KeyTable, flatten, is_costly, load_table, read_keys
from steptime.launch.logs.printed_config import balanced, plain_lines
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.python.config_functions import Tree, read_function
from steptime.launch.python.config_values import CLASS, Computed, split_path
from steptime.launch.reading import OTHER_MODEL, Env, LaunchFlag, Reading, Sets
from steptime.launch.torchtitan.batch import by_tokens, is_in_tokens
from steptime.launch.torchtitan.checkpointing import option_of
from steptime.launch.torchtitan.converters import put_converters
from steptime.launch.torchtitan.flavors import family_of, flavor_of, from_log, known_models
from steptime.launch.torchtitan.graph_trainer import CONVERSION, NO_CAPTURES, in_release, read_converted, with_defaults
from steptime.launch.torchtitan.plan_sections import config_of
from steptime.launch.torchtitan.scripts import is_steps_alone, named_by

_DUMP = re.compile(r"Running with (?:args|configs): (?=\{)")
_MESH = re.compile(r"Building device mesh with parallelism: (.*)")
_OLD_MESH = re.compile(r"Building \d-D device mesh with \[([^]]*)\], \[([\d, ]+)\]")
_SPEC = ("name", "flavor", "attn_backend", "non_blocking_capacity_factor", "num_mtp_layers")
LOSS = "loss.class"
_SECTIONS = {"job", "model", "training", "parallelism", "activation_checkpoint", "optimizer", "metrics", "checkpoint"}


def read_torchtitan(
    path: str,
    text: str,
    env: Env = None,
    sets: Sets = None,
    nearby: NearbyFiles | None = None,
    tree: Tree | None = None,
) -> Reading:
    """A JOB.toml, a script that names one, a log that prints the config, or a config function (FILE.py:FUNCTION).

    `env` may give the number of devices (WORLD_SIZE, or NGPU and NNODES). `sets`: dotted keys that the user sets; settings that
    no file gives (parallelism.dp, model) are taken from them. `tree`: the config of a file that is read already.

    Raises:
        ConfigError: one line per problem: no torchtitan config, keys that it does not have, a value that is computed, an unknown
            flavor, contradictory batch sizes, or unknown number of devices.
    """
    table, nearby = load_table("torchtitan"), nearby or NearbyFiles()
    file = split_path(path)[0]
    tree, flags, devices, model, jobs = _read(path, text, dict(env or {}), nearby, tree)
    later = file.endswith(".py") or CLASS in tree or "model_spec" in tree
    said = flatten(as_toml(tree) if later else tree) | flags
    if str(said.get("checkpoint.create_seed_checkpoint")).lower() == "true":
        raise ConfigError(f"{path}: checkpoint.create_seed_checkpoint: this job does not train")
    devices, notes = (devices, []) if (devices := devices or devices_in("", env)) else _written(said, text, file)
    _no_computed(file, said, table)
    defaults = table.raw["functions"] | option_of(nearby) if later else {}
    if file.endswith(".py") and in_release(text, nearby):
        defaults[NO_CAPTURES] = False
    table = table._replace(framework=defaults.pop("framework", table.framework))
    if is_in_tokens(said):
        table = by_tokens(table)
        defaults.pop(LOSS, None)
    keys = JobKeys(path, table, read_keys(said, table), defaults=defaults, sets=sets)
    keys.nearby = nearby
    keys.notes += still_true([*jobs, *notes], sets)
    if devices is not None and told(sets, "parallelism.dp") is None:
        keys.assumed_flags.append(LaunchFlag("devices", str(devices), "used", "parallelism.dp"))
    version = re.search(r"torchtitan version: (\d+\.\d+\.\d+)", "\n".join(plain_lines(text)))
    named = version[1] if version and version[1] != "0.0.0" else ""
    release = "" if later else _release(keys, named)
    own = {"vocab_sz": entries} if (entries := keys.whole("training.vocab_size")) else {}
    model = told(sets, "model") or model or flavor_of(keys, of_function=later) | own
    reading = keys.reading(config_of(keys, model, devices, release))
    return reading._replace(framework=f"torchtitan {named or release[1:]}") if named or release else reading


def _read(
    path: str, text: str, env: dict[str, str], nearby: NearbyFiles, tree: Tree | None
) -> tuple[Tree, dict[str, Any], int | None, Any, tuple[str, ...]]:
    """The config of a file, the keys that a script sets over it, devices and model of a log or a script, and a script's notes.

    Raises:
        ConfigError: as `read_torchtitan`.
    """
    if tree is not None:
        return tree, {}, None, None, ()
    file, function = split_path(path)
    if named := named_by(path, text, env, nearby):
        own = _function(named.file, named.text, named.function, nearby) if named.function else None
        tree = _toml(named.file, named.text) if own is None else own
        return tree, named.over, named.devices, None, named.notes
    if file.endswith(".py"):
        return _function(file, text, function, nearby), {}, None, None, ()
    if not file.endswith(".toml") and _is_log(text):
        text = "\n".join(plain_lines(text))
        return _printed(path, text), {}, _devices(text), from_log(path, text), ()
    return _toml(path, text), {}, None, None, ()


def _release(keys: JobKeys, named: str) -> str:
    """The release of the profile: the log's own, else 0.1 where keys are spelled as up to then, else the last with TOML files."""
    older = any(item.name != item.key for item in keys.given)
    return "@0.1" if (named.startswith("0.1") if named else older) else "@0.2"


# --- TOML ----------------------------------------------------------------------------------------------------------------


def _toml(path: str, text: str) -> Tree:
    try:
        tree = tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, or a number of thousands of digits
        raise ConfigError(f"{path}: not valid TOML ({error}), nor a log that prints torchtitan's config") from None
    if not tree.keys() & {"training", "parallelism"} or not all(isinstance(tree[key], dict) for key in tree):
        raise ConfigError(f"{path}: not a torchtitan job config: no section training or parallelism")
    return tree


def _written(said: Mapping[str, Any], text: str, file: str) -> tuple[int | None, list[str]]:
    """The devices that the file's name or a comment says, and the note on it; neither where the file sets the degree."""
    degrees = [value for key, value in said.items() if key.endswith("data_parallel_shard_degree")]
    return written(file, text) if degrees in ([], [-1]) else (None, [])


# --- config functions ------------------------------------------------------------------------------------------------------


_OTHER = {
    "Controller": "reinforcement learning: a trainer that waits for generators",
    "RLTrainer": "reinforcement learning: a trainer that waits for generators",
    "FluxTrainer": f"flux, {OTHER_MODEL} (it makes images)",
}
"""Classes whose configs are of no training step that is modeled (torchtitan/experiments/rl/controller.py, models/flux)."""


def _function(path: str, text: str, name: str, nearby: NearbyFiles) -> Tree:
    """The config of a function."""
    returned = re.search(rf"^def {re.escape(name)}\([^)]*\) -> (\w+)\.Config:", text, re.MULTILINE)
    if returned and returned[1] in _OTHER:
        raise ConfigError(f"{path}:{name}: {_OTHER[returned[1]]}; not modeled")
    if re.search(rf"\b{CONVERSION}\b", text):
        name, tree = read_converted(path, text, name, nearby)
    else:
        name, tree = read_function(path, text, name, "Trainer.Config")
    if "MultiModalTokenizer" in str(tree.get("tokenizer")):
        raise ConfigError(f"{path}:{name}: {OTHER_MODEL} (it takes images in addition to text); not modeled")
    if isinstance(tree.get("model_spec"), dict) and "name" not in tree["model_spec"]:
        words = known_models()
        here = [nearby.folder.resolve()] if nearby.folder is not None else []
        folders = [PurePath(path).parent, *here]
        own = next((folder.name for folder in folders if folder.name in words or folder.parent.name == "models"), "")
        of_file = next((word for word in words if word in PurePath(path).name), "")
        named = family_of([name]) or of_file or family_of(re.findall(r"^def (\w+)\(", text, re.MULTILINE)) or name
        tree["model_spec"]["name"] = own or named
    return tree


def as_toml(tree: Tree) -> Tree:
    """The sections of a Trainer.Config by the names of the TOML files."""
    tree = {key: value for key, value in with_defaults(tree).items() if key != CLASS}
    spec = tree.pop("model_spec", None) or tree.pop("model", None)
    converters = tree.pop("model_converters", None)
    given = list(converters.get("converters") or []) if isinstance(converters, dict) else []
    if isinstance(spec, dict):
        spec = {"flavor": (spec.get("_args_") or [None])[0], **spec}
        tree["model"] = {key: spec[key] for key in _SPEC if spec.get(key) is not None}
        # what statements set in it (model_spec.model.layer.attention.attn_backend = ...), by the last name
        inside = spec.get("model")
        set_in = inside if isinstance(inside, dict) and CLASS not in inside else {}
        tree["model"] |= {name.rpartition(".")[2]: value for name, value in flatten(set_in).items()}
        if spec.get("moe_comm_backend") is not None:
            tree.setdefault("parallelism", {})["expert_parallel_comm_backend"] = spec["moe_comm_backend"]
        given += spec.get("converters") or [] if isinstance(spec.get("converters"), list) else []
    put_converters(tree, given, of_spec=converters is None)
    checkpointing = tree.get("activation_checkpoint", {})
    if checkpointing is None:
        tree["activation_checkpoint"] = {"mode": "none"}
    elif isinstance(checkpointing, dict) and "mode" not in checkpointing:
        found = re.match(r"(Full|Selective|MemoryBudget)AC", str(checkpointing.get(CLASS, "")))
        if found:
            words = {"MemoryBudget": "memory_budget"}
            tree["activation_checkpoint"] = checkpointing | {"mode": words.get(found[1], found[1].lower())}
    if isinstance(optimizer := tree.get("optimizer"), dict):
        kind = str(optimizer.get(CLASS, ""))
        early = {"early_step_in_backward": True} if "InBackward" in kind else {}
        tree["optimizer"] = ({"name": "AdamW"} if kind == "default_adamw" else {}) | optimizer | early
    if isinstance(tree.get("loss"), dict):
        inner = tree["loss"].get("loss_fn")
        whole = not isinstance(inner, dict) or "Chunked" not in str(tree["loss"].get(CLASS))
        named = str(tree["loss"].get(CLASS, "CrossEntropyLoss")).removesuffix(".Config")
        tree["loss"] = {"class": named if whole else "ChunkedCELoss"}
    return {key: _bare(value) for key, value in tree.items() if value is not None}


def _bare(value: Any) -> Any:
    return {key: _bare(item) for key, item in value.items() if key != CLASS} if isinstance(value, dict) else value


def _no_computed(path: str, said: Mapping[str, Any], table: KeyTable) -> None:
    problems = []
    for key, value in said.items():
        items = value if isinstance(value, list) else [value]
        found = next((item for item in items if isinstance(item, Computed)), None)
        if found and is_costly(key, table, unknown=True):
            fix = "use a literal value, or give a log of the job"
            problems.append(f"{path}:{found.line}: {key}: computed ({found.code}); {fix}")
    if problems:
        raise ConfigError(problems)


# --- logs ------------------------------------------------------------------------------------------------------------------


def _is_log(text: str) -> bool:
    words = "[titan]" in text or "torchtitan.train" in text
    return bool(words or _DUMP.search(text) or _MESH.search(text) or is_steps_alone(text))


def _printed(path: str, text: str) -> Tree:
    """The config that a log prints."""
    start = _DUMP.search(text)
    if start is None:
        raise ConfigError(
            f"{path}: the log does not print the job's config; run with job.print_config (print_args before 0.2, "
            "debug.print_config in config functions), or give the TOML"
        )
    dump = balanced(text, start.end())
    if dump is None:
        raise ConfigError(f"{path}: the printed config is truncated; give the whole log")
    tree = _literal(path, dump)
    if not tree.keys() & {"model_spec", *_SECTIONS}:
        raise ConfigError(f"{path}: the printed config is not torchtitan's{near('training', tree)}")
    return tree


def _literal(path: str, dump: str) -> Tree:
    for read in (json.loads, ast.literal_eval):
        try:
            tree = read(dump)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        if isinstance(tree, dict):
            return tree
    what = "the printed config is neither JSON nor a Python dict"
    raise ConfigError(f"{path}: {what}; lines of several ranks may be interleaved")


def _devices(text: str) -> int | None:
    """World size: the product of the mesh that torchtitan builds, else the launcher's."""
    if found := _MESH.search(text):
        return prod(int(degree) for degree in re.findall(r"\b(?:pp|dp_replicate|dp_shard|cp|tp)=(\d+)", found[1]))
    if old := _OLD_MESH.search(text):
        return prod(map(int, old[2].split(",")))
    return devices_in(text)
