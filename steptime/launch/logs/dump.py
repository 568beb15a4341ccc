"""The dump of arguments that a Megatron-LM log begins with."""

from __future__ import annotations

import re
from collections.abc import Iterable

from steptime.base.config import ConfigError
from steptime.launch.logs.files import plain

BEGIN = re.compile(r"-{8,} arguments -{8,}")
_END = re.compile(r"-{8,} end of arguments -{8,}")
_LINE = re.compile(r"(?:^|\s|:)([A-Za-z_]\w*(?= \.)|[A-Za-z_]\w{47,}) (\.*) (.*)$")
_WIDTH = 48
"""Columns that a name and its dots fill (Megatron-LM, arguments.py, _print_args)."""


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
        line = plain(raw).rstrip()
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
