"""The arguments that a script takes: how many, and those with which a comment of it runs it."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

from steptime.base.config import ConfigError
from steptime.launch.shell.grammar import parse_shell
from steptime.launch.shell.lexer import Token
from steptime.launch.shell.statements import Function

_OPEN = re.compile(r"[<>{}()\[\]|]|\.\.\.|\$")
"""In words that a reader of the comment is to fill in."""
_LONGEST = 500
"""Characters of a comment with a command; longer ones are none."""
_NAMES = re.compile(r"[A-Z][A-Z_]{2,}")
"""Words in their place: MODEL_SIZE."""


_READ = re.compile(r"\$(?=(\d)|\{(\d\d?)(?!\d|:?[-+=]))")
"""An argument without a default; $10 is ${1}0."""
_COUNTED = re.compile(r"\$\{?#\}?\"? *(?:!=|<|-ne|-lt) *\"?(\d\d?)\b")
"""A test of how many arguments there are at least."""


class Example(NamedTuple):
    """The words after the script's name in a comment."""

    line: int
    words: list[str]


def examples_of(text: str, name: str) -> list[Example]:
    r"""The comments that are a command of this script with arguments, complete ones only.

    >>> examples_of("#!/bin/bash\n# bash run.sh 7B 16\n# usage: run.sh SIZE [BATCH]\n", "jobs/run.sh")
    [Example(line=2, words=['7B', '16'])]
    """
    base = posixpath.basename(name)
    how = r"(?P<how>(?:usage|example|e\.g\.)\s*:?\s*)?(?P<by>(?:ba|z)?sh\s+|sbatch\s+)?(?P<at>[^\s#]*/)?"
    command = re.compile(rf"[#\s]*(?:\$\s+)?{how}{re.escape(base)}\s+(?P<words>\S.*)", re.IGNORECASE)
    found: list[Example] = []
    for number, line in enumerate(text.splitlines(), 1):
        said = command.match(line) if len(line) <= _LONGEST and line.lstrip().startswith("#") else None
        if said is None or not (said["how"] or said["by"] or said["at"]):  # a name alone begins a sentence
            continue
        given = re.split(r"[;&]", said["words"])[0]
        if _OPEN.search(given):
            continue
        try:
            words = shlex.split(given, comments=True)
        except ValueError:
            continue
        if any(re.search(r"\d", word) for word in words) and not any(map(_NAMES.fullmatch, words)):
            found.append(Example(number, words))
    return found


def most_words(text: str) -> int:
    r"""The number of arguments that a script reads without a default, or that its test of `$#` asks for.

    >>> most_words('if (( $# != 3 )); then exit 2; fi\nf() { echo $7; }\ntorchrun t.py $1 ${4:-x}')
    3
    """
    try:
        words = [re.sub("'[^']*'", "''", word) for word in _words_of(parse_shell(text, ""))]
    except ConfigError:  # no shell script
        return 0
    read = [one or two for word in words for one, two in _READ.findall(word)]
    return max(map(int, [*read, *_COUNTED.findall(" ".join(words))]), default=0)


def _words_of(node: Any) -> Iterator[str]:
    """The words of a script's own commands, those of its functions left out."""
    if isinstance(node, Token):
        yield node.text
    elif isinstance(node, list | tuple) and not isinstance(node, Function):
        for part in node:
            yield from _words_of(part)
