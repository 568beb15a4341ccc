"""Callbacks of NeMo 2.0's trainer that set what a step costs."""

from __future__ import annotations

from typing import Any

from steptime.launch.devices import machine_told
from steptime.launch.job_keys import JobKeys
from steptime.launch.keys import flatten, load_table
from steptime.launch.nemo.targets import class_of, simplify
from steptime.launch.reading import Sets

_BUCKET = 128 * 1024 * 1024
"""Elements (nemo/lightning/pytorch/callbacks/megatron_comm_overlap.py, _get_optimizer_overlap_cfgs)."""
_OVERLAP = "trainer.callbacks.MegatronCommOverlapCallback"
_DEEPEP = "trainer.callbacks.DeepEPCallback"
_DEEPEP_CAPABILITIES = (8, 9)


def callback_settings(callbacks: Any, sets: Sets) -> dict[str, Any]:
    """Dotted keys of the callbacks, by their classes: the fields of those that are read, with their defaults."""
    read, said = load_table("nemo2").raw["callbacks"], dict[str, Any]()
    for item in callbacks if isinstance(callbacks, list) else []:
        name = class_of(item).rpartition(".")[2] or "callback"
        key = f"trainer.callbacks.{name}"
        on = name in read and (key != _DEEPEP or _deepep_runs(sets))
        fields = {**read[name], **simplify(item if isinstance(item, dict) else {})} if on else "..."
        said |= flatten({key: fields})
    return said


def _deepep_runs(sets: Sets) -> bool:
    """Whether DeepEPCallback sets anything (its setup: Ampere and Hopper only); where the machine is not known, as if."""
    machine = machine_told(sets)
    capability = machine.accelerator.compute_capability if machine else _DEEPEP_CAPABILITIES[-1]
    return int(capability or 0) in _DEEPEP_CAPABILITIES


def note_callbacks(keys: JobKeys) -> None:
    """Tell that DeepEP is counted where the machine is not known."""
    if f"{_DEEPEP}.moe_token_dispatcher_type" in keys.names.values() and machine_told(keys.sets) is None:
        keys.notes.append(f"{_DEEPEP}: counted as on Ampere or Hopper; elsewhere it sets nothing")


def overlap_defaults(keys: JobKeys) -> dict[str, tuple[str, Any]]:
    """The defaults of the overlap callback, where the job has it: by key, its name and value."""
    if not any(item.name.startswith(_OVERLAP) for item in keys.given):
        return {}
    virtual = keys.get("virtual_pipeline_model_parallel_size")
    found: dict[str, tuple[str, Any]] = {
        "overlap_grad_reduce": (f"{_OVERLAP}.overlap_grad_reduce", True),
        "overlap_param_gather": (f"{_OVERLAP}.overlap_param_gather", True),
        "overlap_p2p_comm": (f"{_OVERLAP}.overlap_p2p_comm", virtual not in (None, 1)),
    }
    if keys.get("ddp_bucket_size") is None:
        found["ddp_bucket_size"] = (f"{_OVERLAP}.bucket_size", _BUCKET)
    return found
