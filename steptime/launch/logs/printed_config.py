"""Printed configs in logs: prefixes taken off, and where a config ends."""

from __future__ import annotations

import re
from collections.abc import Iterator

from steptime.launch.logs.files import plain

_RANK = re.compile(r"^\s*(\[(?:rank|default)?\d+\]|\d+(?=: ))(?:<std(?:out|err)>)?: ?")
"""[rank0]: of torchrun --tee, [default0]: of its older releases, 0: of srun --label."""


def plain_lines(text: str) -> list[str]:
    r"""The lines of a log without colours; where ranks are told, those of the first one and those that tell none.

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
    """From the bracket at `start` to the one that closes it, quotes respected; None where the text ends before.

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
