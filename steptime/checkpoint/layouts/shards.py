"""One model over several files: an index, or names ending in -00001-of-00005; safetensors, .bin and DCP's HF form.

Index: Hugging Face `model.safetensors.index.json` / `pytorch_model.bin.index.json` {metadata.total_size, weight_map}.
DCP in HF form: torch 2.13 `torch/distributed/checkpoint/hf_storage.py` and `_hf_utils.py` (DCP_SHARDING_INFO holds the
offsets of each saved piece as JSON).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from steptime.base.words import counted
from steptime.checkpoint.layouts import single
from steptime.checkpoint.pickles.values import shape_of
from steptime.checkpoint.scan import Folder, FolderScan
from steptime.checkpoint.source import Source
from steptime.checkpoint.stored_records import Contents, Section, UnreadableError

MAX_INDEX = 256 << 20


@dataclass(slots=True)
class _Set:
    """Files of one model: `files` present, `weights` {tensor: file} from an index, `expected` file names."""

    stem: str
    files: list[str] = field(default_factory=list)
    index: str | None = None
    weights: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    expected: set[str] = field(default_factory=set)


def sections(scan: FolderScan, folder: Folder, files: list[str]) -> tuple[list[Section], set[str]]:
    """Sections for every sharded set among `files` of `folder`, and the names they used."""
    found: list[Section] = []
    used: set[str] = set()
    present = set(files)
    for index in [name for name in files if name.endswith(".index.json")]:
        group = _Set(index.removesuffix(".index.json"), index=index)
        section = Section("shards", "sharded", folder.rel)
        if not _load_index(group, section, folder, present):
            found += [section] if section.problems else []
            continue
        used |= {index, *group.files}
        found.append(_read(scan, folder, group, section))
    for group in _numbered([name for name in files if name not in used]).values():
        group.expected -= used  # shards that an index already claimed are not missing
        used |= set(group.files)
        found.append(_read(scan, folder, group, Section("shards", "sharded", folder.rel)))
    return found, used


def _numbered(files: list[str]) -> dict[tuple[str, str, str], _Set]:
    groups: dict[tuple[str, str, str], _Set] = {}
    for name in files:
        match = single.NUMBERED.match(name)
        if match is None:
            continue
        count, width = int(match["of"]), len(match["n"])
        stem = re.sub(r"shard-\d+-", "shard-*-", match["stem"])
        group = groups.setdefault((stem, match["of"], match["ext"]), _Set(match["stem"]))
        group.files.append(name)
        if "*" not in stem and count <= 100_000 and not group.expected:
            begin, end = name[: match.start("n")], f"-of-{match['of']}{match['ext']}"
            group.expected = {f"{begin}{n:0{width}d}{end}" for n in range(1, count + 1)}
    return groups


def _load_index(group: _Set, section: Section, folder: Folder, present: set[str]) -> bool:
    """Whether the index is one of weights; what is wrong with it goes to `section`."""
    assert group.index is not None
    name = folder.named(group.index)
    try:
        with Source(folder.join(group.index), name) as source:
            raw = source.exactly(0, min(source.size, MAX_INDEX))  # a longer one is then no JSON
            section.read += len(raw)
        index = json.loads(raw)
        weights, metadata = index["weight_map"], index.get("metadata") or {}
        shards = {str(shard) for shard in set(weights.values())}
        group.weights = weights
        group.metadata = metadata if isinstance(metadata, dict) else {}
    except UnreadableError as error:
        section.problems.append(error.problem)
        return False
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        section.problem("BAD_INDEX", "not an index with a weight_map of tensor to file", name)
        return False
    for shard in sorted(shards):
        if folder.has_name(shard):
            group.expected.add(shard)
        else:
            section.problem("PATH_ESCAPE", f"the index names {shard}, outside this directory; not read", name)
    group.files = [shard for shard in sorted(group.expected) if shard in present]
    return True


def _read(scan: FolderScan, folder: Folder, group: _Set, section: Section) -> Section:
    missing = sorted(group.expected - set(group.files))
    for shard in missing[:20]:
        section.problem("MISSING_SHARD", "is missing", folder.named(shard))
    if len(missing) > 20:
        section.problem("MISSING_SHARD", f"{len(missing) - 20} more shards are missing")
    read = scan.absorb(section, folder, group.files)
    section.format = read[0].format if read else "shards"
    section.stem = re.sub(r"\.(?:safetensors|bin)$", "", group.stem)
    section.container = counted(len(group.files), "shard") + (" + index" if group.index else "")
    for contents in read:
        section.facts.setdefault("metadata", contents.facts.get("metadata"))
    sharding = [contents for contents in read if "DCP_SHARDING_INFO" in (contents.facts.get("metadata") or {})]
    if sharding:
        section.container += ", DCP in HF form"
        _stitch(section, sharding)
    shards, weights = {folder.named(shard): shard for shard in group.files}, group.weights
    agree = {weights.get(t.name) == shards[t.file] for t in section.tensors}
    equal = len(weights) == len(section.tensors) and False not in agree
    if not (equal or sharding):
        _check_duplicates(section)
    if group.index:
        _check_index(section, group, folder, equal)
    return section


def _check_duplicates(section: Section) -> None:
    first: dict[str, str] = {}
    for tensor in section.tensors:
        other = first.setdefault(tensor.name, tensor.file)
        if other != tensor.file:
            message = f"tensor {tensor.name} is in {other} and in {tensor.file}"
            section.problem("DUPLICATE_KEY", message, tensor.file, tensor.name)
            tensor.alias_of = tensor.name  # a loader keeps one of them


def _check_index(section: Section, group: _Set, folder: Folder, equal: bool) -> None:
    """The index and the shards must agree (`equal`: they do); thousands of wrong names take few lines."""
    assert group.index is not None
    index, weights = folder.named(group.index), group.weights
    gone = {error.file for error in section.problems if error.severity == "error"}
    there = {shard for shard in group.expected if folder.named(shard) not in gone}  # those that an index may name
    lost: list[str] = []
    extra: list[str] = []
    if not equal:
        found = {(tensor.name, tensor.file) for tensor in section.tensors}
        lost = [n for n, shard in weights.items() if shard in there and (n, folder.named(shard)) not in found]
        extra = [tensor.name for tensor in section.tensors if tensor.name not in weights]
    for code, names, text in (
        ("MISSING_TENSOR", lost, "is not in the shard that the index names"),
        ("NOT_IN_INDEX", extra, "is in a shard but not in the index"),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            section.problem(code, f"tensor {names[0]}{more} {text}", index, names[0])
    total = group.metadata.get("total_size")
    size = sum(tensor.nbytes for tensor in section.tensors)
    if type(total) is int and total != size and not gone:
        message = f"the index says total_size {total:,}, the shards hold {size:,} bytes of tensors"
        section.problem("TOTAL_SIZE", message, index)


def _stitch(section: Section, sharding: list[Contents]) -> None:
    """Pieces of one tensor carry the same name in several files, with their offsets in the file's metadata."""
    offsets: dict[tuple[str, str], Any] = {}
    for contents in sharding:
        try:
            info = json.loads(contents.facts["metadata"]["DCP_SHARDING_INFO"])
            offsets |= {(contents.file, name): shape_of(entry["saved_offsets"]) for name, entry in info.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            section.problem("BAD_SHARDING_INFO", "DCP_SHARDING_INFO is not what torch writes", contents.file)
    for tensor in section.tensors:
        found = offsets.get((tensor.file, tensor.name))
        if found is not None and len(found) == len(tensor.shape):
            tensor.offsets = found
