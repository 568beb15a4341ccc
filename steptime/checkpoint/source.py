"""Positional reads of one regular file, counted and bounded; a FIFO, socket or device is refused before it can block."""

from __future__ import annotations

import errno
import os
import stat
from types import TracebackType
from typing import Self

from steptime.checkpoint.stored_records import UnreadableError

_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
BUFFER = 1 << 16
_CODES = {errno.ENOENT: "NOT_FOUND", errno.EACCES: "PERMISSION", errno.ELOOP: "SYMLINK_LOOP"}


def unreadable(error: OSError | ValueError, name: str) -> UnreadableError:
    """The one-line problem for a failed system call on `name`."""
    number = getattr(error, "errno", None) or 0
    reason = "no such file or directory" if number == errno.ENOENT else os.strerror(number) if number else str(error)
    return UnreadableError(
        _CODES.get(number, "UNREADABLE"), reason if number == errno.ENOENT else f"cannot read: {reason}", name
    )


class Source:
    """An open file of `size` bytes; `read_bytes` counts what was read. Raises `UnreadableError`, never OSError."""

    __slots__ = ("_fd", "name", "path", "read_bytes", "size")

    def __init__(self, path: str, name: str) -> None:
        self.name = name
        self.path = path
        self.read_bytes = 0
        try:
            self._fd = os.open(path, _FLAGS)
        except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
            raise unreadable(error, name) from None
        info = os.fstat(self._fd)
        self.size = info.st_size
        if not stat.S_ISREG(info.st_mode):
            os.close(self._fd)
            raise UnreadableError("NOT_A_FILE", "not a regular file", name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        os.close(self._fd)

    def upto(self, offset: int, length: int) -> bytes:
        """At most `length` bytes from `offset`; fewer where the file ends."""
        parts = []
        length = min(length, self.size - offset)
        try:
            os.lseek(self._fd, offset, os.SEEK_SET)
            while length > 0 and (part := os.read(self._fd, min(length, 1 << 26))):
                parts.append(part)
                length -= len(part)
        except (OSError, OverflowError) as error:
            raise unreadable(error if isinstance(error, OSError) else ValueError(str(error)), self.name) from None
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self.read_bytes += len(data)
        return data

    def exactly(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset`; raises `UnreadableError` (TRUNCATED) where the file has fewer.

        The length is checked against the file's size before anything is read, so that a length field
        of 2**62 costs nothing.
        """
        if offset < 0 or length < 0 or offset + length > self.size:
            message = f"needs {length} bytes at byte {offset}, the file has {self.size}"
            raise UnreadableError("TRUNCATED", message, self.name)
        data = self.upto(offset, length)
        if len(data) < length:
            raise UnreadableError("TRUNCATED", f"the file was truncated while it was read, at byte {offset}", self.name)
        return data


class Window(Source):
    """`length` bytes of an open file from `offset`, as a separate file: a torch zip inside a .distcp file."""

    __slots__ = ("_offset", "_whole")

    def __init__(self, whole: Source, offset: int, length: int) -> None:
        self._whole, self._offset = whole, offset
        self.name, self.path = whole.name, whole.path
        self.size = max(0, min(length, whole.size - offset))

    def upto(self, offset: int, length: int) -> bytes:
        """At most `length` bytes from `offset` of the window."""
        return self._whole.upto(self._offset + offset, max(0, min(length, self.size - offset)))


class Cursor:
    """Reads one record after another through a buffer, from `at` on; payloads are skipped without being read.

    A length that the file does not have raises `UnreadableError` (TRUNCATED).
    """

    def __init__(self, source: Source, at: int = 0) -> None:
        self.source = source
        self.at = at
        self._start = 0
        self._data = b""

    def skip(self, length: int) -> None:
        """Skip `length` bytes."""
        left = self.source.size - self.at
        if length > left:
            raise UnreadableError("TRUNCATED", f"needs {length} bytes at byte {self.at}, {left} left", self.source.name)
        self.at += length

    def take(self, length: int) -> bytes:
        """The next `length` bytes."""
        at = self.at
        self.skip(length)
        first = at - self._start
        if first < 0 or first + length > len(self._data):
            self._data = self.source.upto(at, max(length, BUFFER))
            self._start, first = at, 0
        return self._data[first : first + length]
