"""The devices of a trainer's script: how many processes it starts, and what is unclear about them."""

from __future__ import annotations

from typing import Any

from steptime.launch.devices import SET_DEVICES
from steptime.launch.keys import KeyTable
from steptime.launch.shell.script import Script
from steptime.launch.shell.training_command import SUBCOMMANDS


def devices_of(script: Script, table: KeyTable, said: dict[str, Any], unclear: dict[str, str]) -> int | None:
    """The devices; what is unclear about them goes into `unclear`, and a number on each node alone into `said`."""
    alone = table.raw.get("launcher", {}).get("one_process")
    others = script.unclear and (script.launchers or script.program not in SUBCOMMANDS)
    if script.launchers if alone else others:
        unclear["devices"] = script.unclear[0] if script.unclear else f"number of devices unknown; {SET_DEVICES}"
    if script.launchers[-1:] == ["deepspeed"] and script.devices is None and not script.unclear:
        unclear["devices"] = f"number of devices unknown: those of its hostfile; {SET_DEVICES}"
    if one := _one_process(script, table):
        unclear["devices"] = one
        return None
    if script.devices is None and not script.unclear and "devices" not in unclear and script.devices_per_node:
        said["nproc"] = script.devices_per_node
    return script.devices


def _one_process(script: Script, table: KeyTable) -> str:
    """What is unclear about the devices of a job that one process runs although it sees several; "" where that is not so.

    Hugging Face's Trainer splits its batch over them (torch.nn.DataParallel, transformers training_args.py, _n_gpu), ms-swift
    the layers of the model (device_map; swift/cli/main.py, use_torchrun); other programs start processes themselves.
    """
    whole = table.raw.get("launcher", {}).get("one_process") or not script.alone or script.devices in (None, 1)
    spread = script.program.endswith(".py") or table.raw.get("one_process")
    if whole or not spread:
        return ""
    what = f"one process sees {script.devices} devices: DataParallel, or layers spread over them, is not modeled"
    return f"{what}; for a process on each device add --set parallelism.dp={script.devices}"
