"""Configs printed in logs: removing prefixes, finding the end, and Megatron's dump of arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from steptime.base.config import ConfigError
from steptime.launch.logs.files import plain

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
    r"""The lines of a log without colors; with rank prefixes, only those of the first rank and those without one.

    >>> plain_lines("start\n[rank1]:{\n[rank0]:{\n[rank1]:}")
    ['start', '{', '}']
    """
    return list(_lines(text))


def _lines(text: str) -> Iterator[str]:
    first = None
    for raw in text.splitlines():
        line = plain(raw)
        found = _RANK.match(line)
        if found is None:
            yield line
            continue
        first = first or found[1]
        if found[1] == first:
            yield line[found.end() :]


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
    kept: list[str] = []
    for line in lines[start:]:
        if not line.strip():
            if kept:
                break
            continue
        indent = len(line) - len(line.lstrip())
        depth = len(kept[0]) - len(kept[0].lstrip()) if kept else indent
        if kept and (indent < depth or (indent == depth and not _KEY.match(line.strip()))):
            break
        kept.append(line)
    depth = len(kept[0]) - len(kept[0].lstrip()) if kept else 0
    return [line[depth:] for line in kept]


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
