"""Recipes of Megatron-Bridge and of NeMo 2.0 in Python: functions that return a job's config, parsed without running them.

A function is followed through the modules in the folder of its file, as in a checkout of the framework; a base recipe that is not
found is known only by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import Any

from steptime.base.config import ConfigError, show
from steptime.launch.devices import told
from steptime.launch.keys import flatten, is_costly, load_table, table_file
from steptime.launch.megatron.translation import object_keys, plan_of
from steptime.launch.named_models import not_modeled
from steptime.launch.nearby_files import NearbyFiles, is_readable, read_nearby
from steptime.launch.nemo import bridge_table, nemo_run
from steptime.launch.nemo.bridge_programs import as_bridge_program, put_overrides
from steptime.launch.nemo.models import ask_for_sizes, changed, is_provided, model_of, model_of_name, with_own_class
from steptime.launch.nemo.nemo_programs import GIVE_LOG, as_function, put_vocabulary, read_train_call
from steptime.launch.nemo.targets import CLASS as TARGET
from steptime.launch.nemo.targets import NemoConfig, simplify
from steptime.launch.python.config_functions import CALLED, read_function
from steptime.launch.python.config_values import CLASS, FUNCTION, Computed
from steptime.launch.reading import OTHER_MODEL, LaunchFlag, Reading, Sets, refusals
from steptime.launch.shell.processes import Word, blanks, flags_of

BASES = r"_config$|^\w+_recipe$|_common$|_mixed$"
"""Functions of the framework that return configs, and those of its mixed precision."""
_DEFAULTS = "arguments of the program that are not given have its defaults"
_OVERLAPS = {
    "ddp.overlap_grad_reduce": True, "ddp.overlap_param_gather": True, "ddp.use_distributed_optimizer": True,
}  # fmt: skip
"""Its recipes' settings of ddp (recipes/common.py); the optimizer of those that fine-tune is distributed, without overlap."""
_TUNED = _OVERLAPS | {"ddp.overlap_grad_reduce": False, "ddp.overlap_param_gather": False}
_TP, _COUNTED = "model.tp_comm_overlap", r"_(\d+)gpus?_"


def read_recipe(
    path: str, file: str, text: str, function: str, sets: Sets, nearby: NearbyFiles, words: Sequence[str] = ()
) -> Reading:
    """A function that returns a ConfigContainer or a run.Partial (FILE.py:FUNCTION) as a config.

    `words`: the arguments of a program.

    Raises:
        ConfigError: one line per problem: no such function, or a setting that only a missing base recipe has and the user does
        not set.
    """
    if "ConfigContainer" in text or "megatron.bridge" in text:
        if not function and "-> ConfigContainer" not in text:
            reading = read_program(path, file, text, [Word(word, 0) for word in words], sets, nearby)
            if reading is not None:
                return reading
        return bridge_reading(path, read_function(file, text, function, "ConfigContainer", BASES, nearby), sets)
    return _run_partial(path, file, nemo_run.with_adapters(nemo_run.of_first_releases(text)), function, sets, nearby)


def _run_partial(path: str, file: str, text: str, function: str, sets: Sets, nearby: NearbyFiles) -> Reading:
    """A function that returns a run.Partial, or a program that trains one."""
    function = function or ("" if "-> run.Partial" in text else nemo_run.base_function(text))
    if not function and "-> run.Partial" not in text and (program := as_function(file, text)):
        text, function = program, FUNCTION
    if not function and "-> run.Partial" not in text and (called := read_train_call(path, file, text, sets, nearby)):
        return called
    _, tree = read_function(file, text, function, "run.Partial", "$^", nearby)
    for key in ("model", "trainer"):
        if function == FUNCTION and key in tree and not isinstance(tree[key], dict) and told(sets, "model") is None:
            raise ConfigError(f"{path}: {key} of the recipe is set to a value that is not read; {GIVE_LOG}")
    computed, base = nemo_run.without_computed(path, tree, sets), nemo_run.BASE.search(str(tree.get(CLASS)))
    if function == FUNCTION and not base:
        raise ConfigError(f"{path}: the program changes its recipe in a way that is not read; {GIVE_LOG}")
    own = [key for key, item in tree.items() if isinstance(item, dict) and item.get(CLASS) and key != "peft"]
    plain = with_own_class(path, text, nemo_run.by_target(tree), sets)
    if base:
        plain |= {key: {TARGET: "own"} | plain[key] for key in own}
        plain = nemo_run.over_recipe(path, base[1], plain, base[2])
        put_vocabulary(path, plain, sets)
    reading = nemo_run.read_two(NemoConfig(path, plain, None, sets, ""))
    reading.flags.extend(computed)
    if function == FUNCTION:
        reading.config.setdefault("notes", []).append(_DEFAULTS)
    return reading


