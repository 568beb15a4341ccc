"""Standard streams that can no longer be written: the reader closed the pipe (`| head`), or the disk is full."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TextIO


def abandon(stream: TextIO | None) -> None:
    """Redirect the rest of a stream's output, and the interpreter's final flush of it, to the null device."""
    if stream is not None:  # None: the caller closed it, as with >&-
        with suppress(OSError, ValueError):  # where the stream is no file
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def abandon_unless_writable(stream: TextIO | None) -> None:
    """`abandon` a stream whose pending text cannot be written: otherwise the process exits with code 120 (sys.exit)."""
    if stream is not None:
        try:
            stream.flush()
        except OSError:
            abandon(stream)
        except ValueError:  # closed
            pass
