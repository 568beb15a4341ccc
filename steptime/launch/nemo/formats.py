"""NeMo and Megatron-Bridge: hydra YAML (NeMo 1), recipe dumps (NeMo 2.0), ConfigContainer dumps, and logs with these."""

from __future__ import annotations

import ast
import posixpath
import re
from itertools import count, takewhile
from typing import Any

from steptime.base.config import ConfigError
from steptime.base.document import parse_mapping
from steptime.job.edit import put
from steptime.launch.devices import devices_in, stated, still_true, told
from steptime.launch.keys import flatten, is_costly, load_table
from steptime.launch.logs.printed_config import block, plain_lines
from steptime.launch.megatron.translation import object_keys, plan_of
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.nemo.bridge_recipe import read_override, read_program, read_recipe
from steptime.launch.nemo.bridge_started import STARTERS, read_started
from steptime.launch.nemo.hydra import read_one
from steptime.launch.nemo.nemo_run import of_command_line, read_two
from steptime.launch.nemo.targets import CLASS, NemoConfig, class_of, methods_of, simplify
from steptime.launch.python.config_values import split_path
from steptime.launch.reading import Env, LaunchFlag, Reading, Sets
from steptime.launch.shell.processes import Word, flags_of
from steptime.launch.shell.scope import argument_asked
from steptime.launch.shell.script import Script, read_script, variables_of

_MARKS = re.compile(r"Task Configuration|Experiment configuration \*+")
_LOG = re.compile(
    r"^\s*(\[NeMo [IW] |INFO:|\[rank ?\d+\]|\d{4}-\d\d-\d\d[ T]\d\d:|Training epoch|\[after |done with setup)",
    re.MULTILINE,
)
_FLAT = re.compile(r"^\s*([A-Za-z_]\w*(?:\.\w+|\[[^]]+\])+) = (.+)$")
_STAGES = ("training", "fine_tuning", "peft")
"""Stages of NeMo's launcher that train, each with a folder of configs."""
_RELEASE = re.compile(r"nemo[:@](\d\d\.\d\d)|NeMo[ -](?:Framework )?(\d\d\.\d\d)")


def read_nemo(path: str, text: str, env: Env = None, sets: Sets = None, nearby: NearbyFiles | None = None) -> Reading:
    """A NeMo or Megatron-Bridge config, or a log that prints it, as a config.

    `env` may give the number of devices (WORLD_SIZE). `sets`: dotted keys that the user sets; settings that no file gives
    (parallelism.dp, model, model.vocab_sz) is taken from them.

    Raises:
        ConfigError: one line per problem: neither framework's config, keys that it does not have, a model that is not modeled,
            contradictory sizes, or unknown number of devices or vocabulary.
    """
    nearby, (file, function) = nearby or NearbyFiles(), split_path(path)
    if file.endswith(".py"):
        words = takewhile(bool, ((env or {}).get(str(number), "") for number in count(1)))
        return read_recipe(path, file, text, function, sets, nearby, [*words])
    script = None
    if path.endswith((".sh", ".slurm", ".sbatch")) or re.match(r"#!|#SBATCH", text):
        script = read_script(text, path, dict(env or {}), nearby)
        if (started := _started(path, script, sets, nearby)) is not None:
            return started
    tree, log = _of_script(path, script, nearby) if script else _tree(path, text)
    found, stage = _RELEASE.search(text), tree.get("training")
    tree = stage if isinstance(stage, dict) and "model" in stage else tree
    tree = tree["ConfigContainer"] if isinstance(tree.get("ConfigContainer"), dict) else tree
    variables = dict(env or {}) | variables_of(nearby)
    config = NemoConfig(path, tree, devices_in(log, env), sets, (found[1] or found[2]) if found else "", variables)
    model, trainer = tree.get("model"), tree.get("trainer")
    sections = tree.keys() & {"ddp", "mixed_precision", "logger", "train"}
    bridge = class_of(model).startswith("megatron.bridge") or bool(sections)
    if class_of(tree).endswith("ConfigContainer") or (isinstance(model, dict | None) and trainer is None and bridge):
        return _bridge(config, nearby)
    by_class = isinstance(trainer, dict) and (class_of(trainer) or "strategy" in trainer)
    if by_class and tree.keys() & {"data", "optim"}:
        return read_two(config)
    if isinstance(trainer, dict) and isinstance(model, dict) and ("optim" in model or not log):
        return read_one(config)
    if log and isinstance(trainer, dict):
        raise ConfigError(f"{path}: the printed config is truncated; give the whole log")
    if not isinstance(model, dict) and tree.keys() >= {"num_layers", "hidden_size"}:
        what = "the model of a NeMo checkpoint, without the trainer, precision and optimizer of a job"
        raise ConfigError(f"{path}: {what}; give the config that trains it")
    raise ConfigError(
        f"{path}: not a config of NeMo or Megatron-Bridge: neither trainer and model with its optim (NeMo 1), nor data, trainer "
        "and model by class (NeMo 2.0), nor a ConfigContainer"
    )


