"""A plan as a launch file, and the settings that the framework does not have, found by reading the file back."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from importlib import import_module
from typing import Any, NamedTuple

from steptime.base.config import ConfigError
from steptime.base.declared import Settings
from steptime.job.job import Job, facts
from steptime.job.megatron_expert_rules import woven_in_one_stage
from steptime.job.stated import RECOMPUTE, WORD, stated
from steptime.launch.read import read_as
from steptime.launch.reading import to_job
from steptime.launch.write.torchtitan_toml import NOT_IN_LAST, flavor, other_router, refuses_mx

KINDS = {
    "megatron": ("megatron", "steptime.launch.write.megatron_script", "script"),
    "bridge": ("nemo", "steptime.launch.write.recipe_yaml", "bridge"),
    "nemo": ("nemo", "steptime.launch.write.recipe_yaml", "nemo"),
    "torchtitan": ("torchtitan", "steptime.launch.write.torchtitan_toml", "toml"),
    "deepspeed": ("deepspeed", "steptime.launch.write.deepspeed_json", "ds_config"),
}
"""Kind of file -> the kind that reads it (`launch.read.KINDS`), and the function that writes it."""
_MEGATRON_CORE = {"megatron", "bridge", "nemo"}
_LABELS = {"model": ("name", "source")}
"""Keys that only label a plan."""
_SECTIONS = ("hardware", "cross_dc", "run")
"""Sections that launch files do not have."""


class Written(NamedTuple):
    """A launch file."""

    text: str
    left_out: dict[str, Any]
    """Dotted key of the plan -> value: settings that the file does not contain; the file with these settings is the plan."""
    reader: str
    """The kind that reads it."""
    stated: dict[str, Any]
    """Those of them that the plan itself states; the others are defaults, most of them of its software profile."""


def write(job: Job, kind: str) -> Written:
    """The launch file of a plan for a framework, one of `KINDS`.

    Every key of the resolved plan is in the file or in `left_out`: the file is read back, and what differs is left out.
    """
    reader, module, function = KINDS[kind]
    text: str = getattr(import_module(module), function)(job)
    whole = plain(job)
    sets = {section: whole[section] for section in _SECTIONS if section in whole}
    if kind == "deepspeed":  # a program of one's own says these
        sets |= {"model": whole["model"], "data.seqlen": job.data.seqlen}
    router = other_router(job.model) if kind == "torchtitan" else {}
    sets |= router
    if kind == "torchtitan" and not flavor(job.model):
        sets["model"] = whole["model"]
    if reader == "nemo" and woven_in_one_stage(facts(job)):  # which the reader's own profile refuses
        sets["performance.software"] = whole["performance"]["software"]
    if kind == "bridge":  # the launcher says it
        sets["parallelism.dp"] = job.parallelism.dp
    for key in ("parallelism.dp", "model", "performance", "parallelism", "data"):
        for _ in range(4):
            try:
                missing = differences(whole, plain(read_back(text, reader, sets)))
            except ConfigError:
                break
            if not missing:
                sets = _without_model(job, text, reader, sets, router)
                return Written(text, sets, reader, _listed(job, text, reader, sets))
            software = {path: value for path, value in missing.items() if path == "performance.software"}
            sets |= software or missing  # a profile brings its own defaults
        section, _, name = key.partition(".")
        sets = {path: value for path, value in sets.items() if not path.startswith(f"{key}.")}
        sets[key] = whole[section][name] if name else whole[section]
    raise AssertionError(f"{kind}: the file is not read back")  # a fault of ours: all sections are set


def _listed(job: Job, text: str, reader: str, sets: dict[str, Any]) -> dict[str, Any]:
    """What the plan states of settings; not layers_per_stage auto, where the file says the layers that it deals."""
    found, key = stated_of(job, sets), "parallelism.layers_per_stage"
    rest = {path: value for path, value in sets.items() if path != key}
    if found.get(key) == "auto":
        try:
            dealt = read_back(text, reader, rest).layers_per_chunk
        except ConfigError:
            return found
        if dealt == job.layers_per_chunk:
            del found[key]
    return found


def _without_model(job: Job, text: str, reader: str, sets: dict[str, Any], router: dict[str, Any]) -> dict[str, Any]:
    """The settings without the whole model where the file says it, but for its router."""
    rest = {path: value for path, value in sets.items() if path != "model"} | router
    try:
        return sets if "model" not in sets or differences(plain(job), plain(read_back(text, reader, rest))) else rest
    except ConfigError:
        return sets


def stated_of(job: Job, sets: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a resolved plan, by dotted key, that the plan itself states; of a whole section only these."""
    found: dict[str, Any] = {}
    for path, value in sets.items():
        own = stated(job, path)
        if own is not None and value is not None:
            plain_value = value if path in {RECOMPUTE, WORD} else _own(own, value)
            found[path] = job.model.name if path == "model" and job.model.name else plain_value
    return found


