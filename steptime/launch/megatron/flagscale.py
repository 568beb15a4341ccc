"""FlagScale: Megatron-LM's arguments in the sections of a YAML file, which a job's own file names.

Source: FlagOpen/FlagScale@da4935ec flagscale/runner/runner_train.py, _get_args_megatron (sections as flat arguments; true is a
switch, false and null are none), runner/utils.py, get_nproc_per_node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from steptime.base.config import ConfigError
from steptime.base.document import parse_mapping
from steptime.launch.interpolate import resolve
from steptime.launch.keys import flatten
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.reading import OTHER_MODEL

MARK = r"\bentrypoint: \S*flagscale|^system:(?=[\s\S]*\n\s+num_layers:)"

_OTHER = re.compile(r"rwkv|_vl|llava|onevision|emu|pi0|robo|wan|image|omni")
"""In the names of programs that train other models than train_gpt.py."""


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
