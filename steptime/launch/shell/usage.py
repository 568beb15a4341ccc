"""The arguments with which a comment of a script runs it."""

from __future__ import annotations

import posixpath
import re
import shlex
from typing import NamedTuple

_OPEN = re.compile(r"[<>{}()\[\]|]|\.\.\.|\$")
"""In words that a reader of the comment is to fill in."""
_LONGEST = 500
"""Characters of a comment with a command; longer ones are none."""
_NAMES = re.compile(r"[A-Z][A-Z_]{2,}")
"""Words in their place: MODEL_SIZE."""


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