def read_program(
    path: str, file: str, text: str, words: Iterable[Word], sets: Sets, nearby: NearbyFiles, devices: int | None = None
) -> Reading | None:
    """A program that starts with a config, with the words that it is given; None where it starts with none.

    Raises:
        ConfigError: one line per problem: also a word without a value, or one that takes a setting away (hydra's ~).
    """
    words = [word._replace(text=word.text.lstrip("+")) for word in words]
    said = dict(flags_of([word.text for word in words]))
    if (program := as_bridge_program(file, text, said)) is None:
        return None
    if blank := blanks(path, words, load_table("megatron_bridge")):
        raise ConfigError(blank)
    if away := next((word.text for word in words if word.text.startswith("~")), ""):
        raise ConfigError(f"{path}: {away} is not read; {GIVE_LOG}")
    name, tree = read_function(file, program.text, FUNCTION, "ConfigContainer", BASES, nearby)
    if program.overrides is not None:
        put_overrides(tree, program.overrides, said, path, nearby)
    reading = bridge_reading(path, (name, tree), sets, devices)
    reading.config.setdefault("notes", []).append(_DEFAULTS)
    return reading


def read_override(path: str, tree: dict[str, Any], sets: Sets, nearby: NearbyFiles) -> Reading | None:
    """A YAML file of settings over one of the framework's recipes; None where which recipe is not known.

    The recipe is that of the one program that names the file, in its folder or the one above, else that of the file's name.
    """
    folder = nearby.folder
    programs = [*folder.glob("*.py"), *folder.parent.glob("*.py")] if folder is not None else []
    texts = (read_nearby(program) for program in sorted(programs) if is_readable(program))
    named = {
        name for text in texts if PurePath(path).name in text for name in re.findall(r"\b\w+_pretrain_config\b", text)
    }
    stem = PurePath(path).stem
    after = {name for name in bridge_table.recipes() if re.match(rf"{name.removesuffix('_config')}(?:_|$)", stem)}
    bases = sorted(named or after)
    if len(bases) != 1 or bases[0] not in bridge_table.recipes():
        return None
    sections = {key: simplify(section) for key, section in tree.items() if section and key != "_target_"}
    return bridge_reading(path, (bases[0], {CLASS: bases[0]} | sections), sets)


