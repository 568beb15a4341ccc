"""nanotron: one safetensors file per parameter and rank, in directories named after the modules.

Layout: nanotron `src/nanotron/serialize/weights.py` and `utils.py` (file names ..._pp-rank-P-of-N_tp-rank-T-of-M, each
holding one tensor "data"), `metadata.py` (TensorMetadata: local_global_slices_pairs, unsharded_shape as text).
"""

from __future__ import annotations

import re

from steptime.base.words import counted
from steptime.checkpoint.layouts import rank_grid
from steptime.checkpoint.scan import Folder, FolderScan
from steptime.checkpoint.stored_records import Contents, Section, StoredTensor, UnreadableError

FILE = re.compile(
    r"^model_(?P<kind>\w+?)(?:_pp-rank-(?P<pp>\d+)-of-(?P<pps>\d+))?(?:_tp-rank-(?P<tp>\d+)-of-(?P<tps>\d+))?"
    r"(?:_exp-rank-(?P<ep>\d+)-of-(?P<eps>\d+))?\.safetensors$"
)
MARKER = "checkpoint_metadata.json"
MAX_DEPTH = 16
MAX_FILES = 500_000


def sections(scan: FolderScan, folder: Folder, files: list[str]) -> tuple[list[Section], set[str]]:
    """The nanotron save in `folder`, if there is one."""
    if MARKER not in files or "model/" not in files:
        return [], set()
    section = Section("nanotron", "rank files", folder.rel)
    wanted = _files(scan, folder, section)
    scan.absorb(section, folder, wanted, _keep)
    matches = [FILE.match(name.rpartition("/")[2]) for name in wanted]
    for axis in ("tp", "pp", "ep"):
        sizes = [int(m[f"{axis}s"]) for m in matches if m and m[f"{axis}s"]]
        if sizes:
            section.parallelism[axis] = max(sizes)
    section.parallelism["source"] = "file names"
    facts = folder.mapping(MARKER).get("metas")
    step = facts.get("last_train_step") if isinstance(facts, dict) else None
    section.facts |= {"step": step} if type(step) is int else {}
    _name(section, folder)
    _check_ranks(section, wanted)
    section.container = counted(len(wanted), "file")
    section.facts["config"] = folder.mapping("model_config.json")
    return [section], {MARKER, "model/", "model_config.json"}


def _files(scan: FolderScan, folder: Folder, section: Section) -> list[str]:
    """Every safetensors file under model/, as paths from `folder`."""
    found: list[str] = []
    pending = ["model"]
    while pending and len(found) < MAX_FILES:
        name = pending.pop()
        try:
            below = scan.folder(folder.join(name), folder.named(name))
        except UnreadableError as error:
            section.problems.append(error.problem)
            section.unread += 1
            continue
        found += [f"{name}/{file}" for file in below.files if file.endswith(".safetensors")]
        if name.count("/") < MAX_DEPTH:
            pending += [f"{name}/{directory}" for directory in reversed(below.dirs)]
    return found


def _keep(contents: Contents) -> None:
    """The tensor's place in the whole, from the file's own metadata."""
    metadata = contents.facts.get("metadata") or {}
    whole = tuple(map(int, re.findall(r"\d+", metadata.get("unsharded_shape", ""))[:64]))
    slices = re.findall(r"\d+", metadata.get("local_global_slices_pairs", ""))
    for tensor in contents.tensors:
        if len(whole) == len(tensor.shape) and whole:
            tensor.global_shape = whole
            tensor.offsets = _offsets(tensor, slices)


def _offsets(tensor: StoredTensor, numbers: list[str]) -> tuple[int, ...] | None:
    """The first pair of slices is (local start, stop per dimension), (global start, stop per dimension)."""
    dims = len(tensor.shape)
    if len(numbers) != 4 * dims:
        return None  # several pairs: fused matrices such as qkv are split in parts
    return tuple(int(numbers[2 * dims + 2 * d]) for d in range(dims))


def _name(section: Section, folder: Folder) -> None:
    for tensor in section.tensors:
        module, _, file = folder.inner(tensor.file).rpartition("/")
        match = FILE.match(file)
        kind = match["kind"] if match else file
        name = ".".join([*module.split("/")[1:], kind])
        weight = tensor.name == "data"  # beside it a Mamba parameter keeps a flag of its own
        tensor.name = name if weight else f"{name}.{tensor.name}"
        tensor.role = "model" if weight else "other"
        if match:
            tensor.rank = {axis: int(match[axis]) for axis in ("tp", "pp", "ep") if match[axis]}
        if tensor.offsets is None and tensor.global_shape is not None:  # several slices: the split dimension decides
            rank = (tensor.rank or {}).get("tp", 0)
            both = zip(tensor.shape, tensor.global_shape, strict=True)
            tensor.offsets = tuple(rank * own if own != whole else 0 for own, whole in both)


def _check_ranks(section: Section, wanted: list[str]) -> None:
    groups: dict[tuple[str, str, int], set[tuple[int, ...]]] = {}
    for name in wanted:
        module, _, file = name.rpartition("/")
        match = FILE.match(file)
        if match and match["tp"]:
            groups.setdefault((module, match["kind"], int(match["tps"])), set()).add((int(match["tp"]),))
    for (module, kind, ways), present in groups.items():
        if len(section.problems) < rank_grid.MAX_LINES:
            rank_grid.check(
                section, {"tp": ways}, present, lambda rank, at=f"{module}/model_{kind}": f"{at}_tp-rank-{rank}"
            )
