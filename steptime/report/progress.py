"""How far the reading of a large file is: one line on a terminal that is overwritten, and wiped at the end."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from types import TracebackType

PATIENCE_S, EVERY_S = 1.0, 0.2


class ProgressLine:
    """Tells a terminal how far a file is read, once that has taken longer than `PATIENCE_S`; other streams stay silent."""

    def __init__(self, stream: TextIO | None, done: str = "read") -> None:
        """`done`: what is said to have been done of it."""
        self.done = done
        self.stream = stream if stream is not None and stream.isatty() else None
        self._next = monotonic() + PATIENCE_S
        self._width = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.stream is not None and self._width:
            self.stream.write("\r" + " " * self._width + "\r")

    def told(self, name: str, share: float) -> None:
        """Take note of the share of a file that is read."""
        if self.stream is None or monotonic() < self._next:
            return
        text = f"{name[-60:]}: {100.0 * min(share, 1.0):.0f} % {self.done}"
        self._width = max(self._width, len(text))
        self.stream.write("\r" + text.ljust(self._width))
        self.stream.flush()
        self._next = monotonic() + EVERY_S
