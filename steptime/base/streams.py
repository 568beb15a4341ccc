"""Standard streams that cannot be written any more: a reader that left (`| head`), a full disk."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TextIO


def abandon(stream: TextIO | None) -> None:
    """Send the rest of what a stream holds, and the interpreter's own last flush of it, nowhere."""
    if stream is not None:  # None: the caller closed it, as with >&-
        with suppress(OSError, ValueError):  # where the stream is no file
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def abandon_unless_writable(stream: TextIO | None) -> None:
    """`abandon` a stream whose pending text cannot be written: else the process ends with code 120 (sys.exit)."""
    if stream is not None:
        try:
            stream.flush()
        except OSError:
            abandon(stream)
        except ValueError:  # closed
            pass
