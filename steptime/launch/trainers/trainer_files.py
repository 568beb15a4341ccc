"""What the files of a trainer say: YAML, TOML, and launch scripts with the configs that they name, as dotted keys."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from steptime.base.config import ConfigError
from steptime.base.document import parse_mapping
from steptime.launch.devices import SET_DEVICES, of_a_run, taken, written
from steptime.launch.interpolate import resolve
from steptime.launch.job_keys import text_of
from steptime.launch.keys import KeyTable, flatten, rule_of, spelled
from steptime.launch.nearby_files import NearbyFiles, read_nearby
from steptime.launch.python.program_calls import ADAPTERS_OF, is_read, of_adapters, of_program
from steptime.launch.python.program_setup import of_preferences, other_training
from steptime.launch.python.program_values import defaults_in, file_of
from steptime.launch.shell.processes import flags_of, split_words
from steptime.launch.shell.script import Script, read_script, variables_of
from steptime.launch.trainers import config_sections as sections
from steptime.launch.trainers.adapters import switch_of
from steptime.launch.trainers.trl_defaults import of_trl


class Said(NamedTuple):
    """What the files of a job say."""

    keys: dict[str, Any]
    """Dotted."""
    devices: int | None = None
    """How many processes a script starts."""
    unclear: Mapping[str, str] = {}
    """Keys whose value is known only at run time, and why."""
    program: str = ""
    """The training program, where it is in the folder of its script."""
    defaults: Mapping[str, Any] = {}
    """Defaults of that program's arguments."""
    notes: tuple[str, ...] = ()
    code: str = ""
    """That program's."""


_SPAWNED = re.compile(r"\A(?:[^\n]*\n){0,50}?run sh: `([^`\n]+)`[\s\S]*")
"""The command with which ms-swift starts its processes, at the beginning of their log."""


def own_defaults(said: Said, table: KeyTable, nearby: NearbyFiles) -> dict[str, Any]:
    """Defaults of the program of a script, for keys that the table uses.

    The precision of DeepSpeed-Chat's programs is in its utils/ds_utils.py (microsoft/DeepSpeedExamples).
    """
    named = {switch_of(spelled(name, table), value, table): value for name, value in said.defaults.items()}
    if "get_train_ds_config(" in said.code:
        code = re.sub(r"#.*", "", nearby.text("utils/ds_utils.py") or "")
        half = re.search(r"[\"'](bf16|fp16)[\"']: *\{\s*[\"']enabled[\"']: *True", code)
        named |= {half[1]: True} if half else {}
    known = {spelled(name, table) for name in said.keys} | named.keys()
    named |= of_program(said.code, said.defaults, known, said.keys)
    named = of_trl(said.code, nearby, named | {**said.keys}) | named
    return {key: value for key, value in named.items() if key in table.rules and table.rules[key].status == "used"}


def said_in(path: str, text: str, table: KeyTable, env: dict[str, str], nearby: NearbyFiles) -> Said:
    """The keys of a file, of the configs and the program that it names, and of accelerate's config in the same folder.

    Raises:
        ConfigError: one line per problem; the job does not train, or trains on rewards or preferences.
    """
    found = _in_files(path, text, table, env, nearby)
    # recipes/zephyr-7b-beta/dpo/config_full.yaml
    folder = Path(path).parent.name if "model_name_or_path" in found.keys else ""
    if kind := other_training(found.code) or of_preferences(found.program or folder):
        what = f"runs {found.program}" if found.program else f"a recipe of {folder}"
        raise ConfigError(f"{path}: {what}: {kind} is not modeled")
    said = found.keys
    configs = [config for config in nearby.added if config.suffix in {".yaml", ".yml"}]
    others: list[Path] = []
    if not configs and not found.program and "model_name_or_path" in said:
        started = sections.of_readme(path, nearby.repository())
        if (config := _of_recipes(path, said, table, nearby, started)) is not None:
            configs = [config]
            found = found._replace(notes=(*found.notes, sections.BY_README.format(config.name)))
        elif not started and not any(said.get(key) for key in ("use_peft", "load_in_4bit")):
            others = [other for name in table.raw.get("recipes_may") or [] if (other := nearby.path(name))]
        said = sections.costly(started, table) | said
        processes = started.get("num_processes")
        said = ({"num_processes": processes} if isinstance(processes, int) else {}) | said
        if not isinstance(processes, int | None):
            why = f"number of devices unknown ({processes} processes, by the README or script that starts it); {SET_DEVICES}"
            found = found._replace(unclear={**found.unclear, "devices": why})
    if not configs and not found.program and (why := sections.may_launch(path, said, others)):
        found = found._replace(unclear={**found.unclear, "sharding": why})
    counted = found.devices is not None or "devices" in found.unclear or "num_processes" in said
    if table.raw.get("launcher", {}).get("devices") and not counted and not found.program:
        found = _as_started(path, found, table, env, nearby)
    for config in configs:
        said = flatten(parse_mapping(read_nearby(config), str(config), repeats=True)) | said
    unset = "none" if table.raw.get("none_is_unset") else None
    said = {name.replace("-", "_"): None if str(value).lower() == unset else value for name, value in said.items()}
    if said.get("global_world_size") == 1:  # of ms-swift: one process may see several devices
        del said["global_world_size"]
    if key := sections.without_training(said):
        raise ConfigError(f"{path}: {key} {text_of(said[key])}: this job does not train")
    return found._replace(keys=said)


