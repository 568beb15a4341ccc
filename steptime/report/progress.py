"""Progress of reading a large file: one line on a terminal that is overwritten, and erased at the end."""

from __future__ import annotations

from time import monotonic
from types import TracebackType
from typing import Self, TextIO

PATIENCE_S, EVERY_S = 1.0, 0.2


class ProgressLine:
    """Reports progress on a terminal once reading takes longer than `PATIENCE_S`; other streams get nothing."""

    def __init__(self, stream: TextIO | None, done: str = "read") -> None:
        """`done`: the word for the work, such as "read"."""
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
        """Record the share of a file that is read."""
        if self.stream is None or monotonic() < self._next:
            return
        text = f"{name[-60:]}: {100.0 * min(share, 1.0):.0f} % {self.done}"
        self._width = max(self._width, len(text))
        self.stream.write("\r" + text.ljust(self._width))
        self.stream.flush()
        self._next = monotonic() + EVERY_S
