"""The files that launch scripts, configs and logs are read from: plain or gzip, line by line in bounded memory."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from steptime.base.config import ConfigError
from steptime.base.document import unreadable

CHUNK = 1 << 18
"""Bytes per read."""
LONGEST = 1 << 16
"""Bytes of a line that are examined."""
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
"""A control sequence of a terminal: colors, cursor moves (ECMA-48)."""


@contextmanager
def open_plain(name: str) -> Iterator[BinaryIO]:
    """Open a file, decompressed if it is gzip; a truncated gzip file ends in EOFError.

    Raises:
        ConfigError: it cannot be read, in one line.
    """
    try:
        with open(name, "rb") as raw:  # noqa: PTH123  one call, and it reports directories and pipes alike
            yield gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == b"\x1f\x8b" else raw  # type: ignore[misc]
    except (gzip.BadGzipFile, zlib.error):
        raise ConfigError(f"{name}: damaged gzip file") from None
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise unreadable(name, error) from None


def pieces(file: BinaryIO) -> Iterator[list[bytes]]:
    """Lines of a file, chunk by chunk; only the first `LONGEST` bytes of a long line."""
    rest = b""
    while chunk := file.read1(CHUNK):  # type: ignore[attr-defined]  # what a cut gzip file still has comes before its error
        lines = (rest + chunk).replace(b"\r", b"\n").split(b"\n")
        rest = lines.pop()[:LONGEST]
        yield [line[:LONGEST] for line in lines]
    yield [rest]


def plain(line: str) -> str:
    """A line without the colors of a terminal."""
    return _ESCAPE.sub("", line) if chr(27) in line else line