def bridge_reading(path: str, found: tuple[str, dict[str, Any]], sets: Sets, devices: int | None = None) -> Reading:
    """A recipe's own name and its config as a plan.

    Raises:
        ConfigError: one line per problem.
    """
    name, tree = found[0], bridge_table.unwrapped(found[1])
    base, called = str(tree.pop(CLASS)), list(_calls(tree))
    whole, table = base.rpartition(".")[2] == "ConfigContainer", load_table("megatron_bridge")
    if not whole and (other := bridge_table.put_arguments(tree)):
        raise ConfigError(f"{path}: argument {other[0]} of {base}() is not read; {GIVE_LOG}")
    called = _with_stages(path, base, tree.get("model"), called)
    preset, fields = model_of(tree.get("model"))
    preset = preset or (None if fields else model_of_name(base))
    own = {} if whole else bridge_table.settings_of(base, table.raw["lengths"])
    said = {key: own[key] for key in own if key == "model.mtp_num_layers"} | _said(tree, path, sets, called)
    called = [call for call in called if not bridge_table.set_by_calls([call])]
    model = {} if preset is None else {"model": changed(path, preset, said, "model", sets)}
    usual = _TUNED if re.search("_(?:sft|peft|finetune)_", base) else _OVERLAPS
    defaults: dict[str, Any] = fields if whole else usual | own | fields
    if whole and is_provided(path, tree.get("model"), preset is None and not fields and "model" not in (sets or {})):
        defaults = bridge_table.kernels(str(preset), "families") | defaults
    _put_overlap(said, defaults)
    unread = {key: said.pop(key) for key, value in list(said.items()) if isinstance(value, Computed)}
    ask_for_sizes(path, said, unread, table, sets)
    keys = object_keys(said, table, path, model | dict(sets or {}), defaults=defaults, defaults_of="its recipes")
    if preset is None and not fields and "num_layers" not in keys.values and "model" not in (sets or {}):
        problem = f"{path}: its model is {_whose(tree.get('model'), base, whole=whole)}; add --set model=NAME"
        raise ConfigError([problem, *refusals(path, _other_model(tree.get("model"), name))])
    if not whole:
        keys.assumed_flags.append(LaunchFlag(f"{base}()", preset or "", "approximated", _known_of(base)))
    keys.assumed_flags += [LaunchFlag(call, "", "approximated", "what it sets is not read") for call in called]
    keys.assumed_flags += _other_model(tree.get("model"), name)
    for key, value in unread.items():
        if is_costly(key, table, unknown=True):
            keys.assumed_flags.append(LaunchFlag(key, value.code, "approximated", "computed, and not read"))
    counted = re.search(_COUNTED, name)
    return plan_of(keys, "megatron-bridge", devices or (int(counted[1]) if counted else None))


def _known_of(base: str) -> str:
    """What is known of a recipe that is not in the file."""
    if base.rpartition(".")[2] in bridge_table.recipes():
        return "its model, layout, batch and overlap are known; the rest is that of Megatron-Core"
    return "what it sets besides the model is not read"


def _with_stages(path: str, base: str, model: Any, called: list[str]) -> list[str]:
    """The calls that are left once stages are laid out; those that are not read are refused."""
    layout = None
    if isinstance(model, dict):
        called = bridge_table.put_stages(model, called)
        layout = _plain(model.get("pipeline_model_parallel_layout"))
    _check_calls(path, base, called)
    if isinstance(layout, Computed):
        called_by = re.match(r"(\w+)\(", layout.code)
        whose = f"those of {called_by[1]}()" if called_by else f"computed ({layout.code})"
        raise ConfigError(f"{path}: its stages are {whose}, which is not read; {GIVE_LOG}")
    return called


def _repository(section: Any) -> str:
    """The repository that a model comes from, or ""."""
    given = section.get("_args_", []) if isinstance(section, dict) else []
    return next((word for word in given if isinstance(word, str)), "")


def _other_model(section: Any, recipe: str) -> list[LaunchFlag]:
    """What is refused where the model's repository is one of images or audio, or of another family; empty where it is not."""
    name = _repository(section)
    sees = "_vl_" in recipe or (isinstance(section, dict) and "freeze_vision_model" in section)
    why = not_modeled(name) or ("it takes images in addition to text" if sees else "")
    return [LaunchFlag(name or recipe, "", "unmodeled", f"{OTHER_MODEL}: {why}")] if why else []


def _whose(section: Any, base: str, *, whole: bool) -> str:
    """The model that is not known: of a repository that no preset has, or of the function that the recipe begins with."""
    if name := _repository(section):
        return f"{show(name)}, which is not among the presets"
    return "known only at run time" if whole else f"that of {base}(), which is not in the file"


def _check_calls(path: str, base: str, called: Sequence[str]) -> None:
    """Refuse a benchmark over one of another file, stages that a function lays out, and the framework's own settings of one."""
    if re.search(_COUNTED, base):
        what = f"its layout and precision are those of {base}(), which is not in the file"
        raise ConfigError(f"{path}: {what}; {GIVE_LOG}")
    stages = [call for call in called if re.search(r"pipeline\w*_layout\(", call)]
    others = [
        call for call in called if re.match(r"_(?:apply|enable|use)_", call) and not bridge_table.set_by_calls([call])
    ]
    lines = [
        f"{path}: its stages are those of {call.partition('(')[0]}(), which is not read; {GIVE_LOG}" for call in stages
    ]
    lines += [f"{path}: what {call.partition('(')[0]}() sets is not in the file; {GIVE_LOG}" for call in others]
    if lines:
        raise ConfigError(lines)


