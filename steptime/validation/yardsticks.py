"""What errors are compared with: simpler predictions, and the noise floor, how much two measurements of the same cell differ.

Predictions fitted on the `fit` rows take one factor per accelerator and precision, the median of measured over predicted: a flat
MFU uses the FLOP count only; the scaled estimate shows how much of the error is a constant bias that a fit would remove.

No model can be better than the noise floor on average. Same cell: same model, accelerator and devices, layout, batch, precision
with its recipe, sharding and recomputation; within one release also the notes on overlap and kernels. Dense pre-training rows of
the headline group with a step time and no doubtful inputs, judged or not; other trainers are separate, and so are mixtures of
experts of NVIDIA's frameworks (no column says which dispatcher or which CUDA graphs a run had). A table reprinted in a later
release counts as measured twice, which makes the floor slightly too low.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from statistics import median
from typing import Any, NamedTuple

from steptime.base.grouping import grouped
from steptime.validation.exclusion import exclusion
from steptime.validation.judgement import Judgement
from steptime.validation.slices import (
    EXPERTS,
    experts_of_nvidia,
    leads,
    model_kind,
    others,
    split_of,
    step_errors,
    unfitted,
)
from steptime.validation.stats import Errors, plain, stats

Guess = Callable[[Judgement], float | None]


def scaled(judged: Iterable[Judgement], guess: Guess) -> Errors:
    """(cell, signed error) on test rows of a baseline times its factor; a pair without fit rows takes the median of all factors.

    Empty where there is no fit row at all.
    """
    timed = [(j, seconds) for j in judged if j.measured_step_s and (seconds := guess(j))]
    factors: dict[tuple[str, str], list[float]] = {}
    for j, seconds in timed:
        if split_of(j) == "fit" and j.measured_step_s:
            factors.setdefault((j.accelerator, j.precision), []).append(j.measured_step_s / seconds)
    if not factors:
        return []
    everything = [factor for group in factors.values() for factor in group]
    return [
        (j.cell, seconds * median(factors.get((j.accelerator, j.precision), everything)) / j.measured_step_s - 1.0)
        for j, seconds in timed
        if split_of(j) == "test" and j.measured_step_s
    ]


def baselines(counted: Iterable[Judgement]) -> dict[str, Any]:
    """Stats on test rows: the estimate, the estimate with one factor per accelerator and precision, and a flat MFU per pair."""
    rows = list(counted)
    if not any(split_of(j) == "fit" for j in rows) or not any(split_of(j) == "test" for j in rows):
        return {}  # no rows to fit factors on, or none to judge
    return {
        "estimate": plain(stats(step_errors(unfitted(rows)))),
        "scaled_estimate": plain(stats(scaled(rows, lambda j: j.predicted_step_s))),
        "flat_mfu": plain(stats(scaled(rows, lambda j: j.model_flops))),
    }


def baselines_of_groups(counted: Sequence[Judgement]) -> dict[str, Any]:
    """`baselines` of the headline and, under `experts`, of each group of mixtures of experts, with factors of its own rows."""
    experts = {name: baselines(j for j in counted if wanted(j)) for name, wanted in EXPERTS.items()}
    return baselines(j for j in counted if leads(j)) | {"experts": experts}


COLUMNS = (
    "model_name", "n_layers", "hidden", "ffn_hidden", "n_heads",
    "gpu", "n_gpus", "tp", "pp", "cp", "ep", "vpp", "seq_len", "global_batch_size",
    "micro_batch_size", "precision", "zero_or_fsdp", "recompute",
)  # fmt: skip
"""Columns that define a cell."""
NOTES = ("overlap_notes", "sp", "machine")
"""Columns that may be worded differently in another release, but not within one."""

Cells = dict[tuple[str, ...], list[Judgement]]


class CellLookup(NamedTuple):
    """A row and the median of its cell in other releases or sources."""

    j: Judgement
    cell: tuple[str, ...]
    other_s: float


def cells_of(judged: Iterable[Judgement], *, dense: bool = True) -> Cells:
    """Counted rows by cell."""
    timed = [j for j in judged if j.measured_step_s is not None and not exclusion(j.row, [])]
    counted = [j for j in timed if model_kind(j).startswith("dense") == dense]
    return grouped(counted, lambda j: tuple(j.row.text(column) for column in COLUMNS))


def release(j: Judgement) -> tuple[str, str]:
    """Origin of a measurement: source and framework with its release."""
    return j.row.group, j.row.text("framework")


def pairs(cells: Cells, *, same_release: bool) -> Errors:
    """(cell, |a - b| over the mean of both) for every two measurements of a cell, within one release or across."""
    found: Errors = []
    for cell, rows in cells.items():
        for a, b in combinations(rows, 2):
            if (release(a) == release(b)) != same_release or (same_release and _notes(a) != _notes(b)):
                continue
            if a.measured_step_s and b.measured_step_s:
                both = a.measured_step_s + b.measured_step_s
                found.append((cell, abs(a.measured_step_s - b.measured_step_s) / (both / 2.0)))
    return found


def _notes(j: Judgement) -> list[str]:
    return [j.row.text(column) for column in NOTES]


def lookups(cells: Cells) -> list[CellLookup]:
    """Every row whose cell was measured in another release too."""
    found = []
    for cell, rows in cells.items():
        for j in rows:
            others = [o.measured_step_s for o in rows if release(o) != release(j) and o.measured_step_s]
            if others:
                found.append(CellLookup(j, cell, median(others)))
    return found


def noise(judged: Sequence[Judgement]) -> dict[str, Any]:
    """Stats (with `max`) of pairs of measurements, and of predicting a row by the median of its cell in other releases.

    One vote per cell. `estimate_on_test` is the estimate on those rows of `lookup_on_test` that could be judged.
    """
    dense = cells_of(j for j in judged if leads(j))
    moe = cells_of((j for j in judged if experts_of_nvidia(j)), dense=False)
    found = lookups(dense)
    test = [
        item for item in found if split_of(item.j) == "test" and item.j.step_error is not None and not item.j.excluded
    ]
    return {
        "same_release": _figures(pairs(dense, same_release=True)),
        "other_release": _figures(pairs(dense, same_release=False)),
        "other_trainers": _figures(pairs(cells_of(j for j in judged if others(j)), same_release=True)),
        "moe_other_release": _figures(pairs(moe, same_release=False)),
        "lookup": _figures(_errors(found)),
        "lookup_on_test": _figures(_errors(test)),
        "estimate_on_test": _figures([(item.cell, item.j.step_error or 0.0) for item in test]),
    }


def _errors(found: Iterable[CellLookup]) -> Errors:
    return [(item.cell, item.other_s / item.j.measured_step_s - 1.0) for item in found if item.j.measured_step_s]


def _figures(errors: Errors) -> dict[str, Any]:
    return plain(stats(errors)) | {"max": max((abs(error) for _, error in errors), default=None)}
