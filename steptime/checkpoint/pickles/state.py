"""What the opcodes of a pickle act on: a stack, a memo, and what the stream was seen to name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from steptime.checkpoint.pickles.values import Ref

    Op = Callable[["PickleState", int], int]


class PickleState:
    """One stream being read: `data` from byte `at`.

    `end` is the byte after STOP; `refs` the globals it names;
    `foreign` the opcodes torch's weights_only unpickler does not know; `indirect` the byte of a call whose
    function is itself computed.
    """

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data = data
        self.end = at
        self.stack: list[Any] = []
        self.memo: list[Any] = []
        self.far: dict[int, Any] = {}
        self.marks: list[int] = []
        self.refs: dict[tuple[str, str], Ref] = {}
        self.foreign: set[int] = set()
        self.indirect = 0
        self.proto = 0
        self.memoized = False
