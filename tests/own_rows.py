"""Rows of a user's own CSV: one good row, and changes to it; the shipped rows by id."""

import csv

from steptime.validation import measurements
from steptime.validation.measurements import MeasuredRow

SHIPPED = {row.id: row for row in measurements.shipped()}
BASE = {
    "id": "own-1",
    "gpu": "dgx-h100",
    "n_gpus": "64",
    "n_layers": "32",
    "hidden": "4096",
    "ffn_hidden": "14336",
    "n_heads": "32",
    "seq_len": "4096",
    "global_batch_size": "128",
    "micro_batch_size": "1",
    "tp": "4",
    "pp": "2",
    "step_time_s": "2.5",
}


def own(**cells):
    """A user's row: BASE with cells changed."""
    return MeasuredRow(BASE | {key: str(value) for key, value in cells.items()}, "", 2)


def write(path, *changes, columns=None):
    """A CSV with one row per mapping of changes to BASE."""
    found = [BASE | change for change in changes]
    columns = columns or list(dict.fromkeys(key for row in found for key in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(found)
    return path
