"""Megatron-LM's own checkpoint layout: one directory per model-parallel rank, mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt.

Names and keys: Megatron-LM `megatron/training/checkpointing.py` (get_checkpoint_name, generate_state_dict). A single number after
the tensor rank is the pipeline rank, or with one pipeline stage the expert rank: only the arguments in the file determine which.
Layer numbers are local to a pipeline chunk and are made global here.
"""

from __future__ import annotations

import re
from typing import Any

from steptime.base.words import counted
from steptime.checkpoint.layouts import rank_grid, tensor_parallel
from steptime.checkpoint.layouts.single import parallelism
from steptime.checkpoint.scan import Folder, FolderScan
from steptime.checkpoint.stored_records import Section, StoredTensor

RANK_DIR = re.compile(r"^mp_rank_(\d{2,4})(?:_(\d{3,4}))?(?:_(\d{3,4}))?/$")
MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt", "model_weights.ckpt")
OPTIMIZER_FILES = ("distrib_optim.pt", "optim.pt")

Coordinates = tuple[int, int, int]  # (tp, pp, ep)


def sections(scan: FolderScan, folder: Folder, files: list[str]) -> tuple[list[Section], set[str]]:
    """All ranks of one iteration in `folder`, if there are any."""
    dirs = {name: match for name in files if (match := RANK_DIR.match(name))}
    if not dirs:
        return [], set()
    section = Section("Megatron-LM (torch)", counted(len(dirs), "rank"), folder.rel)
    wanted, optimizers = _files(scan, folder, list(dirs), section)
    scan.absorb(section, folder, wanted)
    args = section.facts.get("args") or {}
    where = _coordinates(dirs, args)
    by_dir = {name: where[f"{name}/"] for name in (d[:-1] for d in dirs)}
    for tensor in section.tensors:
        tp, pp, ep = by_dir[_rank_dir(tensor.file, folder)]
        tensor.rank = (tensor.rank or {}) | {"tp": tp, "pp": pp, "ep": ep}
    _check_grid(section, folder, by_dir, args)
    model = {name for name in by_dir if any(f.startswith(f"{name}/model") for f in wanted)}
    _check_files(section, folder, by_dir, model, optimizers)
    tensor_parallel.make_global(section.tensors, args)
    _tied(section, args)
    section.ranks = _rows(section.tensors)
    section.container += f", {len(model)} model + {counted(len(optimizers), 'optimizer file')}"
    return [section], set(dirs)


def _rank_dir(file: str, folder: Folder) -> str:
    return folder.inner(file).partition("/")[0]


def _files(scan: FolderScan, folder: Folder, dirs: list[str], section: Section) -> tuple[list[str], set[str]]:
    """(files to read, directories that have their own optimizer file)."""
    wanted: list[str] = []
    optimizers: set[str] = set()
    for below in scan.inside(folder, (name[:-1] for name in dirs), section.problems):
        name = _rank_dir(below.rel, folder)
        wanted += [f"{name}/{file}" for file in MODEL_FILES if file in below.files]
        own = [f"{name}/{file}" for file in OPTIMIZER_FILES if file in below.files]
        wanted += own
        if own:
            optimizers.add(name)
    return wanted, optimizers


def _coordinates(dirs: dict[str, re.Match[str]], args: dict[str, Any]) -> dict[str, Coordinates]:
    """{directory: (tp, pp, ep)}; a lone second number is the expert rank only where the arguments say so."""
    experts_only = args.get("pipeline_model_parallel_size") == 1 and (args.get("expert_model_parallel_size") or 1) > 1
    found: dict[str, Coordinates] = {}
    for name, match in dirs.items():
        first, second, third = (int(group) if group else 0 for group in match.groups())
        found[name] = (first, 0, second) if experts_only and match[3] is None else (first, second, third)
    return found


def _check_grid(section: Section, folder: Folder, by_dir: dict[str, Coordinates], args: dict[str, Any]) -> None:
    """Every rank of the grid must exist; the grid is given by the arguments, or by the range of the names."""
    stated = parallelism(args)
    seen = {key: 1 + max(c[i] for c in by_dir.values()) for i, key in enumerate(("tp", "pp", "ep"))}
    sizes = {key: max(size, stated.get(key) or 1) for key, size in seen.items()}
    section.parallelism = sizes | {key: stated.get(key) for key in ("vpp", "cp", "dp") if stated.get(key)}
    section.parallelism |= {"source": "file names", "agrees_with_args": None}
    if stated:
        agrees = all((stated.get(key) or 1) == size for key, size in seen.items())
        section.parallelism |= {"source": "file names and args", "agrees_with_args": agrees}

    def name(tp: int, pp: int, ep: int) -> str:
        numbers = [tp, *([pp] if sizes["pp"] > 1 else []), *([ep] if sizes["ep"] > 1 else [])]
        return folder.named("mp_rank_" + "_".join(f"{n:0{3 if i else 2}d}" for i, n in enumerate(numbers)))

    rank_grid.check(section, sizes, set(by_dir.values()), name)


def _check_files(
    section: Section, folder: Folder, by_dir: dict[str, Coordinates], model: set[str], optimizers: set[str]
) -> None:
    without_optimizer = model - optimizers if optimizers else set[str]()
    for names, what in (
        (set(by_dir) - model, f"no {MODEL_FILES[0]}"),
        (without_optimizer, f"no {OPTIMIZER_FILES[0]}, which other ranks have"),
    ):
        for name in sorted(names)[: rank_grid.MAX_LINES]:
            section.problem("MISSING_FILE", what, folder.named(name))
        if len(names) > rank_grid.MAX_LINES:
            section.problem("MISSING_FILE", f"{len(names) - rank_grid.MAX_LINES} more ranks: {what}")


def _tied(section: Section, args: dict[str, Any]) -> None:
    """A tied output layer on the last stage is a copy of the embedding."""
    if args.get("untie_embeddings_and_output_weights") is not False:
        return
    model = [tensor for tensor in section.tensors if tensor.role == "model"]
    embedding = next((t.name for t in model if t.name.endswith("word_embeddings.weight")), None)
    for tensor in model:
        if embedding and tensor.name.endswith("output_layer.weight"):
            tensor.alias_of, tensor.note = embedding, "tied copy"


def _rows(tensors: list[StoredTensor]) -> list[dict[str, Any]]:
    """One row per stage and kind of rank; ranks of a stage with equal contents are one row."""
    places: dict[str, Coordinates] = {}

    def label(tensor: StoredTensor) -> str:
        rank = tensor.rank or {}
        name = f"stage {rank['pp']} tp {rank['tp']} ep {rank['ep']}"
        places[name] = (rank["pp"], rank["tp"], rank["ep"])
        return name

    folded: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in sorted(rank_grid.rows(tensors, label), key=lambda row: places[row["name"]]):
        stage = places[row["name"]][0]
        own = folded.setdefault((stage, *list(row.values())[1:]), row | {"pp": stage, "ranks": 0})
        own["ranks"] += 1
        if own["ranks"] > 1:
            own["name"] = f"stage {stage} x{own['ranks']}"
    return list(folded.values())