def _as_started(path: str, found: Said, table: KeyTable, env: dict[str, str], nearby: NearbyFiles) -> Said:
    """A config with the devices on which the one script in its folder that names it starts it, if that says how many."""
    name = nearby.script_of(path) if path.endswith((".yaml", ".yml")) else ""
    try:
        script = _in_files(name, nearby.text(name) or "", table, env, nearby) if name else None
    except ConfigError:
        script = None
    if script is None or script.devices is None or "devices" in script.unclear:
        return found
    note = taken(script.devices, f"{name}, which starts it")
    return found._replace(devices=script.devices, notes=(*found.notes, note))


def _of_recipes(
    path: str, said: Mapping[str, Any], table: KeyTable, nearby: NearbyFiles, started: Mapping[str, Any]
) -> Path | None:
    """The config of accelerate with which a recipe in its repository is started; None for adapters, or where it names its own."""
    own = {"deepspeed", "fsdp", "fsdp_config", "distributed_type", "use_peft", "load_in_4bit"}
    if any(said.get(key) for key in own):
        return None
    if name := started.get("config_file"):
        nearby.needed(str(name), f"{path}: is started with")
    usual = "recipes_fsdp" if re.search(r"(?m)^#.*\bwith FSDP", nearby.text(path) or "") else "recipes_with"
    names = [started.get("config_file")] if started else table.raw.get(usual) or []
    return next((found for name in names if name and (found := nearby.path(str(name)))), None)


def _in_files(path: str, text: str, table: KeyTable, env: dict[str, str], nearby: NearbyFiles) -> Said:
    """The same as each file has them."""
    if path.endswith(".toml"):
        try:
            return Said(flatten(tomllib.loads(text)))
        except ValueError as error:  # TOMLDecodeError, or a number of thousands of digits
            raise ConfigError(f"{path}: not valid TOML ({error})") from None
    text = _SPAWNED.sub(r"\1\n", text)
    if path.endswith((".log", ".out")) and text.count("\n") > 1:
        what = "a log that does not print the job's config; give the config or the script"
        raise ConfigError(f"{path}: {what}, or compare both: 3dtrn validate --log {path} --plan FILE")
    if not re.match(r"\s*(#[^\n]*\n\s*|---\s)*(\{|[\w\"'-]+\s*:(\s|$))", text):
        script = read_script(text, path, env, nearby)
        script = script._replace(arguments=split_words(script.arguments))
        said = sections.of_defaults(table, nearby, script.program) | _configs(script, path, nearby, table)
        said |= sections.of_accelerate(script, table) | sections.of_subcommand(script, table)
        flags = flags_of([word.text for word in script.arguments])
        said |= {name: value for name, value in flags if not is_read(name, value)}
        unclear = _without_value(script) | ({} if "1" in env else _of_words(text))
        if said.get("deepspeed") in (True, None) and isinstance(said.get("deepspeed_config"), str):
            # a switch and a file (deepspeed/__init__.py, add_config_arguments)
            said["deepspeed"] = said.pop("deepspeed_config")
        devices = sections.devices_of(script, table, said, unclear)
        file = file_of(script.program, nearby) if "own_methods" in table.raw else script.program
        name = file.rpartition("/")[2]
        if kind := of_preferences(next((word.text for word in script.arguments[:1] if word.text.isalnum()), "")):
            raise ConfigError(f"{path}: runs {script.program} {script.arguments[0].text}: {kind} is not modeled")
        code = (nearby.text(file) or "") if name.endswith(".py") else ""
        return Said(said, devices, unclear, name, defaults_in(code), (*script.launched(), *script.notes), code)
    text = re.sub(r"(?<=: )!include +(\S+)", lambda found: _included(found[1], nearby), text)
    tree = sections.of_section(parse_mapping(text, path, repeats=True), table)
    tree = resolve(tree, env | variables_of(nearby))
    tree, program = sections.of_wandb(tree) if "_wandb" in tree else (tree, "")
    if isinstance(inline := tree.get("deepspeed"), dict) and inline:
        nearby.written["the deepspeed section"] = json.dumps(inline)
        tree["deepspeed"] = "the deepspeed section"
    said = sections.of_defaults(table, nearby, "") | flatten(tree)
    counts = {key for key, rule in table.rules.items() if rule.note in {"@devices", "@per_node", "@nodes"}}
    named, why = written("" if counts & {spelled(name, table) for name in said} else path, text)
    return Said(said, named, of_a_run(text), program=program, notes=tuple(why))


