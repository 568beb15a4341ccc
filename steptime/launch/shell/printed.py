"""What $(...) prints of a function of the script, or of tests: their echo commands, where they do no more, without pipes.

Also what yq and jq print of one key of a file.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

from steptime.base.document import parse
from steptime.launch.shell.control_flow import ControlFlow, ExitError, LeaveError
from steptime.launch.shell.grammar import parse_shell
from steptime.launch.shell.scope import Value
from steptime.launch.shell.statements import Statement

_TESTS = re.compile(r"\s*(?:!\s+)?(?:\[\[?|test|if|case)\s")
_OPTION = re.compile(r"-[neE]+(?:\s|$)")
_AS_LONG_AS = 20
"""Commands that a call counts as, in the limit on a script's commands: it takes about their time."""


def output(walk: ControlFlow, words: list[Value], text: str, line: int) -> str | None:
    """The output of commands: a function of the script with these words, or tests that echo; None where it is not known.

    `text` is the whole of it: [ $TP -gt 1 ] && echo --sequence-parallel.
    """
    if words and words[0].text in {"yq", "jq"}:
        return _of_key(walk, [word.text for word in words])
    if words and words[0].text in walk.functions:
        found = _texts(walk, walk.functions[words[0].text].body, words[1:])
        return "\n".join(found) if found else None
    found = _texts(walk, parse_shell(text, walk.name, line), walk.scope.positional) if _TESTS.match(text) else None
    return None if found is None else "\n".join(found)


def _of_key(walk: ControlFlow, words: list[str]) -> str | None:
    """A number or word of a YAML or JSON file: yq '.training.num_layers' model.yaml, jq -r .hidden_size config.json."""
    plain = [word for word in words[1:] if not word.startswith("-") and word not in {"e", "eval"}]
    if len(plain) != 2 or not re.fullmatch(r"(?:\.\w+)+", plain[0]) or (text := walk.nearby.text(plain[1])) is None:
        return None
    value: Any = parse(text, plain[1])
    for key in plain[0].split(".")[1:]:
        value = value.get(key) if isinstance(value, dict) else None
    quoted = isinstance(value, str) and words[0] == "jq" and "-r" not in words
    if quoted or isinstance(value, list | dict):
        return None
    return value if isinstance(value, str) else json.dumps(value)


def _texts(walk: ControlFlow, body: list[Statement], words: list[Value] | None) -> list[str] | None:
    """What each echo of these commands prints, in a copy of the variables as in a subshell; None where it is not known."""
    if walk.doubt is not None:
        return None
    start, scope, pipes = len(walk.commands), walk.scope, walk.pipes
    walk.scope = scope.copy()
    walk.count += _AS_LONG_AS
    walk.within += 1
    ended, undecided = False, len(walk.left)
    try:
        with walk.deeper(words), suppress(LeaveError):
            walk.block(body)
    except ExitError:
        if walk.full:
            raise
        ended = True
    finally:
        ran, walk.scope = walk.commands[start:], scope
        walk.within -= 1
        del walk.commands[start:]
    if len(walk.left) > undecided:
        ended = True
        del walk.left[undecided:]
    texts = [" ".join(value.text for value in command.words[1:]) for command in ran]
    plain = all(command.words[0].text == "echo" and command.doubt is None for command in ran)
    unknown = any(_OPTION.match(text) or not walk.scope.known(text) for text in texts)
    return None if ended or walk.pipes > pipes or not plain or unknown else texts
