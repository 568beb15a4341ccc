"""Reads measured runs: those included with steptime and a user's own CSV, as rows of text with their line and source."""

from __future__ import annotations

import csv
import gzip
import io
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from steptime.base.config import ConfigError

FOLDER = Path(__file__).parents[1] / "data" / "measurements"
CI_FILE = "megatron_ci"
FILES = ("nvidia", "other", "native", CI_FILE, "out_of_memory")
"""The measured runs included with steptime; data/measurements/README.md describes each file."""

REQUIRED = (
    "id", "gpu", "n_gpus", "n_layers", "hidden", "ffn_hidden", "n_heads", "seq_len", "global_batch_size",
    "micro_batch_size", "tp", "pp",
)  # fmt: skip
"""Columns that every row needs, in addition to one of `MEASURED`."""
MEASURED = ("step_time_s", "tokens_per_s_per_gpu", "peak_memory_gb")

SMALLEST, LARGEST = 1e-9, 1e15
"""Bounds of every figure of a run."""


class SkipRowError(ValueError):
    """A row cannot be judged; the text is one line, and the same for all rows with the same problem where possible."""


class MeasuredRow(NamedTuple):
    """One measured run, as text."""

    cells: dict[str, str]
    file: str
    """Stem of the shipped file; "" for a user's own."""
    line: int
    surplus: int = 0
    """Cells beyond the header: where a comma is not quoted, all columns after it are wrong."""

    @property
    def id(self) -> str:
        """The row's id, of 300 characters at most, or its location."""
        return self.text("id")[:300] or f"line {self.line}"

    @property
    def published(self) -> bool:
        """Whether the row is of the included collection, where an empty cell means that the source does not say."""
        return self.file != ""

    @property
    def group(self) -> str:
        """The source in one word: `source_group`, else the id without its number (DGXC-017 is DGXC); a user's own `source`."""
        if not self.published:
            return self.text("source_group") or self.text("source") or "own"
        return self.text("source_group") or re.sub(r"[-_]?\d+$", "", self.id)

    def text(self, column: str) -> str:
        """A cell without surrounding blanks; "" where there is none."""
        return (self.cells.get(column) or "").strip()

    def number(self, column: str) -> float | None:
        """A positive finite number, or None where the cell is empty.

        Raises:
            SkipRowError: it is no such number.
        """
        word = self.text(column)
        if not word:
            return None
        try:
            value = float(word)
        except ValueError:
            value = 0.0
        if not SMALLEST <= value <= LARGEST:
            raise SkipRowError(f"{column}: expected a positive number (got {word[:40]!r})")
        return value

    def whole(self, column: str) -> int | None:
        """A positive whole number, or None where the cell is empty.

        Raises:
            SkipRowError: it is no such number.
        """
        value = self.number(column)
        if value is not None and value != int(value):
            raise SkipRowError(f"{column}: expected a whole number (got {self.text(column)[:40]!r})")
        return None if value is None else int(value)

    def needed(self, column: str) -> int:
        """A required whole number.

        Raises:
            SkipRowError: it is missing, or no such number.
        """
        value = self.whole(column)
        if value is None:
            raise SkipRowError(f"{column}: not stated" if self.published else f"{column}: missing")
        return value

    def flag(self, column: str) -> bool | None:
        """0 or 1 (also true, false, yes, no), or None where the cell is empty.

        Raises:
            SkipRowError: it is neither.
        """
        word = self.text(column).lower()
        if word in {"1", "true", "yes", "on", "1.0"}:
            return True
        if word in {"0", "false", "no", "off", "0.0"}:
            return False
        if word:
            raise SkipRowError(f"{column}: expected 0 or 1 (got {word[:40]!r})")
        return None


@cache
def shipped() -> tuple[MeasuredRow, ...]:
    """Every row of the included collection."""
    rows: list[MeasuredRow] = []
    for name in FILES:
        with gzip.open(FOLDER / f"{name}.csv.gz", "rt", encoding="utf-8", newline="") as file:
            rows += _rows(file.read(), name, f"{name}.csv")
    return tuple(rows)


def read(path: str) -> list[MeasuredRow]:
    """The rows of a user's CSV.

    Raises:
        ConfigError: there is no such file, it is no CSV, it has no rows, or its header lacks a required column.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text; save it as CSV in UTF-8") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "cannot be read"
        raise ConfigError(f"{path}: {reason.lower()}; give a CSV of measured runs") from None
    rows = list(_rows(text, "", path))
    if not rows:
        raise ConfigError(f"{path}: no rows; expected a header and one measured run per line")
    header = set().union(*(row.cells for row in rows))
    problems = [f"{path}: column {column}: missing" for column in REQUIRED if column not in header]
    if not header & set(MEASURED):
        problems.append(f"{path}: column missing: one of {', '.join(MEASURED)}")
    if problems:
        raise ConfigError(problems)
    return rows


def _rows(text: str, file: str, name: str) -> Iterator[MeasuredRow]:
    """Every row that is not empty; columns are compared in lower case.

    Raises:
        ConfigError: the text is no CSV.
    """
    if "\0" in text:
        raise ConfigError(f"{name}: holds null bytes; give a CSV of measured runs")
    reader = csv.reader(io.StringIO(text, newline=""))
    header: list[str] = []
    try:
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if not header:
                header = [cell.strip().lower() for cell in cells]
                continue
            surplus = max(0, len(cells) - len(header))
            yield MeasuredRow(dict(zip(header, cells, strict=False)), file, reader.line_num, surplus)
    except csv.Error as error:
        raise ConfigError(f"{name}: line {reader.line_num}: {error}") from None
