"""Layers of several kinds in a Megatron job: hybrid patterns and the sizes of Mamba layers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from steptime.launch.job_keys import JobKeys
from steptime.launch.reading import OTHER_MODEL
from steptime.model.hf_hybrid import AHEAD

_SIZES = ("mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups")
"""Sizes of Mamba layers."""


def sizes_of(keys: JobKeys, names: Iterable[str]) -> dict[str, int]:
    """The sizes that are given, each under the plan's key that the table has for it."""
    said = {keys.table.rules[name].note.rpartition(".")[2]: keys.whole(name) for name in names}
    return {ours: size for ours, size in said.items() if size is not None}


def hybrid_pattern(keys: JobKeys) -> str:
    """Kinds of layer by letter, pipeline stages split by "|" (core ssm/mamba_hybrid_layer_allocation.py); empty without any."""
    return _patterns(keys)[0]


def _patterns(keys: JobKeys) -> list[str]:
    """That pattern, and one for each depth of multi-token prediction."""
    said = keys.get("hybrid_layer_pattern") or keys.get("hybrid_override_pattern")
    return str(said or "").strip("\\\"'").split("/")


def hybrid_section(keys: JobKeys) -> dict[str, Any]:
    """What a hybrid model adds to the `model` section; empty for other models."""
    pattern = hybrid_pattern(keys)
    if not pattern:
        if keys.on("is_hybrid_model"):
            keys.leave_out("is_hybrid_model", "hybrid layers without a pattern")
        if keys.get("mamba_ssm_ngroups"):  # only in NeMo 1's Mamba
            keys.leave_out("mamba_ssm_ngroups", f"Mamba layers without a pattern, {OTHER_MODEL}")
        return {}
    depths = _patterns(keys)[1:]
    if {*depths} - {AHEAD}:
        keys.leave_out("hybrid_layer_pattern", f"multi-token prediction layers other than {AHEAD}")
    if re.search(r"(?:mamba|hybrid)_stack_spec", str(keys.get("spec") or "")):
        keys.without_effect("spec", "the layers of the hybrid pattern")
    letters, said = pattern.replace("|", ""), keys.whole("num_layers")
    if said not in {None, len(letters)}:
        keys.problem(f"the hybrid pattern has {len(letters)} layers, num_layers is {said}")
    sizes = sizes_of(keys, _SIZES)
    mamba = {"mamba": sizes} if "M" in letters else {}
    return {"n_layers": len(letters), "hybrid_pattern": letters, "mtp": len(depths) or None, **mamba}
