"""Single files, and what the pickled object contains about the run that wrote it."""

from __future__ import annotations

import re
from math import prod
from typing import Any

from steptime.checkpoint.pickles import object_graph
from steptime.checkpoint.pickles.values import mapping
from steptime.checkpoint.stored_records import Contents, Section

NUMBERED = re.compile(r"^(?P<stem>.*?)[-_.]?(?P<n>\d{1,6})-of-(?P<of>\d{1,6})(?P<ext>\.\w+)$")
STEP_KEYS = ("iteration", "global_step", "global_steps", "step", "iter_num", "iter", "current_step", "num_update")
ARGS_KEYS = ("args", "hyper_parameters", "model_args", "config", "cfg", "hparams", "opt")


def facts_of(contents: Contents) -> dict[str, Any]:
    """step, args and framework from the top level of a pickled object, where it has them."""
    top = mapping(contents.facts.get("root"))
    found: dict[str, Any] = {}
    step = next((top[key] for key in STEP_KEYS if type(top.get(key)) is int), None)
    if step is not None:
        found["step"] = step
    if type(top.get("epoch")) is int:
        found["epoch"] = top["epoch"]
    args = next((object_graph.plain(top[key]) for key in ARGS_KEYS if object_graph.plain(top.get(key))), None)
    if args:
        found["args"] = args
    version = top.get("pytorch-lightning_version")
    if type(version) is str:
        found["framework"] = f"Lightning {version}"
    elif "checkpoint_version" in top and "iteration" in top:
        found["framework"] = "Megatron-LM"
    return found


def parallelism(args: dict[str, Any]) -> dict[str, Any]:
    """The degrees in Megatron's arguments (`megatron/training/arguments.py`); virtual stages per pipeline stage as vpp."""
    names = {
        "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size", "vpp": "virtual_pipeline_model_parallel_size", "dp": "data_parallel_size",
    }  # fmt: skip
    found: dict[str, Any] = {key: args[name] for key, name in names.items() if type(args.get(name)) is int}
    return found | {"source": "args"} if found else {}


def section(contents: Contents) -> Section:
    """The section of a single file."""
    stated = facts_of(contents)
    contents.facts.pop("root", None)
    stem = contents.file.rpartition("/")[2].rpartition(".")[0]
    found = Section(contents.format, "single file", contents.file, stem=stem)
    found.facts |= contents.facts | stated
    framework = found.facts.get("framework")
    if framework:
        found.format = f"{contents.format} ({framework})"
    found.absorb(contents)
    if framework == "Megatron-LM":
        _one_rank(found)
    _one_part(found)
    part = [t for t in found.tensors if t.global_shape not in (None, t.shape) and t.note != "sparse"]
    if part:
        here, whole = sum(t.numel for t in part), sum(prod(t.whole) for t in part)
        found.notes.append(f"one rank's file: it holds {here:,} of the {whole:,} elements of its sharded tensors")
        found.facts["slices"] = True
    return found


def _one_part(section: Section) -> None:
    """A file whose name or key-values number it among others holds some of the tensors, not the model."""
    match = NUMBERED.match(section.path.rpartition("/")[2])
    number, count = (int(match["n"]), int(match["of"])) if match else (0, 0)
    keys = section.facts.get("gguf") or {}
    if type(keys.get("split.count")) is int and type(keys.get("split.no")) is int:
        number, count = keys["split.no"] + 1, keys["split.count"]
    if count > 1:
        part(section, f"shard {number} of {count}")


def part(section: Section, what: str) -> None:
    """Note that a file is one of a set: its shapes and its totals are not those of the model."""
    section.container = f"{what}: give the directory"
    section.facts |= {"slices": True, "part": True}


def _one_rank(section: Section) -> None:
    """A file of one rank holds slices: the whole model is given by its arguments, not by its shapes."""
    degrees = parallelism(section.facts.get("args") or {})
    split = {key: degrees[key] for key in ("tp", "pp", "ep") if degrees.get(key, 1) > 1}
    if split:
        words = " x ".join(f"{key.upper()} {value}" for key, value in split.items())
        section.notes.append(f"one rank of {words}: shapes are slices; give the parent directory for the whole model")
        section.facts["slices"] = True
