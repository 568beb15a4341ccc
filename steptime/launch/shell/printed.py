"""What a function of a script prints, for $(function words): its echo commands, where it does nothing else and has no pipe."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from steptime.launch.shell import grammar
from steptime.launch.shell.commands import Command, ExitError
from steptime.launch.shell.scope import Scope, Unknown, Value

_AS_LONG_AS = 20
"""Commands that a call counts as, in the limit on a script's commands: it takes about their time."""


class _Interpreter(Protocol):
    """What is needed of the dry run of a script."""

    commands: list[Command]
    functions: dict[str, grammar.Function]
    scope: Scope
    doubt: Unknown | None
    full: bool
    count: int
    pipes: int

    def deeper(self, positional: list[Value] | None) -> AbstractContextManager[Any]:
        """One level down, with its own positional arguments."""
        ...

    def block(self, nodes: list[grammar.Statement]) -> object:
        """Interpret commands one after another."""
        ...


def printed(walk: _Interpreter, words: list[Value]) -> str | None:
    """The output of a function with these words, in a copy of the variables as in a subshell; None where it is not known."""
    name = words[0].text if words else ""
    if name not in walk.functions or walk.doubt is not None:
        return None
    start, scope, pipes = len(walk.commands), walk.scope, walk.pipes
    walk.scope = scope.copy()
    walk.count += _AS_LONG_AS
    ended = False
    try:
        with walk.deeper(words[1:]):
            walk.block(walk.functions[name].body)
    except ExitError:
        if walk.full:
            raise
        ended = True
    finally:
        ran, walk.scope = walk.commands[start:], scope
        del walk.commands[start:]
    if ran and ran[-1].words[0].text == "return":
        ran.pop()
    texts = [" ".join(value.text for value in command.words[1:]) for command in ran]
    plain = all(command.words[0].text == "echo" and command.doubt is None for command in ran)
    if (
        ended
        or walk.pipes > pipes
        or not plain
        or not texts
        or any(text.startswith("-") or not walk.scope.known(text) for text in texts)
    ):
        return None
    return "\n".join(texts)
