"""How a log says that its job was started: the command of DeepSpeed's launcher, as a launch script, and the devices."""

from __future__ import annotations

import re
import shlex
from base64 import urlsafe_b64decode
from math import prod

from steptime.base.document import parse_mapping
from steptime.base.words import counted
from steptime.launch.reading import Reading

_COMMAND = re.compile(r"\s-m deepspeed\.launcher\.launch --world_info=([\w=-]+)\s([^\n\r]+)")
"""deepspeedai/DeepSpeed deepspeed/launcher/runner.py, main: "cmd = ..." with the processes of each host as JSON in base64."""


def started_by(head: str) -> str:
    """`deepspeed --num_nodes N --num_gpus M PROGRAM ARGUMENTS`; "" where the log prints no such command.

    >>> started_by("[runner.py:568:main] cmd = /usr/bin/python3 -u -m deepspeed.launcher.launch "
    ...     "--world_info=eyJhIjogWzAsIDFdfQ== --master_port=29500 train.py --bf16 True")
    'deepspeed --num_nodes 1 --num_gpus 2 train.py --bf16 True'
    """
    lines = (line for line in head.splitlines() if "cmd = " in line)
    found = next((said for line in lines if (said := _COMMAND.search(line, line.find("cmd = ")))), None)
    if found is None:
        return ""
    own, words = _options(found[2].split())
    counts = _processes(found[1])
    if not words or len(set(counts)) != 1:
        return ""
    module = ["--module"] if "--module" in own else []
    return shlex.join(["deepspeed", "--num_nodes", str(len(counts)), "--num_gpus", str(counts[0]), *module, *words])


def _options(words: list[str]) -> tuple[list[str], list[str]]:
    """The launcher's own options, each one word but for --save_pid N, and the program with its arguments."""
    at = 0
    while at < len(words) and words[at].startswith("-"):
        at += 2 if words[at] == "--save_pid" else 1
    return words[:at], words[at:]


def _processes(world: str) -> list[int]:
    """Processes on each host; none where the text is not the launcher's."""
    try:
        hosts = parse_mapping(urlsafe_b64decode(world).decode(), "world_info")
    except ValueError:
        return []
    return [len(ranks) for ranks in hosts.values() if isinstance(ranks, list)]


def other_devices(reading: Reading, devices: int) -> list[str]:
    """A line where a launch file starts another number of devices than its log states."""
    layout = reading.config.get("parallelism", {})
    own = layout.get("dp", 0) * prod(layout.get(degree, 1) for degree in ("tp", "pp", "cp"))
    if own in {0, devices}:
        return []
    stated = f"the log states {devices:,}, with which it is counted"
    return [f"{reading.source}: a job of {counted(own, 'device')}; {stated}"]
