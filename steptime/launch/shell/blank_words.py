"""Words of a command that have no value and would change the cost of its job."""

from __future__ import annotations

from collections.abc import Iterable

from steptime.launch.keys import KeyTable, is_costly
from steptime.launch.shell.processes import Word


def blanks(path: str, words: Iterable[Word], table: KeyTable) -> list[str]:
    """A line for each word of a command without a value, unless it sets a key that changes no cost."""
    found = dict[str, None]()
    for word in words:
        if word.unresolved and is_costly(word.text.lstrip("-").partition("=")[0], table, unknown=True):
            found[f"{path}: line {word.line}: {word.unresolved[0].told('write the value into the script')}"] = None
    return [*found]
