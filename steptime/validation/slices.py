"""Which judged rows count, which are in the headline, and errors by slice.

The headline: runs of NVIDIA's own frameworks (nvidia.csv) with the dense 8 x B200 runs of SimuMax, which are Megatron-LM's; a
user's own rows always count in it. Mixtures of experts are a separate group, and so is the PyTorch-native stack (native.csv).
Everything else that steptime includes is another trainer. These are reported by source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from steptime.base.grouping import grouped
from steptime.validation.judgement import Judgement
from steptime.validation.stats import Errors, Stats, plain, stats

ENOUGH = 10
"""Number of rows of quality A or B from which a source's median is compared with `WORSE_THAN`."""
WORSE_THAN = 0.15
"""Median |error| of a source above which an explanation is required."""


def headline(judged: Iterable[Judgement]) -> list[Judgement]:
    """The rows that count: judged, and not excluded."""
    return [j for j in judged if j.skipped is None and j.excluded is None]


def with_experts(j: Judgement) -> bool:
    """Whether a shipped row is of a mixture of experts."""
    return j.row.file != "" and model_kind(j).startswith("moe")


def experts_of_nvidia(j: Judgement) -> bool:
    """Whether a row is of a mixture of experts in the collections of the headline."""
    return with_experts(j) and (j.row.file == "nvidia" or j.row.group == "simumax")


def experts_of_others(j: Judgement) -> bool:
    """Whether a row is of a mixture of experts in other collections."""
    return with_experts(j) and not experts_of_nvidia(j)


EXPERTS: dict[str, Callable[[Judgement], bool]] = {
    "mixtures of experts, NVIDIA's frameworks": experts_of_nvidia,
    "mixtures of experts, other trainers": experts_of_others,
}
"""The two groups of mixtures of experts."""


def leads(j: Judgement) -> bool:
    """Whether a row belongs to the headline group."""
    return not with_experts(j) and (j.row.file in {"", "nvidia"} or j.row.group == "simumax")


def native(j: Judgement) -> bool:
    """Whether a row is of the PyTorch-native collection."""
    return not with_experts(j) and j.row.file == "native"


def others(j: Judgement) -> bool:
    """Whether a row is of another trainer of the included collection."""
    return not leads(j) and not native(j) and not with_experts(j)


def split_of(j: Judgement) -> str:
    """fit, test, or a user's own word; "none" where there is none."""
    return j.row.text("split") or "none"


def unfitted(judged: Iterable[Judgement]) -> list[Judgement]:
    """The rows that no constant may be fitted on."""
    return [j for j in judged if split_of(j) == "test"]


def model_kind(j: Judgement) -> str:
    """Dense or moe, and mha, gqa, mqa or mla, by what the row says of experts and heads."""
    row = j.row
    experts = "dense" if row.text("n_experts") in {"", "0", "1"} else "moe"
    if row.text("attention_kind").lower().startswith("mla"):
        return f"{experts} mla"
    heads, kv_heads = row.text("n_heads"), row.text("n_kv_heads") or row.text("n_heads")
    grouped = "mqa" if kv_heads == "1" else "gqa"
    return f"{experts} {'mha' if kv_heads == heads else grouped}"


def step_errors(judged: Iterable[Judgement]) -> Errors:
    """(cell, signed error of the step time) of the rows that have one."""
    return [(j.cell, error) for j in judged if (error := j.step_error) is not None]


def memory_errors(judged: Iterable[Judgement]) -> Errors:
    """(cell, signed error of the peak memory) of the rows that have one."""
    return [(j.cell, error) for j in judged if (error := j.memory_error) is not None]


SLICES: dict[str, Callable[[Judgement], str]] = {
    "split": split_of,
    "accelerator": lambda j: j.accelerator,
    "source": lambda j: j.row.group,
    "precision": lambda j: j.precision,
    "framework": lambda j: j.framework,
    "model_kind": model_kind,
}


def sliced(
    judged: Iterable[Judgement],
    key: Callable[[Judgement], str],
    errors: Callable[[Iterable[Judgement]], Errors] = step_errors,
) -> dict[str, Stats]:
    """Stats by a key, most rows first."""
    found = {name: stats(errors(group)) for name, group in grouped(judged, key).items()}
    kept = {name: figures for name, figures in found.items() if figures is not None}
    return dict(sorted(kept.items(), key=lambda item: (-item[1].rows, item[0])))


def told_by_source(counted: Sequence[Judgement]) -> dict[str, Any]:
    """Rows of a group by source, so that a source with many rows has one vote.

    Returns: `sources` (stats of each), `median_over_sources` (of each source's median), the same of test rows only
    (`test_sources`, `test_median_over_sources`), and `worse_than_15_percent`: sources with `ENOUGH` rows of quality A or B whose
    median is above `WORSE_THAN`.
    """
    found: dict[str, Any] = {}
    for prefix, rows in (("", counted), ("test_", unfitted(counted))):
        by_source = sliced(rows, SLICES["source"])
        medians = [figures.median for figures in by_source.values()]
        found[f"{prefix}sources"] = {name: plain(figures) for name, figures in by_source.items()}
        found[f"{prefix}median_over_sources"] = median(medians) if medians else None
    stated = sliced((j for j in counted if j.row.text("quality").upper() in {"A", "B"}), SLICES["source"])
    found["worse_than_15_percent"] = [
        name for name, figures in stated.items() if figures.rows >= ENOUGH and figures.median > WORSE_THAN
    ]
    return found
