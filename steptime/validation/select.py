"""Selects measured rows of a file or the included collection: by source, accelerator and split, or one by its id."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import PurePath

from steptime.base.config import ConfigError, near
from steptime.validation.measurements import MeasuredRow, read, shipped


def select(path: str | None, source: str | None, gpu: str | None, split: str) -> list[MeasuredRow]:
    """The rows asked for, in the order of the files.

    `source` is compared with the source's word, else sought in the id, else in the text that names the source; `gpu` is sought
    in the gpu column; case does not count.

    Raises:
        ConfigError: the file cannot be read, or no row matches; the message lists the valid words.
    """
    rows = read(path) if path else list(shipped())
    if source is not None:
        word = source.lower()
        kept = (
            [row for row in rows if word == row.group.lower()]
            or [row for row in rows if word in row.id.lower()]
            or [row for row in rows if word in row.text("source").lower()]
        )
        _not_empty(kept, "--source", source, [row.group for row in rows])
        rows = kept
    if gpu is not None:
        kept = [row for row in rows if _plain(gpu) in _plain(row.text("gpu"))]
        _not_empty(kept, "--gpu", gpu, [row.text("gpu") for row in rows])
        rows = kept
    if split != "all":
        kept = [row for row in rows if row.text("split") == split]
        _not_empty(kept, "--split", split, ["all", *(row.text("split") for row in rows)])
        rows = kept
    return rows


def _plain(text: str) -> str:
    return text.lower().replace("-", "").replace("_", "").replace(" ", "")


def _not_empty(kept: list[MeasuredRow], option: str, said: str, words: list[str]) -> None:
    if not kept:
        known = sorted({word for word in words if word})
        raise ConfigError(f"{option}: no row has {said!r}{near(said, known)}")


def find(name: str, path: str | None = None) -> MeasuredRow | None:
    """The row called `name` (case does not count) in a CSV of measured runs, or else in the included collection.

    None where `name` is rather a config's: without a CSV, a file, standard input, or nothing like an id.

    Raises:
        ConfigError: no row has that id; the message lists similar ids.
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
            f"{name}: no row of {path} has that id; ids in the file: {', '.join([r.id for r in rows.values()][-5:])}"
        )
    return None
