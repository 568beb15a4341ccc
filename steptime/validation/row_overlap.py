"""Overlap and CUDA graphs of a measured row, from its text."""

from __future__ import annotations

import re

from steptime.validation.measurements import SkipRowError

_NO_DP_OVERLAP = re.compile(
    r"no --overlap-grad-reduce|no overlap flags|no compute/communication overlap|all-reduce not overlapped|"
    r"reduce not overlapped|no overlap-grad-reduce|no grad/param overlap|all-gather after backward"
)


def overlap_of(notes: str, tp: int, recipe: str) -> dict[str, bool]:
    """What the source says is or is not overlapped; the profile decides the rest.

    Raises:
        SkipRowError: the notes name a schedule that is not modeled.
    """
    if found := re.search(r"\b(zbv|zbb|v-half|v-min|dualpipe)\b", notes):
        raise SkipRowError(f"not modeled yet: schedule {found[1]}")
    overlap: dict[str, bool] = {}
    if tp > 1 and re.search(r"tp (userbuffer|ub) overlap|(?<!no )tp-comm-overlap|\+ tp overlap", notes):
        overlap["tp"] = True
    if found := re.search(r"ep a2a overlap( off)?|a2a_overlap=1", notes):
        overlap["ep"] = not found[1]
    if re.search(r"\bno tp overlap", notes) or (tp > 1 and recipe == "nvfp4"):
        # Megatron-Bridge scripts/performance/configs/llama: tp_comm_overlap = False for nvfp4
        overlap["tp"] = False
    if _NO_DP_OVERLAP.search(notes):
        overlap["dp"] = False
    elif "overlap-grad-reduce" in notes or "grad-reduce/param-gather overlap" in notes or "overlap_grad_sync" in notes:
        overlap["dp"] = True
    return overlap


DROPLESS = ["attn", "moe_router", "moe_preprocess"]
"""Modules that TransformerEngine's graphs can launch in a layer whose experts take any number of rows (moe_layer.py)."""


def graphs_of(notes: str) -> bool | list[str]:
    """What CUDA graphs launch: everything, the modules that the notes list, or nothing."""
    if "cuda_graph none" in notes:
        return False
    words = r"cuda_graph (?:local|transformer_engine) (\[[a-z_', ]+\]|attn|mlp)|te cuda graphs ([a-z_,]+)"
    if found := re.search(words, notes):
        return re.findall(r"[a-z_]+", found[1] or found[2])
    if "te cuda graphs" in notes:
        return DROPLESS
    return bool(re.search(r"cuda_graph |^cuda graphs", notes))