def _started(path: str, script: Script, sets: Sets, nearby: NearbyFiles) -> Reading | None:
    """A recipe of Megatron-Bridge that a script starts by name, or a program over one; None of other frameworks."""
    if posixpath.basename(script.program) in STARTERS:
        return read_started(path, script, sets, nearby)
    text = nearby.text(script.program) or "" if script.program.endswith(".py") else ""
    if "megatron.bridge" not in text:
        return None
    file = nearby.path(script.program)
    own = NearbyFiles(file and file.parent)
    devices = stated(script.devices, script.notes, sets)
    reading = read_program(path, script.program, text, script.arguments, sets, own, devices)
    if reading is not None:
        reading.config.setdefault("notes", []).extend(still_true(script.notes, sets))
    return reading


def _of_script(path: str, script: Script, nearby: NearbyFiles) -> tuple[dict[str, Any], str]:
    """The config that a script names (hydra's --config-path and --config-name) under the script's overrides; no log."""
    flags = flags_of([word.text.lstrip("+") for word in script.arguments if not _is_blank_file(word)])
    if script.program == "llm":
        return of_command_line(path, "".join(word.text for word in script.arguments[:1]), flags), ""
    said = dict(flags)
    stage = next((name for name in _STAGES if name in said), "")
    if posixpath.basename(script.program) == "main.py" and stage:  # NeMo's launcher, with one of its own configs
        name = f"{script.program.removesuffix('main.py')}conf/{stage}/{said[stage]}.yaml"
        said = {key.removeprefix(f"{stage}."): value for key, value in flags if key.startswith(f"{stage}.")}
    else:
        usual = load_table("nemo1").raw["programs"].get(posixpath.basename(script.program), "")
        own = str(said.pop("config_name", usual)).removesuffix(".yaml")
        if not own:
            what = f"line {script.line} launches {script.program}, which names no config"
            raise ConfigError(f"{path}: {what}; give the log that prints the job's config")
        name = f"{said.pop('config_path', 'conf')}/{own}.yaml"
    if asked := argument_asked(name):
        raise ConfigError(f"{path}: line {script.line}: {asked}")
    blank = _blank(path, script)
    try:
        text = nearby.needed(name, f"{path}: line {script.line} reads")
    except ConfigError as error:
        raise ConfigError([*error.problems, *blank]) from None
    if blank:
        raise ConfigError(blank)
    tree = parse_mapping(text, name)
    for key, value in said.items():
        put(tree, key, value)
    return tree, ""


def _is_blank_file(word: Word) -> bool:
    """Whether a word gives the file of the tokenizer by a variable without a value; then the config's own tokenizer counts."""
    return bool(word.unresolved) and ".tokenizer.model=" in f".{word.text.lstrip('+')}"


