"""torchtitan's activation checkpointing: full, of every n-th block, by operation, or a memory budget of the compiler.

Source: pytorch/torchtitan@01db32e9 torchtitan/distributed/activation_checkpoint.py.
"""

from __future__ import annotations

import re
from typing import Any

from steptime.base.config import show
from steptime.launch.job_keys import JobKeys
from steptime.launch.nearby_files import NearbyFiles
from steptime.launch.torchtitan.graph_trainer import fuses

LEAST_BUDGET = 0.7
"""Smallest memory budget that a plan takes (`software.performance.Recompute`)."""

_ROUTERS = {"moe.router.gate"}
"""Modules whose products torchtitan lists to be recomputed: small, and counted as saved."""


def option_of(nearby: NearbyFiles) -> dict[str, str]:
    """The option of mode selective that config functions leave unsaid, where their checkout has it (until April 2026)."""
    text = nearby.text("torchtitan/config/configs.py")
    found = re.search(r"^    selective_ac_option: str = \"(\w+)\"", text or "", re.MULTILINE)
    return {"activation_checkpoint.selective_ac_option": found[1]} if found else {}


def checkpointing_of(keys: JobKeys) -> dict[str, Any]:
    """Activation checkpointing, and whether recomputation ends with the last saved tensor where the file sets it."""
    key, plan = "activation_checkpoint.early_stop", recomputed_of(keys)
    if plan == {"activation_checkpointing_type": "none"}:
        keys.without_effect(key, "no activation checkpointing")
    elif keys.on("compile.enable") and "model" in keys.words("compile.components"):
        keys.without_effect(key, "compiled blocks recompute only what backward reads")
    elif keys.get(key) is not None:
        plan["recompute_stops_early"] = keys.on(key)
    return plan


def recomputed_of(keys: JobKeys) -> dict[str, Any]:
    """What is recomputed: nothing, whole blocks, every n-th block, or by op."""
    which, how = "activation_checkpoint.selective_ac_option", "activation_checkpoint.mode"
    option, mode = str(keys.get(which)), str(keys.get(how)).lower()
    none: dict[str, Any] = {"activation_checkpointing_type": "none"}
    if mode == "selective" and option.isdecimal() and int(option) > 0:
        # _apply_layer_sac: every n-th block is checkpointed whole
        return {"recompute": {"granularity": "full", "method": "every", "n_layers": int(option)}}
    forced = "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns"
    if mode == "selective" and option == "op":
        if set(keys.words(forced)) - _ROUTERS:
            keys.approximate(forced, "products recomputed besides every second one: counted as saved")
        return {"activation_checkpointing_type": "per-op"}
    keys.without_effect(forced, "only with mode selective and option op")
    if mode == "selective":
        keys.fail(which, f"expected op or a whole number (got {show(option)})")
        return none
    keys.without_effect(which, "only with mode selective")
    if mode == "memory_budget":
        return budget_of(keys, how)
    if mode not in {"none", "full"}:
        keys.fail(how, f"expected none, selective, full or memory_budget (got {show(mode)})")
    return {"activation_checkpointing_type": "full"} if mode == "full" else none


def budget_of(keys: JobKeys, mode: str) -> dict[str, Any]:
    """The memory budget of the compiler's partitioner (MemoryBudgetAC, which needs a compiled model).

    torchtitan/distributed/activation_checkpoint.py@b5bcd76c: torch._functorch.config.activation_memory_budget, 0.5 by default.
    """
    key = "activation_checkpoint.memory_budget"
    budget = keys.number(key) if keys.get(key) is not None else 0.5
    if not fuses(keys) or "model" not in keys.words("compile.components"):
        keys.fail(mode, "memory_budget needs compile.enable, with model among compile.components")
    elif LEAST_BUDGET <= budget <= 1:
        return {"recompute": {"granularity": "selective", "memory_budget": budget}}
    elif 0 <= budget < LEAST_BUDGET:
        keys.leave_out(mode, f"a memory budget below {LEAST_BUDGET} ({budget:g}): counted as {LEAST_BUDGET}")
        return {"recompute": {"granularity": "selective", "memory_budget": LEAST_BUDGET}}
    else:
        keys.fail(key, f"expected a number from 0 to 1 (got {budget:g})")
    return {"activation_checkpointing_type": "none"}
