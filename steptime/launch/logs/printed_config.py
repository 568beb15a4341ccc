"""What a log prints of its job: a config (without prefixes, up to its end), Megatron's dump of arguments, DeepSpeed's command."""

from __future__ import annotations

import re
import shlex
from base64 import urlsafe_b64decode
from collections.abc import Iterable
from math import prod

from steptime.base.config import ConfigError
from steptime.base.document import parse_mapping
from steptime.base.words import counted
from steptime.launch.logs.files import plain
from steptime.launch.reading import Reading

BEGIN = re.compile(r"(?<!-)-{8,} arguments -{8,}")
_END = re.compile(r"(?<!-)-{8,} end of arguments -{8,}")
_LINE = re.compile(r"(?:^|\s|:)([A-Za-z_]\w*(?= \.)|[A-Za-z_]\w{28,}) (\.*) (.*)$")
_WIDTHS = (48, 32)
"""Columns that a name and its dots fill (Megatron-LM, arguments.py, _print_args; the fewer until 2021)."""
_NEOX = re.compile(r"\.{3,}(?:default|updated)\s*$")
"""How a line of GPT-NeoX's own dump ends, whose names are others."""
_OP_REPORT = re.compile(r"\x1b\[\d+m\[(?:OKAY|YES|NO|FAIL)\].*")
"""Words of DeepSpeed's report of its ops (deepspeed/env_report.py), which another process may print into a line of the dump."""
_OP_DOTS = re.compile(r"(?<=\w)\.{4,}$")
"""Dots of the same report at the end of a value."""

_RANK = re.compile(r"^\s*(\[(?:rank|default)?\d+\]|\d+(?=: ))(?:<std(?:out|err)>)?: ?")
"""[rank0]: of torchrun --tee, [default0]: of its older releases, 0: of srun --label."""


def plain_lines(text: str) -> list[str]:
    r"""The lines of a log without colors; with rank prefixes, only those of rank 0, else the first, and those without one.

    >>> plain_lines("start\n[rank1]:{\n[rank0]:{\n[rank1]:}"), plain_lines("7: a\n3: b")
    (['start', '{'], ['a'])
    """
    lines = [plain(raw) for raw in text.splitlines()]
    ranks = [_RANK.match(line) for line in lines]
    said = dict.fromkeys(found[1] for found in ranks if found)
    kept = next((rank for rank in said if re.sub(r"\D", "", rank) == "0"), next(iter(said), ""))
    return [
        line[found.end() :] if found else line
        for line, found in zip(lines, ranks, strict=True)
        if not found or found[1] == kept
    ]


def balanced(text: str, start: int) -> str | None:
    """The text from the bracket at `start` to its closing one, respecting quotes; None where the text ends before.

    >>> balanced('x {"a": "}"} y', 2), balanced("{", 0)
    ('{"a": "}"}', None)
    """
    depth, quote, at = 0, "", start
    while at < len(text):
        letter = text[at]
        if quote:
            if letter == "\\":
                at += 1
            elif letter == quote:
                quote = ""
        elif letter in "\"'":
            quote = letter
        elif letter in "{[(":
            depth += 1
        elif letter in "}])":
            depth -= 1
            if depth == 0:
                return text[start : at + 1]
        at += 1
    return None


def block(lines: list[str], start: int) -> list[str]:
    """The YAML from line `start` on, dedented: keys, deeper lines and list items, up to the log's next message."""
    kept, depth = list[str](), len(lines[start]) - len(lines[start].lstrip())
    for line in lines[start:]:
        indent = len(line) - len(line.lstrip())
        if not line.strip() or indent < depth or (indent == depth and not _KEY.match(line.strip())):
            break
        kept.append(line[depth:])
    return kept


_KEY = re.compile(r"(?:[A-Za-z_][\w.-]*|'[^']*'|\"[^\"]*\"):(?: |$)|- |-$")


def read_dump(lines: Iterable[str]) -> dict[str, str]:
    """Argument -> text from the dump at the beginning of a Megatron log; stops reading at its end.

    Prefixes of ranks, time stamps and colors are removed; lines of other ranks in between are skipped.

    Raises:
        ConfigError: there is no dump, or it is truncated.
    """
    arguments: dict[str, str] = {}
    inside = False
    last = width = 0
    for number, raw in enumerate(lines, 1):
        line = plain(_OP_REPORT.sub("", raw)).rstrip()
        if BEGIN.search(line):
            inside, arguments = True, {}
        elif inside and _END.search(line):
            if not arguments:
                raise ConfigError(f"line {number}: the dump of arguments is empty")
            return arguments
        elif inside and (found := _LINE.search(f"{line} ")):
            name, dots, value = found.groups()
            filled = len(name) + len(dots)
            width = width or (filled if dots and filled in _WIDTHS else 0)
            if width and filled == max(width, len(name)) and not _NEOX.search(value):
                arguments[name] = _OP_DOTS.sub("", value.strip())
                last = number
    if inside:
        where = f" after line {last}" if last else ""
        raise ConfigError(f"the dump of arguments is truncated{where}: no 'end of arguments' line")
    raise ConfigError("no dump of arguments ('------ arguments ------') in it; not a Megatron-LM log")


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
