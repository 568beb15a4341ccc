"""Which judged rows are left out of the headline figures, and why."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from steptime.base.document import parse_mapping, read_source
from steptime.validation.ci_jobs import is_ci
from steptime.validation.measurements import FOLDER, MeasuredRow, SkipRowError

CI_ROWS = "Megatron-LM's own tests: memory only"


@cache
def _tables() -> dict[str, Any]:
    """Rows with doubtful inputs, and patterns of rows whose time includes something that is not modeled, each with the reason."""
    return parse_mapping(*read_source(FOLDER / "exclusions.yaml"))


def refuse_not_judged(row: MeasuredRow) -> None:
    """Do nothing for a row whose words name nothing that keeps it from becoming a plan.

    Raises:
        SkipRowError: a published row's words do, with what it is.
    """
    words = "; ".join(row.text(column) for column in ("recompute", "zero_or_fsdp", "note")).lower()
    causes = (str(one["why"]) for one in _tables()["not_judged"] if re.search(one["words"], words))
    if row.published and (cause := next(causes, None)):
        raise SkipRowError(cause)


def leak(row: MeasuredRow) -> str | None:
    """Why the peak memory of a published row says nothing about other programs; None where no defect is known."""
    causes = (str(one["why"]) for one in _tables()["leaks"] if re.fullmatch(one["ids"], row.id))
    return next(causes, None) if row.published else None


def exclusion(row: MeasuredRow, assumed: list[str]) -> str | None:
    """Why a judged row is not counted in the headline; None where it is. A user's own rows all count."""
    if row.group == "vtrain-single":
        return "vtrain-single: tiny models, bound by kernel launches"
    if row.file == "native" and re.search(r"deterministic(?! off)", row.text("overlap_notes")):
        return "deterministic debug mode: uninitialized memory is filled"
    if is_ci(row):
        return CI_ROWS
    words = f"{row.text('overlap_notes')}; {row.text('note')}".lower()
    causes = (one["why"] for one in _tables()["not_counted"] if re.search(one["words"], words))
    if row.published and (cause := next(causes, None)):
        return str(cause)
    if row.published and "mindspeed" in row.text("framework").lower():
        return (
            "MindSpeed on Ascend: its vector kernels and matrix multiplies fused with collectives (MC2) are not modeled"
        )
    if row.published and (doubt := _tables()["doubtful"].get(row.id)):
        return f"doubtful inputs: {doubt}"
    if row.published and row.text("task").lower() not in {"", "pretrain"}:
        return "fine-tuning on packed samples"
    if row.text("quality").upper() == "C":
        return "quality C: an important setting is unknown"
    untimed = row.number("step_time_s") is None and row.number("tokens_per_s_per_gpu") is None
    if row.published and untimed and "nvidia-smi" in row.text("mem_metric").lower():
        return "memory-only trials, read from nvidia-smi, which includes memory cached by the allocator"
    if not row.published or not assumed:
        return None
    telling = ("recompute: ", "vocab: ", "vpp: ") if (row.whole("pp") or 1) > 1 else ("recompute: ", "vocab: ")
    unknown = next((item for item in assumed if item.startswith(telling)), None)
    return f"{unknown.partition(':')[0]} not stated" if unknown else None
