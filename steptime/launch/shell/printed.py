"""What a function of a script prints, for $(function words): its echo commands, where it does nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.launch.shell.commands import ExitError
from steptime.launch.shell.scope import Value

if TYPE_CHECKING:
    from steptime.launch.shell.dry_run import DryRun


def printed(walk: DryRun, words: list[Value]) -> str | None:
    """The output of a function with these words, in a copy of the variables as in a subshell; None where it is not known."""
    name = words[0].text if words else ""
    if name not in walk.functions or walk.doubt is not None:
        return None
    start, scope = len(walk.commands), walk.scope
    walk.scope = scope.copy()
    ended = False
    try:
        with walk.deeper(words[1:]):
            walk.block(walk.functions[name].body)
    except ExitError:
        ended = True
    finally:
        ran, walk.scope = walk.commands[start:], scope
        del walk.commands[start:]
    if ran and ran[-1].words[0].text == "return":
        ran.pop()
    texts = [" ".join(value.text for value in command.words[1:]) for command in ran]
    plain = all(command.words[0].text == "echo" and command.doubt is None for command in ran)
    if ended or not plain or not texts or any(text.startswith("-") or not walk.scope.known(text) for text in texts):
        return None
    return "\n".join(texts)
