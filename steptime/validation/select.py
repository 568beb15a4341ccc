"""Selects measured rows: a file or the shipped collection, filtered by source, accelerator and split."""

from __future__ import annotations

from steptime.base.config import ConfigError, near
from steptime.validation.measurements import MeasuredRow, read, shipped


def select(path: str | None, source: str | None, gpu: str | None, split: str) -> list[MeasuredRow]:
    """The rows asked for, in the order of the files.

    `source` is compared with the source's word, else sought in the id, else in the text that names the source; `gpu` is sought
    in the gpu column; case does not count.

    Raises:
        ConfigError: the file cannot be read, or nothing is left: the words there are stand beside.
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
