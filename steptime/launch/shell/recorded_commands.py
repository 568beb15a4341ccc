"""Commands as the dry run of a script records them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from steptime.launch.shell.scope import Unknown, Value


class Command(NamedTuple):
    """A command that would run, with variables filled in."""

    words: list[Value]
    line: int
    doubt: Unknown | None
    """Why it may not run; None where it certainly does."""
    variables: Mapping[str, str] = MappingProxyType({})
    """Assignments in front of it, visible to it only."""
    values: Mapping[str, list[Value]] = MappingProxyType({})
    """The script's variables when it runs."""


class ExitError(Exception):
    """The script ends here, with this status."""


Left = Literal["break", "continue", "return"]
"""Commands that leave a loop, its round, or a function."""


class LeaveError(Exception):
    """A loop, its round, or a function ends here."""

    def __init__(self, kind: Left, status: str = "") -> None:
        super().__init__(kind)
        self.kind: Left = kind
        self.status = status
        """What `return` gives back, or ""."""
