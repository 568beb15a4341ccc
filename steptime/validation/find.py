"""One measured row by its id."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import PurePath

from steptime.base.config import ConfigError
from steptime.validation.measurements import MeasuredRow, read, shipped


def find(name: str, path: str | None = None) -> MeasuredRow | None:
    """The row called `name` (case does not count) in a CSV of measured runs, or else in the shipped collection.

    None where `name` is rather a config's: without a CSV, a file, standard input, or nothing like an id.

    Raises:
        ConfigError: no row has that id; near ids stand beside.
    """
    is_file = os.path.exists(name)  # noqa: PTH110  False, not an error, for what can be no file's name
    if path is None and (is_file or name == "-" or PurePath(name).suffix in {".yaml", ".yml", ".json"}):
        return None
    rows = {row.id.lower(): row for row in reversed(read(path) if path else list(shipped()))}
    if name.lower() in rows:
        return rows[name.lower()]
    close = [rows[key].id for key in get_close_matches(name.lower(), rows, n=3, cutoff=0.6)]
    if close:
        where = f" of {path}" if path else ""
        raise ConfigError(
            f"{name}: no such file, and no measured row{where} has that id; did you mean {' or '.join(close)}?"
        )
    if path:
        raise ConfigError(
            f"{name}: no row of {path} has that id; there are: {', '.join([r.id for r in rows.values()][-5:])}"
        )
    return None