def _put_overlap(said: dict[str, Any], defaults: dict[str, Any]) -> None:
    """The overlap of pipeline sends, which a CommOverlapConfig sets up; without one none of a base recipe's.

    Source: training/comm_overlap.py, _get_model_comm_overlap_cfgs.
    """
    given = said.get("comm_overlap", {} if defaults.get(_TP) else None)
    if given is not None or any(key.startswith("comm_overlap.") for key in said):
        defaults["model.overlap_p2p_comm"] = True
    elif "comm_overlap" in said:
        defaults[_TP] = False


def _said(tree: dict[str, Any], path: str, sets: Sets, called: Iterable[str]) -> dict[str, Any]:
    """The sections as dotted keys, over what the functions that are `called` with them set; mixed precision by its fields.

    Raises:
        ConfigError: an unknown mixed precision, and the user sets none.
    """
    mixed, adapters = tree.get("mixed_precision"), tree.get("peft")
    other = {"env_vars", "mixed_precision", "_args_"}
    said = flatten({key: _plain(section) for key, section in tree.items() if key not in other})
    if isinstance(adapters, dict):
        said["peft.method"] = str(adapters.get(CLASS) or "unknown").rpartition(".")[2]
        if said["peft.method"] == "default_peft_config" and adapters.get("_args_", [])[:1] == ["lora"]:
            said["peft.method"] = "LoRA"  # recipes/common.py
    word = mixed
    if isinstance(mixed, dict):
        word = next((name for name in (mixed.get("_args_") or [""])[:1] if name), None) or mixed.get(CLASS)
        word = None if word == "MixedPrecisionConfig" else word
    name = str(word.code if isinstance(word, Computed) else word or "bf16").removesuffix("()").rpartition(".")[2]
    short = re.sub(r"^(?:\w+_)?bf16_with_|(?:_scaling)?_mixed$", "", name)
    known = table_file(bridge_table.RECIPES)["precisions"]
    fields: dict[str, Any] | None = next((known[words] for words in known if short in words.split()), None)
    if fields is None and told(sets, "performance.precision") is None:
        raise ConfigError(f"{path}: unknown mixed precision {name}; add --set performance.precision=NAME")
    # mixed_precision.py: put over ddp's, true but for fp16_mixed
    over = {"bf16": "fp16" not in (fields or {}), "grad_reduce_in_fp32": name != "fp16_mixed"}
    fields = {} if fields is None else over | fields
    maker = str(mixed.get(CLASS)) if isinstance(mixed, dict) else ""
    by_precision = {f"mixed_precision.{key}": value for key, value in fields.items()}
    said = by_precision | bridge_table.set_by_calls([*called, maker]) | said
    return said | (flatten({"mixed_precision": _plain(mixed)}) if isinstance(mixed, dict) else {})


def _calls(node: Any) -> Iterator[str]:
    """Calls with a config as argument that are not followed, at any depth."""
    if isinstance(node, dict):
        yield from node.pop(CALLED, [])
        for item in node.values():
            yield from _calls(item)


def _plain(node: Any) -> Any:
    """Sections without the names of their classes; dtypes and activations by their names."""
    if isinstance(node, Computed) and re.fullmatch(r"torch\.\w+|(?:\w+\.)*\w*(?:relu|gelu|silu)", node.code):
        return node.code
    if not isinstance(node, dict):
        return node
    called = node.keys() == {CLASS, "_args_"} and not re.search(BASES, node[CLASS])
    if called and node[CLASS].rpartition(".")[2].islower():
        return Computed(0, f"{node[CLASS]}(...)")  # a function that is not read
    return {key: _plain(item) for key, item in node.items() if key not in {CLASS, "_args_"}}
