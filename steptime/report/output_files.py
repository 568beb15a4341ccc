"""Files that a report writes: checked before the work, with a one-line error where they cannot be written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from steptime.base.config import ConfigError


def check_path(option: str, path: str, suffixes: Sequence[str]) -> None:
    """Whether a file with one of these suffixes can be written there.

    Raises:
        ConfigError: another suffix, or no such folder.
    """
    if not path.lower().endswith(tuple(suffixes)):
        kinds = ", ".join(suffixes)
        raise ConfigError(f"{option} {path}: unknown format; use a file name that ends in one of {kinds}")
    folder = Path(path).parent
    if not os.path.isdir(folder):  # noqa: PTH112  False, not an error, for what can be no folder's name
        raise ConfigError(f"{option} {path}: folder {folder} does not exist")


def write_file(option: str, path: str, raw: bytes) -> None:
    """Write a file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        Path(path).write_bytes(raw)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {path}: cannot be written ({getattr(error, 'strerror', None) or error})") from None