def _own(node: Any, value: Any) -> Any:
    """A resolved value without what `node` does not state."""
    if not isinstance(node, Settings) or not isinstance(value, Mapping):
        return value
    own = {key: getattr(node, key) for key in value if key in node.model_fields_set}
    return {key: _own(said, value[key]) for key, said in own.items() if said is not None}


def notes(job: Job, kind: str) -> list[str]:
    """What is to be known of a file beside its settings."""
    if kind != "torchtitan":
        return []
    profile, p, found = job.software, job.parallelism, []
    if not (named := flavor(job.model)):
        why = "torchtitan has no flavor of these sizes, and stops at the file"
        found.append(f"model: give name and flavor in [model]; {why}")
    elif named["model.name"] in NOT_IN_LAST:
        found.append(f"model: torchtitan v0.2.2 has no {named['model.name']}, and stops at the file")
    own = profile.name.startswith("torchtitan")
    if own and p.pp > 1 and p.fsdp is not None and p.fsdp.reshard_after_forward is True:
        key = "parallelism.fsdp.reshard_after_forward"
        found.append(f"{key} is true; torchtitan's own default with pipeline stages is false")
    if own and profile.as_of:
        last = "torchtitan reads job configs in TOML up to v0.2.2 of February 2026"
        found.append(f"{last}; the plan's profile is of {profile.as_of}")
    return found


def refused(job: Job, kind: str) -> list[str]:
    """One line for each setting of a plan that its framework stops at: Megatron-Core runs the files of three kinds."""
    if kind == "torchtitan" and refuses_mx(job):
        fix = "set performance.compile=none or parallelism.tp=1"
        return [f"refused by torchtitan v0.2.2: mxfp8_torchao of a compiled model with tensor parallelism; {fix}"]
    if kind not in _MEGATRON_CORE or not woven_in_one_stage(facts(job)):
        return []
    fix = "raise parallelism.vpp or set performance.overlap.ep=false"
    what = f"performance.overlap.ep with pp {job.parallelism.pp} and no virtual stages (vpp 1)"
    return [f"refused by Megatron-Core: {what}; {fix}"]


def read_back(text: str, reader: str, sets: Mapping[str, Any]) -> Job:
    """The plan of a written file with settings over it."""
    sets = deepcopy(dict(sets))
    return to_job(read_as(reader, "the written file", text, {}, sets), sets, allow_unmodeled=True)


def plain(job: Job) -> dict[str, Any]:
    """The resolved plan as plain data, without what only labels it."""
    config = job.to_config()
    config.pop("notes", None)
    for section, keys in _LABELS.items():
        config[section] = {key: value for key, value in config[section].items() if key not in keys}
    return config


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> our value, None where there is none, of all that is not the same."""
    found: dict[str, Any] = {}
    for key in dict.fromkeys([*ours, *theirs]):
        mine, other = ours.get(key), theirs.get(key)
        if isinstance(mine, Mapping) and isinstance(other, Mapping) and key != "recompute":
            found |= differences(mine, other, f"{prefix}{key}.")
        elif mine != other:
            found[f"{prefix}{key}"] = mine
    if found.get(RECOMPUTE):  # either key of the two takes the other away
        found.pop(WORD, None)
    elif found.get(WORD):
        found.pop(RECOMPUTE, None)
    return found
