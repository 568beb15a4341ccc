"""Whether a file is a training log, judged by its content and not by its name."""

from __future__ import annotations

from steptime.base.config import ConfigError
from steptime.base.document import MAX_BYTES
from steptime.launch.logs.entries import Iteration
from steptime.launch.logs.files import open_plain, pieces
from steptime.launch.logs.job_log import BEGINS
from steptime.launch.logs.lines import said


def is_log(path: str) -> bool:
    """Whether a file holds an argument dump or logged iterations, or is larger than any config; False if it cannot be read."""
    if path == "-":
        return False
    read = 0
    try:
        with open_plain(path) as file:
            for lines in pieces(file):
                for line in lines:
                    if BEGINS in line or any(isinstance(entry, Iteration) for entry in said(line)):
                        return True
                read += sum(map(len, lines))
                if read > MAX_BYTES:
                    return True
    except (ConfigError, EOFError):
        return False
    return False
