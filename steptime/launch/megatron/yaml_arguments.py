"""Megatron-LM's arguments in YAML: the file of --yaml-cfg, which replaces the command line, and FlagScale's sections.

Sources: FlagOpen/FlagScale@da4935ec flagscale/runner/runner_train.py, _get_args_megatron (sections as flat arguments; true is a
switch, false and null are none), runner/utils.py, get_nproc_per_node; NVIDIA/Megatron-LM@00caa53a megatron/training/
yaml_arguments.py: load_yaml (the file alone is the arguments), validate_yaml, core_transformer_config_from_yaml (language_model
and model_parallel are the fields of TransformerConfig).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from steptime.base.config import ConfigError
from steptime.base.document import parse_mapping
from steptime.launch.interpolate import resolve
from steptime.launch.keys import flatten
from steptime.launch.megatron.flags import CommandLine
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.reading import OTHER_MODEL
from steptime.launch.shell.script import Script

MARK = r"^language_model:(?=[\s\S]*^model_parallel:)|^model_parallel:(?=[\s\S]*^language_model:)"
FLAGSCALE = r"\bentrypoint: \S*flagscale|^system:(?=[\s\S]*\n\s+num_layers:)"
_OTHER = re.compile(r"rwkv|_vl|llava|onevision|emu|pi0|robo|wan|image|omni")
"""In the names of programs that train other models than train_gpt.py."""
_SWITCHES = {"swiglu": "swiglu", "squaredrelu": "squared_relu", "gelu": ""}
"""Word of activation_func -> the argument that is on with it."""
_OF_FIELDS = ("activation_func", "gated_linear_unit", "bias_activation_fusion", "num_query_groups")
_SET_BY_PROGRAM = ("virtual_pipeline_model_parallel_size", "deallocate_pipeline_outputs", "batch_p2p_comm", "yaml_cfg")
"""Keys that the program overwrites."""


def arguments_in(path: str, text: str, env: Mapping[str, str]) -> dict[str, str]:
    """The arguments in a file, under the names and in the form of Megatron-LM's dump; variables are those of `env`.

    Raises:
        ConfigError: a section is no mapping, a variable has no value, or the activation is unknown; one line each.
    """
    tree = parse_mapping(text, path)
    sections = [tree.pop(name, None) for name in ("language_model", "model_parallel")]
    if not all(isinstance(section, dict) for section in sections):
        raise ConfigError(f"{path}: language_model and model_parallel: expected two mappings")
    model, layout = sections
    said = {key: value for key, value in {**tree, **layout, **model}.items() if key not in _SET_BY_PROGRAM}
    blank = {name for value in said.values() for name in re.findall(r"\$\{(.*?)\}", str(value)) if name not in env}
    if blank:
        fix = " ".join(f"{name}=..." for name in sorted(blank))
        raise ConfigError(f"{path}: {', '.join(sorted(blank))}: no such variable; write {fix} before the command")
    said |= _of_fields(path, said)
    if said.get("bf16"):  # validate_yaml
        said["accumulate_allreduce_grads_in_fp32"] = True
    return {key: re.sub(r"\$\{(.*?)\}", lambda name: env[name[1]], str(value)) for key, value in said.items()}


def over(said: CommandLine, path: str, script: Script | None, nearby: NearbyFiles | None) -> CommandLine:
    """The flags of a script, or the arguments of the file that --yaml-cfg names, which replace them.

    Raises:
        ConfigError: the file was not found, or cannot be read.
    """
    name = said.arguments.get("yaml_cfg")
    if name is None or script is None or any("--yaml-cfg" in flags for flags in said.unset.values()):
        return said
    text = (nearby or NearbyFiles()).needed(name, f"{path}: --yaml-cfg reads")
    others = [flag for argument, flag in said.names.items() if argument != "yaml_cfg"]
    notes = [f"--yaml-cfg replaces the other flags, which have no effect: {', '.join(others)}"] if others else []
    return CommandLine(arguments_in(name, text, script.variables), {}, [], notes, {})


def _of_fields(path: str, said: dict[str, Any]) -> dict[str, Any]:
    """The arguments that the fields of the model become, which are taken out of `said`; its own switches have no effect."""
    word, gated, fused, groups = (said.pop(key, None) for key in _OF_FIELDS)
    if word not in _SWITCHES:
        known = ", ".join(_SWITCHES)
        raise ConfigError(f"{path}: language_model.activation_func: expected one of {known} (got {word})")
    on = {name: name == _SWITCHES[word] for name in ("swiglu", "squared_relu", "openai_gelu")}
    grouped = {"group_query_attention": groups is not None, "num_query_groups": groups}
    by_gelu = {"bias_gelu_fusion": bool(fused) and not said.get("add_bias_linear")}
    other = {"gated_linear_unit": True} if gated and word != "swiglu" else {}
    return on | grouped | by_gelu | other


def flags_in(path: str, text: str, nearby: NearbyFiles) -> tuple[dict[str, Any], int | None]:
    """The arguments as flags and their values, and the devices that the job's file names.

    Raises:
        ConfigError: the file of arguments that the job names was not found.
    """
    tree = parse_mapping(text, path)
    job, listed = _part(tree, "experiment"), tree.get("defaults")
    if job and "system" not in tree:
        choices = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
        named = next((str(item["train"]) for item in choices if "train" in item), "")
        tree |= parse_mapping(nearby.needed(f"train/{named}.yaml", f"{path}: reads"), named)
    entry = str(_part(job, "task").get("entrypoint", ""))
    if _OTHER.search(entry):
        raise ConfigError(f"{path}: experiment.task.entrypoint {entry}: {OTHER_MODEL}")
    said = flatten({section: _part(resolve(tree, {}), section) for section in ("system", "model", "data")})
    plain = {f"--{key.rpartition('.')[2].replace('_', '-')}": value for key, value in said.items()}
    plain = {flag: value for flag, value in plain.items() if "${" not in str(value) and value != {}}
    return plain, _devices(job)


def _part(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = tree.get(name)
    return found if isinstance(found, dict) else {}


def _devices(job: Mapping[str, Any]) -> int | None:
    """Nodes times the processes of each: those that are set, else one for every visible device."""
    runner, visible = _part(job, "runner"), _part(job, "envs").get("CUDA_VISIBLE_DEVICES")
    each = runner.get("nproc_per_node") or (len(str(visible).split(",")) if visible is not None else None)
    nodes = runner.get("nnodes") or (None if runner.get("hostfile") else 1)
    return nodes * each if isinstance(nodes, int) and isinstance(each, int) else None