def _included(name: str, nearby: NearbyFiles) -> str:
    """The YAML of `!include FILE` on one line; an empty mapping where the file is not found."""
    text = nearby.text(name)
    return json.dumps(parse_mapping(text, name)) if text is not None else "{}"


def _of_words(text: str) -> dict[str, str]:
    """What to do about a script's own words, where it passes them on."""
    fix = " (the script passes its own words on; give both as one string: 'SCRIPT ARG ...')"
    return {"$@": fix} if re.search(r"^[^#\n]*\$[@*]", text, re.MULTILINE) else {}


def _without_value(script: Script) -> dict[str, str]:
    """Keys whose value is not known without a run, and what to do about each."""
    own = f"use_deepspeed is an argument of {script.program}"
    found = {} if "accelerate" in script.launchers else {"use_deepspeed": own}
    for i, word in enumerate(script.arguments):
        said = flags_of([before.text for before in script.arguments[: i + 1]][-2:]) if word.unresolved else []
        for name, _ in said[-1:]:
            found[name] = f"line {word.line}: {name}: {word.unresolved[0].told('write the value into the script')}"
    return found


def _configs(script: Script, path: str, nearby: NearbyFiles, table: KeyTable) -> dict[str, Any]:
    """The keys of the configs that a launch command names (`llamafactory-cli train job.yaml`, `--config_file fsdp.yaml`).

    A JSON file of --fsdp_config is the trainer's own (training_args.py, fsdp_config); it is read where it is found. One of
    --lora_config has the rank and the targets of the adapters of a custom program.
    """
    said: dict[str, Any] = {}
    words = [*script.before, *script.arguments]
    for word, last in zip(words, ["", *(word.text for word in words)], strict=False):
        flag, equals, name = word.text.rpartition("=")
        if name.endswith(".json") and re.fullmatch(r"--fsdp[-_]config", flag if equals else last):
            text = nearby.text(name)
            said |= flatten({"fsdp_config": parse_mapping(text, name, repeats=True)}) if text is not None else {}
            continue
        if name.endswith(".json") and (flag if equals else last) == "--train_args_file":
            # yangjianxin1/Firefly train.py, setup_everything, and programs after it: HfArgumentParser.parse_json_file
            text = nearby.needed(name, f"{path}: line {word.line} reads")
            said |= flatten(parse_mapping(text, name, repeats=True))
            continue
        if name.endswith(".json") and ADAPTERS_OF.fullmatch(flag if equals else last):
            said |= of_adapters(nearby.needed(name, f"{path}: line {word.line} reads"), name)
            continue
        accelerates = re.fullmatch(r"--config[-_]file", flag if equals else last)
        if (folder := table.raw.get("configs_by_name")) and last == "--config" and not name.endswith((".yaml", ".yml")):
            name = f"{folder}/{name}.yaml"
        first = not equals and (word in script.arguments[:1] or last.endswith(".py"))
        argument = (accelerates or first) and re.fullmatch(r"\$\{?\d+\}?", name)
        if not argument and not name.endswith((".yaml", ".yml")) and not (accelerates and name.endswith(".json")):
            continue
        if word.unresolved and word.unresolved[0].variable:
            raise ConfigError(f"{path}: line {word.line}: {word.unresolved[0].told('write it out')}")
        text = nearby.needed(name, f"{path}: line {word.line} reads")
        inside = flatten(parse_mapping(text, name, repeats=True))
        if name.rpartition("/")[2] == table.raw.get("defaults_file"):
            inside = {key: value for key, value in inside.items() if rule_of(spelled(key, table), table) is not None}
        said |= inside
    return said
