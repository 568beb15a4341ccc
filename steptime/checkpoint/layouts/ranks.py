"""One torch file per rank without any index: model_world_size_8_rank_3.pt (verl), *.rank_3.pth (dinov2), consolidated.03.pth.

DTensors and ShardedTensors record the location of their piece; the names in Meta's models (consolidated) determine the split
dimension (see `tensor_parallel`); for other plain tensors only a checksum distinguishes a copy from a slice.
"""

from __future__ import annotations

import re

from steptime.base.words import counted
from steptime.checkpoint.layouts import rank_grid, single
from steptime.checkpoint.layouts.tensor_parallel import place, split_dim
from steptime.checkpoint.scan import Folder, FolderScan
from steptime.checkpoint.stored_records import Section, StoredTensor

RANK = re.compile(
    r"^(?P<stem>.*?)(?:_world_size_(?P<world>\d{1,6}))?[._]rank[_-]?(?P<rank>\d{1,6})(?P<ext>\.(?:pt|pth|bin|ckpt))$|"
    r"^(?P<meta>consolidated)\.(?P<slice>\d\d)\.(?P<end>pth|pt)$"
)
Ranks = dict[int, str]


def sections(scan: FolderScan, folder: Folder, files: list[str]) -> tuple[list[Section], set[str]]:
    """A section per set of rank files in `folder`."""
    groups: dict[tuple[str, str | None, str], Ranks] = {}
    for name in files:
        match = RANK.match(name)
        if match and not name.startswith(("rng_state", "random_states")):
            stem, ext = match["stem"] or match["meta"] or "", match["ext"] or f".{match['end']}"
            groups.setdefault((stem, match["world"], ext), {})[int(match["rank"] or match["slice"])] = name
    found = []
    used: set[str] = set()
    for (stem, world, ext), ranks in groups.items():
        if len(ranks) == 1 and world is None:
            continue
        used |= set(ranks.values())
        meta = stem == "consolidated"
        section = _read(scan, folder, ranks, int(world) if world else max(ranks) + 1, f"{stem}*{ext}")
        if meta:
            _meta(section, folder, len(ranks))
        found.append(section)
    return found, used


def one_slice(scan: FolderScan, section: Section, path: str, file: str) -> None:
    """Note that `file` in the directory `path` is one of several model-parallel slices, with Meta's file names."""
    match = RANK.match(file)
    if match and match["meta"]:
        slices = [name for name in scan.folder(path).files if (other := RANK.match(name)) and other["meta"]]
        if len(slices) > 1:
            single.part(section, f"slice {int(match['slice']) + 1} of {len(slices)}")


def _read(scan: FolderScan, folder: Folder, ranks: Ranks, world: int, name: str) -> Section:
    section = Section("torch rank files", f"{len(ranks)} of {counted(world, 'rank')}", folder.named(name))
    rank_grid.check(
        section, {"rank": world}, {(rank,) for rank in ranks}, lambda rank: folder.named(_renamed(ranks, rank))
    )
    by_file = {folder.named(file): rank for rank, file in ranks.items()}
    scan.absorb(section, folder, [ranks[rank] for rank in sorted(ranks)])
    for tensor in section.tensors:
        tensor.rank = {"dp": by_file[tensor.file]}
    section.parallelism = {"dp": world, "source": "file names"}
    section.ranks = rank_grid.rows(section.tensors, lambda tensor: f"rank {by_file[tensor.file]}")
    return section


def _renamed(ranks: Ranks, rank: int) -> str:
    """The file that `rank` would have written, after the name of another."""
    name = next(iter(ranks.values()))
    match = RANK.match(name)
    assert match is not None
    group = "rank" if match["rank"] else "slice"
    number = str(rank).zfill(len(match["slice"] or ""))
    return f"{name[: match.start(group)]}{number}{name[match.end(group) :]}"


def _meta(section: Section, folder: Folder, ways: int) -> None:
    """Meta's Llama: model-parallel slices. The embedding was split by columns until Llama 2, by rows since."""
    hidden = next((t.shape[0] for t in section.tensors if t.name.endswith("norm.weight") and len(t.shape) == 1), None)
    for tensor in section.tensors:
        rank = (tensor.rank or {}).get("dp", 0)
        tensor.rank = {"tp": rank}
        place(tensor, ways, rank, _meta_dim(tensor, hidden, ways))
    section.format, section.container = "Meta consolidated", counted(ways, "model-parallel slice")
    section.parallelism = {"tp": section.parallelism["dp"], "source": "file names"}
    if params := folder.mapping("params.json"):
        section.facts.setdefault("params", params)


def _meta_dim(tensor: StoredTensor, hidden: int | None, ways: int) -> int | None:
    if tensor.name.endswith("tok_embeddings.weight") and len(tensor.shape) == 2:
        return 1 if tensor.shape[1] * ways == hidden else 0
    return split_dim(tensor.name)
