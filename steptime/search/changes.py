"""A layout as settings relative to the plan: the `--set`s that reproduce it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steptime.base.words import argument
from steptime.hardware.machine import Machine
from steptime.job.job import Job
from steptime.search.recompute import MAPPING, WORD, recompute

REQUIRED = ("parallelism.tp", "parallelism.pp", "parallelism.dp", "data.microbatch_sz")


def fewest(plan: Job, changes: Mapping[str, Any], *, said: bool = True) -> dict[str, Any]:
    """Those of the changes that have an effect. `said`: the plan has its own layout; otherwise all required settings stay."""
    return {
        key: value
        for key, value in changes.items()
        if (not said and key in REQUIRED) or not _as_is(plan, key, value, changes)
    }


def _as_is(plan: Job, key: str, value: Any, changes: Mapping[str, Any]) -> bool:
    """Whether the plan, with the other changes, already has this value."""
    p, name = plan.parallelism, key.rpartition(".")[2]
    if key == "parallelism.sp":
        usual = plan.software.layout.sp if p.sp is None else p.sp
        return bool(value == (usual and changes["parallelism.tp"] > 1))
    if key == "parallelism.zero_level":
        return bool(value == plan.zero_level)
    if key in {WORD, MAPPING}:
        return same_recompute(plan, key, value)
    if key == "parallelism.etp" and "etp" not in p.model_fields_set:
        return bool(value == (changes["parallelism.tp"] if changes["parallelism.ep"] == 1 else 1))
    if key == "parallelism.dp":  # written whenever a degree changes, since a plan may derive it from the devices
        degrees = ("tp", "pp", "cp", "dp")
        return all(getattr(p, axis) == changes[f"parallelism.{axis}"] for axis in degrees)
    if key == "hardware.node_type" and isinstance(value, str):
        return Machine.load(value).name == plan.machine.name
    section = getattr(plan, key.partition(".")[0], None)
    if key.count(".") != 1 or not hasattr(section, name):
        return False
    ours = getattr(section, name)
    return bool(ours == value or (ours is None and value == []))


def same_recompute(plan: Job, key: str, value: Any) -> bool:
    """Whether the plan already has this recomputation."""
    one, ours = recompute(key, value).form(1), plan.recompute
    return ours._replace(n_layers=tuple(set(ours.n_layers))) == one


def settings(changes: Mapping[str, Any]) -> list[str]:
    """One `--set key=value` per change, quoted for a shell."""
    return [f"--set {path}={argument(value)}" for path, value in changes.items()]


def words(changes: Mapping[str, Any]) -> str:
    """Arguments to append to a command."""
    return " ".join(settings(changes))
