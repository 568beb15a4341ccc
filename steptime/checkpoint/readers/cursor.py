"""Reads one record after another from a file, through a buffer; payloads are stepped over without being read."""

from __future__ import annotations

from steptime.checkpoint.records import UnreadableError
from steptime.checkpoint.source import Source

WINDOW = 1 << 16


class Cursor:
    """A place `at` in a file; a length that the file does not have raises `UnreadableError` (TRUNCATED)."""

    def __init__(self, source: Source, at: int = 0) -> None:
        self.source = source
        self.at = at
        self._start = 0
        self._data = b""

    def skip(self, length: int) -> None:
        """Step over `length` bytes."""
        left = self.source.size - self.at
        if length > left:
            raise UnreadableError("TRUNCATED", f"wants {length} bytes at byte {self.at}, {left} left", self.source.name)
        self.at += length

    def take(self, length: int) -> bytes:
        """The next `length` bytes."""
        at = self.at
        self.skip(length)
        first = at - self._start
        if first < 0 or first + length > len(self._data):
            self._data = self.source.upto(at, max(length, WINDOW))
            self._start, first = at, 0
        return self._data[first : first + length]
