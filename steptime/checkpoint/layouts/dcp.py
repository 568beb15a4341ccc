"""torch.distributed.checkpoint directories (FSDP2, torchtitan, accelerate) and Megatron's dist_checkpointing on top.

`.metadata` is written last, so a save without it did not finish. Megatron-Core adds `metadata.json` and `common.pt`
(`megatron/core/dist_checkpointing/core.py`, `strategies/common.py`), newer versions a sharded object "common_state"
inside a .distcp file, itself a torch zip that is read in place.
"""

from __future__ import annotations

import os
import re
from typing import Any

from steptime.base.words import counted
from steptime.checkpoint import zipdir
from steptime.checkpoint.layouts import rank_grid, single
from steptime.checkpoint.readers import torch_file
from steptime.checkpoint.readers.dcp_metadata import Placement
from steptime.checkpoint.scan import Folder, FolderScan
from steptime.checkpoint.source import Source, Window
from steptime.checkpoint.stacks import STACKED
from steptime.checkpoint.stored_records import Section, UnreadableError

PARTIAL = re.compile(r"^__\d+\.metadata$")
DATA = re.compile(r"^__(\d+)_\d+\.distcp$")


def sections(scan: FolderScan, folder: Folder, files: list[str]) -> tuple[list[Section], set[str]]:
    """The distributed checkpoint in `folder`, if there is one."""
    data = [name for name in files if name.endswith(".distcp")]
    metadata = [".metadata"] if ".metadata" in files else [name for name in files if PARTIAL.match(name)]
    if not data and not metadata:
        return [], set()
    section = Section("torch DCP", counted(len(data), "data file"), folder.rel)
    used = {*data, *metadata, "metadata.json", "common.pt"}
    if not metadata:
        size = sum(_size(folder.join(name)) or 0 for name in data)
        message = (
            f"incomplete save: .metadata is missing (it is written last); {len(data)} .distcp files, {size:,} bytes"
        )
        section.problem("MISSING_METADATA", message, folder.named(".metadata"))
        return [section], used
    for contents in scan.absorb(section, folder, metadata):
        _place(section, folder, contents.facts["placement"])
    if any(name.endswith((".tmp", ".metadata.tmp")) for name in files):
        section.problem("LEFTOVER", "a temporary file of an unfinished save exists", folder.rel or None)
    _megatron(scan, folder, files, section)
    return [section], used


def _size(path: str) -> int | None:
    try:
        return os.stat(path).st_size  # noqa: PTH116 - thousands of files
    except (OSError, ValueError):
        return None


def _place(section: Section, folder: Folder, placement: Placement) -> None:
    """Every data file must exist and contain its last piece."""
    wrong = 0
    ranks: dict[str, dict[str, Any]] = {}
    for path, end in placement.ends.items():
        size = None
        if not folder.has_name(path):
            section.problem("PATH_ESCAPE", f".metadata names {path}, outside this directory; not read")
            continue
        size = _size(folder.join(path))
        if size is not None:
            section.nbytes += size
            section.files.append(folder.named(path))
        if size is None or size < end:
            wrong += 1
            if wrong <= rank_grid.MAX_LINES:
                text = "is missing" if size is None else f"has {size:,} bytes, .metadata points up to byte {end:,}"
                section.problem("MISSING_FILE" if size is None else "SHORT_FILE", text, folder.named(path))
        _row(ranks, path, placement)
    if wrong > rank_grid.MAX_LINES:
        section.problem("MISSING_FILE", f"{wrong - rank_grid.MAX_LINES} more data files are missing or too short")
    section.ranks = list(ranks.values())
    section.facts["objects"] = placement.objects


def _row(ranks: dict[str, dict[str, Any]], path: str, placement: Placement) -> None:
    """Add what a file holds to its rank: a rank may have several."""
    match = DATA.match(path)
    name = f"rank {match[1]}" if match else path
    row = ranks.setdefault(name, rank_grid.row(name))
    for role, (pieces, elements, nbytes) in placement.by_file.get(path, {}).items():
        rank_grid.add(row, role, pieces, elements, nbytes)


def _megatron(scan: FolderScan, folder: Folder, files: list[str], section: Section) -> None:
    """metadata.json names the backend; args come from common.pt or from the common_state object."""
    objects = section.facts.pop("objects", {})
    config = folder.mapping("metadata.json")
    if "sharded_backend" in config:
        section.format = f"Megatron dist_checkpointing ({config['sharded_backend']})"
    common = next((key for key in objects if "common_state" in key), None)
    if "common.pt" in files:
        scan.absorb(section, folder, ["common.pt"])
        section.tensors = [t for t in section.tensors if not t.file.endswith("common.pt")]
    elif common is not None:
        _common_object(folder, objects[common], section)
    elif section.format.startswith("Megatron"):
        section.problem("MISSING_FILE", "neither common.pt nor a common_state object: arguments are missing")
    args = section.facts.get("args")
    if isinstance(args, dict):
        section.parallelism = single.parallelism(args)
        if section.format == "torch DCP":
            section.format = "Megatron fsdp_dtensor (torch DCP)"
    _stacked(section)


def _common_object(folder: Folder, where: tuple[str, int, int], section: Section) -> None:
    path, offset, length = where
    if not folder.has_name(path):
        return
    try:
        with Source(folder.join(path), folder.named(path)) as source:
            window = Window(source, offset, length)
            directory = zipdir.read_directory(window)
            if directory is not None:
                contents = torch_file.read_zip(window, directory)
                section.facts |= single.facts_of(contents)
                section.problems += contents.problems
                section.pickles += [contents.pickle] if contents.pickle else []
    except UnreadableError as error:
        section.problems.append(error.problem)


def _stacked(section: Section) -> None:
    """Older Megatron saves stack equal layers: `decoder.layers.x` with a leading layer dimension."""
    names = [t for t in section.tensors if t.role == "model" and STACKED.search(t.name) and t.shape]
    if not section.format.startswith("Megatron") or not names:
        return
    layers = {t.shape[0] for t in names}
    if len(layers) == 1:
        section.notes.append(
            f"layers are stacked: each decoder.layers tensor has a leading dimension of {layers.pop()}"
        )