def _blank(path: str, script: Script) -> list[str]:
    """A line for the variables without a value in the overrides that matter."""
    table, missing = load_table("nemo1"), dict[str, None]()
    for word in script.arguments:
        key = re.sub(rf"^(?:{'|'.join(_STAGES)})\.", "", word.text.lstrip("+").partition("=")[0])
        if is_costly(key, table) and not _is_blank_file(word):
            missing |= dict.fromkeys(unknown.variable for unknown in word.unresolved if unknown.variable.isidentifier())
    if not missing:
        return []
    named, fix = ", ".join(f"${name}" for name in missing), " ".join(f"{name}=..." for name in missing)
    have = "has" if len(missing) == 1 else "have"
    return [f"{path}: line {script.line}: {named} {have} no value; write {fix} before the command"]


def _tree(path: str, text: str) -> tuple[dict[str, Any], str]:
    """The config as nested mappings, and the log around it ("" where the file is the config alone)."""
    lines = plain_lines(text)
    marks = [i for i, line in enumerate(lines) if _MARKS.search(line)]
    if not marks and not _LOG.search(text):
        flat = [found for line in lines if (found := _FLAT.match(line))]
        if len(flat) > len([line for line in lines if line.strip()]) // 2:
            return _unflatten(flat), ""
        return parse_mapping(text, path), ""
    if not marks:
        raise ConfigError(
            f"{path}: the log does not print the job's config (Task Configuration, or Experiment configuration); give its YAML"
        )
    return parse_mapping("\n".join(_printed(path, lines, marks[0])), path), "\n".join(lines)


def _printed(path: str, lines: list[str], mark: int) -> list[str]:
    """The lines of the config after its heading."""
    for start in range(mark + 1, min(mark + 8, len(lines))):
        if re.match(r"\s*[A-Za-z_]\w*:( |$)", lines[start]) and not _LOG.match(lines[start]):
            found = block(lines, start)
            words = {line.partition(":")[0] for line in found if line[:1].strip()}
            if "_target_" in words and "train" not in words and "trainer" not in words:
                raise ConfigError(f"{path}: the printed config is truncated; give the whole log")
            return found
    raise ConfigError(f"{path}: the printed config is truncated after its heading; give the whole log")


def _unflatten(flat: list[re.Match[str]]) -> dict[str, Any]:
    """Lines `a.b = value` as fiddle prints them (fiddle/printing.py, as_str_flattened) as nested mappings, without the unset."""
    tree: dict[str, Any] = {}
    for found in flat:
        if found[2].startswith("<[unset"):
            continue
        *parents, last = re.findall(r"\w+", found[1])
        node = tree
        for part in parents:
            node = node.setdefault(part, {}) if isinstance(node.get(part, {}), dict) else {}
        try:
            node[last] = ast.literal_eval(found[2])
        except (ValueError, SyntaxError):
            node[last] = found[2]
    return tree


def _bridge(config: NemoConfig, nearby: NearbyFiles) -> Reading:
    """A ConfigContainer, or settings over a recipe."""
    path, tree, devices, sets, *_ = config
    model = tree.get("model") or {}
    whole = isinstance(model, dict) and "num_layers" in model
    if isinstance(model, dict) and not whole and (found := read_override(path, tree, sets, nearby)) is not None:
        return found
    if not whole:
        # a model by --set is not enough: precision, states and overlap are the recipe's, and not in the file either
        raise ConfigError(
            f"{path}: an override of a recipe, not the whole config: no model.num_layers; give the log that prints the job's "
            "Task Configuration, or the run_config.yaml of a checkpoint"
        )
    said = flatten({key: simplify(section) for key, section in tree.items() if key != CLASS and section})
    keys = object_keys(said | methods_of(tree), load_table("megatron_bridge"), path, sets)
    if devices is not None and told(sets, "parallelism.dp") is None:
        keys.assumed_flags.append(LaunchFlag("devices", str(devices), "used", "parallelism.dp"))
    return plan_of(keys, config.profile("megatron-bridge"), devices)
