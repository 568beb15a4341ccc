"""One torch file per rank without any index: model_world_size_8_rank_3.pt (verl), *.rank_3.pth (dinov2).

Each file pickles DTensors or ShardedTensors, whose records hold the whole shape and the rank's own piece; a DTensor's
placements say along which dimension it is split.
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any

from steptime.checkpoint.layouts import single
from steptime.checkpoint.records import Section

if TYPE_CHECKING:
    from steptime.checkpoint.records import Contents, StoredTensor
    from steptime.checkpoint.scan import Folder, Scan

RANK = re.compile(
    r"^(?P<stem>.*?)(?:_world_size_(?P<world>\d{1,6}))?[._]rank[_-]?(?P<rank>\d{1,6})(?P<ext>\.(?:pt|pth|bin|ckpt))$"
)
MAX_LINES = 10


def sections(scan: Scan, folder: Folder, files: list[str]) -> tuple[list[Section], set[str]]:
    """A section per set of rank files in `folder`."""
    groups: dict[tuple[str, str | None, str], dict[int, str]] = {}
    for name in files:
        match = RANK.match(name)
        if match and not name.startswith(("rng_state", "random_states")):
            groups.setdefault((match["stem"], match["world"], match["ext"]), {})[int(match["rank"])] = name
    found = []
    used: set[str] = set()
    for (stem, world, ext), ranks in groups.items():
        if len(ranks) == 1 and world is None:
            continue
        used |= set(ranks.values())
        found.append(_read(scan, folder, ranks, int(world) if world else max(ranks) + 1, f"{stem}*{ext}"))
    return found, used


def _read(scan: Scan, folder: Folder, ranks: dict[int, str], world: int, name: str) -> Section:
    section = Section("torch rank files", f"{len(ranks)} of {world} ranks", folder.named(name))
    missing = [rank for rank in range(min(world, 1 << 16)) if rank not in ranks]
    for rank in missing[:MAX_LINES]:
        section.problem("MISSING_RANK", f"rank {rank} is missing: {len(ranks)} of {world} present", folder.named(name))
    if len(missing) > MAX_LINES:
        section.problem("MISSING_RANK", f"{len(missing) - MAX_LINES} more ranks are missing")
    by_file = {folder.named(file): rank for rank, file in ranks.items()}
    for contents in scan.absorb(section, folder, [ranks[rank] for rank in sorted(ranks)], _facts):
        for key, value in contents.facts["kept"].items():
            section.facts.setdefault(key, value)
    for tensor in section.tensors:
        tensor.rank = {"dp": by_file[tensor.file]}
    _count(section, bool(missing))
    section.parallelism = {"dp": world, "source": "file names"}
    section.ranks = _rows(section, by_file)
    return section


def _facts(contents: Contents) -> dict[str, Any]:
    return single.facts_of(contents.facts.get("root"))


def _count(section: Section, missing: bool) -> None:
    """The whole tensor counts once: at its first piece, when the pieces add up to it."""
    groups: dict[tuple[str, str], list[StoredTensor]] = {}
    for tensor in section.tensors:
        groups.setdefault((tensor.role, tensor.name), []).append(tensor)
    torn = 0
    for (_, name), group in groups.items():
        whole = prod(group[0].whole)
        left = whole
        for tensor in group:
            tensor.unique = min(tensor.numel, left)
            left -= tensor.unique
            tensor.note = tensor.note or ("" if tensor.unique or not tensor.numel else "replica")
        if left > 0 and not missing:
            torn += 1
            if torn <= MAX_LINES:
                message = f"pieces of {name} hold {whole - left:,} of {whole:,} elements"
                section.problem("INCOMPLETE_COVER", message, tensor=name)


def _rows(section: Section, by_file: dict[str, int]) -> list[dict[str, Any]]:
    rows = {
        rank: {"name": f"rank {rank}", "tensors": 0, "params": 0, "model_bytes": 0, "optimizer_bytes": 0}
        for rank in sorted(by_file.values())
    }
    for tensor in section.tensors:
        row: dict[str, Any] = rows[by_file[tensor.file]]
        row["tensors"] += 1
        if tensor.role in ("model", ""):
            row["params"] += tensor.numel
            row["model_bytes"] += tensor.nbytes
        else:
            row["optimizer_bytes"] += tensor.nbytes
    return list(rows.values())
