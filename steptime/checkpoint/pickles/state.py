"""What the opcodes of a pickle act on: a stack, a memo, and what the stream was seen to name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptime.checkpoint.pickles.values import CallRecord, Pairs

if TYPE_CHECKING:
    from collections.abc import Callable

    from steptime.checkpoint.pickles.values import Ref

    Op = Callable[["PickleState", int], int]


class PickleState:
    """One stream being read: `data` from byte `at`, called `where` in messages.

    `end` is the byte after STOP; `refs` the globals it names; `nested` the calls of loaders with bytes of their own;
    `foreign` the opcodes torch's weights_only unpickler does not know; `indirect` the byte and
    the number of arguments of a call whose function is itself computed; `unread` counts the nested bytes that were no
    stream.
    """

    def __init__(self, data: bytes, at: int = 0, where: str = "the pickle") -> None:
        self.data = data
        self.where = where
        self.end = at
        self.stack: list[Any] = []
        self.memo: list[Any] = []
        self.far: dict[int, Any] = {}
        self.marks: list[int] = []
        self.refs: dict[tuple[str, str], Ref] = {}
        self.nested: list[CallRecord] = []
        self.foreign: set[int] = set()
        self.indirect: tuple[int, int] | None = None
        self.unread = 0
        self.proto = 0
        self.memoized = False

    def salvage(self) -> Any:
        """What was built when the stream broke off: pending items are given to the containers they were meant for."""
        while self.marks:
            start = self.marks.pop()
            items = self.stack[start:]
            del self.stack[start:]
            below = self.stack[-1] if self.stack else None
            if type(below) is Pairs:
                below += items[: len(items) // 2 * 2]
            elif type(below) is list:
                below += items
            else:
                self.stack += items
        first = self.stack[0] if self.stack else None
        return first if type(first) in (Pairs, list, CallRecord) else self.stack
