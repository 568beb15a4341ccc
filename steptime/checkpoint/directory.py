"""Reads a directory: selects the iteration, groups files into sets, marks sets that repeat another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from steptime.checkpoint import same_model
from steptime.checkpoint.detect import SUFFIXES, foreign_folder, refusal
from steptime.checkpoint.layouts import (
    dcp,
    deepspeed_save,
    iterations,
    megatron_save,
    nanotron,
    orbax,
    ranks,
    shards,
    single,
)
from steptime.checkpoint.scan import MAX_DEPTH, Folder, FolderScan
from steptime.checkpoint.stored_records import Contents, Problem, Section, UnreadableError

Layout = Callable[[FolderScan, Folder, list[str]], tuple[list[Section], set[str]]]

# In the order in which they may claim files and sub-directories ("name/") of a folder.
_LAYOUTS: tuple[Layout, ...] = (
    dcp.sections, megatron_save.sections, deepspeed_save.sections, ranks.sections, orbax.sections, nanotron.sections,
    shards.sections,
)  # fmt: skip
LOOKED_FOR = "safetensors, torch, DCP, Megatron, DeepSpeed, GGUF, npy, zarr, Orbax and msgpack files"
CONFIGS = {"config.json": "config", "params.json": "params", "adapter_config.json": "adapter"}
"""Documents about the weights in the same folder, by the fact they become."""
PIPELINE = "model_index.json"  # Diffusers: several models, each in a folder of its own
_TEMPORARY = (".tmp", ".incomplete", ".partial", ".crdownload", ".aria2", ".part")


def read(scan: FolderScan, path: str) -> tuple[list[Section], list[Problem], list[str]]:
    """(sections, problems of the directory as a whole, other iterations). Raises `UnreadableError`."""
    folder = scan.folder(path)
    choice = iterations.choose(scan, folder)
    problems = list(choice.problems)
    found: list[Section] = []
    above = _configs(folder, [])
    for chosen in choice.folders:
        for section in _sections(scan, chosen, {} if chosen is folder else above):
            if choice.step is not None and not scan.everything:
                section.facts.setdefault("step", choice.step)
            found.append(section)
    same_model.mark(found)
    found = _with_facts(found)
    _prefix_shared_names(found, folder.mapping(PIPELINE))
    if not any(section.tensors or section.files for section in found):
        problems += [problem for section in found for problem in section.problems]
        names = [folder.named(name) for name in (*folder.files, *(f"{name}/" for name in folder.dirs))]
        what = foreign_folder(names)
        if what is not None:
            raise UnreadableError("UNSUPPORTED", refusal(what), path)
        if not problems:
            raise UnreadableError("NOTHING_FOUND", f"no checkpoint found (looked for {LOOKED_FOR})", path)
        return [], problems, choice.others
    return found, problems, choice.others


def _with_facts(found: list[Section]) -> list[Section]:
    """Merge files without tensors into the first section."""
    kept = [section for section in found if section.tensors or section.problems]
    for section in found:
        if kept and not (section.tensors or section.problems):
            kept[0].pickles += section.pickles
            kept[0].files += section.files
            kept[0].nbytes += section.nbytes
            for key in ("step", "args"):
                if key in section.facts:
                    kept[0].facts.setdefault(key, section.facts[key])
    return kept


def _prefix_shared_names(found: list[Section], pipeline: dict[str, Any]) -> None:
    """Prefix the names of different models that share tensor names with their folder, or with their file name."""
    models = [s for s in found if s.same_as is None and any(t.role in ("", "model") for t in s.tensors)]
    for section in models if pipeline else ():
        section.facts["pipeline"] = section.container = str(pipeline.get("_class_name", "pipeline"))
        section.format = f"Diffusers ({section.format})"
    if not pipeline and len(models) < 2:
        return
    names = Counter(name for s in models for name in {t.name for t in s.tensors if t.role in ("", "model")})
    if not pipeline and max(names.values(), default=0) < 2:
        return
    folders = [section.files[0].rpartition("/")[0] if section.files else section.path for section in models]
    for section, folder in zip(models, folders, strict=True):
        label = folder if folders.count(folder) == 1 else "/".join(part for part in (folder, section.stem) if part)
        for tensor in section.tensors if label else ():
            tensor.name = f"{label.replace('/', '.')}.{tensor.name}"
            tensor.alias_of = tensor.alias_of and f"{label.replace('/', '.')}.{tensor.alias_of}"


def _sections(scan: FolderScan, folder: Folder, above: dict[str, Any]) -> list[Section]:
    """All sets in `folder` and, up to a depth, below it; without its own config, that of the folder `above` is used."""
    found: list[Section] = []
    left = [*folder.files, *(f"{name}/" for name in folder.dirs)]
    for layout in _LAYOUTS:
        sections, used = layout(scan, folder, left)
        found += sections
        left = [name for name in left if name not in used]
    found += _loose(scan, folder, [name for name in left if not name.endswith("/")])
    configs = _configs(folder, found) or above
    for section in found:
        for fact, config in configs.items():
            section.facts.setdefault(fact, config)
    own = any(section.tensors for section in found)
    for name in left:
        if name.endswith("/") and folder.depth < MAX_DEPTH and not name.startswith("."):
            try:
                found += _sections(scan, scan.below(folder, name[:-1]), {} if own else configs)
            except UnreadableError as error:
                found.append(Section("directory", "directory", folder.named(name), problems=[error.problem]))
    return found


def _configs(folder: Folder, found: list[Section]) -> dict[str, Any]:
    """The JSON documents next to the weights, against which names and shapes are checked."""
    configs: dict[str, Any] = {}
    for name, fact in CONFIGS.items():
        config = folder.json(name) if name in folder.files else {}
        if isinstance(config, dict):
            configs |= {fact: config} if config else {}
        elif found:
            message = "cannot be read as a JSON object: not checked against the weights"
            found[0].problem("BAD_CONFIG", message, folder.named(name), severity="warning")
    return configs


def _loose(scan: FolderScan, folder: Folder, files: list[str]) -> list[Section]:
    """Files outside every set. Only those with the suffix of a weight file are opened."""
    found: list[Section] = []
    wanted = [name for name in files if name.lower().endswith(SUFFIXES) or iterations.FLAX.match(name)]
    for name in files:
        if name.endswith(_TEMPORARY):
            section = Section("unfinished", "directory", folder.named(name))
            section.problem("LEFTOVER", "a temporary file of an unfinished save or download", folder.named(name))
            found.append(section)
    for name, result in zip(wanted, scan.read(folder, wanted), strict=True):
        if isinstance(result, Contents):
            found.append(single.section(result))
        elif not (name.endswith(".model") and result.problem.code == "UNKNOWN_FORMAT"):  # tokenizers
            found.append(Section("unreadable", "single file", folder.named(name), problems=[result.problem], unread=1))
    return found
