"""The dump of arguments that a Megatron-LM log begins with."""

from __future__ import annotations

import re
from collections.abc import Iterable

from steptime.base.config import ConfigError

BEGIN = re.compile(r"-{8,} arguments -{8,}")
_END = re.compile(r"-{8,} end of arguments -{8,}")
_LINE = re.compile(r"(?:^|\s|:)([A-Za-z_]\w*(?= \.)|[A-Za-z_]\w{47,}) (\.*) (.*)$")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_WIDTH = 48
"""Columns that a name and its dots fill (Megatron-LM, arguments.py, _print_args)."""
_PADDED = re.compile(r"padded vocab \(size: (\d+)\) with \d+ dummy tokens")


def read_dump(lines: Iterable[str]) -> dict[str, str]:
    """Argument -> text of the dump that a Megatron log begins with; reads no further than its end.

    Prefixes of ranks, time stamps and colours are taken off; lines of other ranks in between are passed over.

    Raises:
        ConfigError: there is no dump, or it is cut in the middle.
    """
    arguments: dict[str, str] = {}
    inside = False
    last = 0
    for number, raw in enumerate(lines, 1):
        line = _ANSI.sub("", raw).rstrip()
        if BEGIN.search(line):
            inside, arguments = True, {}
        elif inside and _END.search(line):
            if not arguments:
                raise ConfigError(f"line {number}: the dump of arguments is empty")
            return arguments
        elif inside and (found := _LINE.search(f"{line} ")):
            name, dots, value = found.groups()
            if len(name) + len(dots) == max(_WIDTH, len(name)):
                arguments[name] = value.strip()
                last = number
    if inside:
        where = f" after line {last}" if last else ""
        raise ConfigError(f"the dump of arguments is cut{where}: no 'end of arguments' follows")
    raise ConfigError("no dump of arguments ('------ arguments ------') in it; not a Megatron-LM log")


def vocabulary_of(text: str) -> int | None:
    """Entries of the vocabulary that a log states after its dump: " > padded vocab (size: 50257) with 943 dummy tokens ..."."""
    found = _PADDED.search(text)
    return int(found[1]) if found else None
