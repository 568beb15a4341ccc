"""Megatron-LM's own checkpoint layout: one directory per model-parallel rank, mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt.

Names and keys: Megatron-LM `megatron/training/checkpointing.py` (get_checkpoint_name, generate_state_dict). With one
number behind the tensor rank it is the pipeline rank, or the expert rank when there is one pipeline stage: only the
arguments in the file tell. Layer numbers are local to a pipeline chunk and are made global here.
"""

from __future__ import annotations

import re
from itertools import product
from typing import TYPE_CHECKING, Any

from steptime.checkpoint.layouts import megatron_names, pieces, single
from steptime.checkpoint.layouts.dcp import parallelism
from steptime.checkpoint.records import Section, UnreadableError

if TYPE_CHECKING:
    from steptime.checkpoint.records import Contents, StoredTensor
    from steptime.checkpoint.scan import Folder, Scan

RANK_DIR = re.compile(r"^mp_rank_(\d{2,4})(?:_(\d{3,4}))?(?:_(\d{3,4}))?/$")
MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt", "model_weights.ckpt")
OPTIMIZER_FILES = ("distrib_optim.pt", "optim.pt")
GAPS = frozenset({"MISSING_RANK", "MISSING_FILE", "TRUNCATED"})  # why pieces do not add up, said once
MAX_LINES = 10
MAX_GRID = 1 << 20

Coordinates = tuple[int, int, int]  # (tp, pp, ep)


def sections(scan: Scan, folder: Folder, files: list[str]) -> tuple[list[Section], set[str]]:
    """All ranks of one iteration in `folder`, if there are any."""
    dirs = {name: match for name in files if (match := RANK_DIR.match(name))}
    if not dirs:
        return [], set()
    section = Section("Megatron-LM (torch)", f"{len(dirs)} ranks", folder.rel)
    wanted, optimizers = _files(scan, folder, list(dirs), section)
    read = scan.absorb(section, folder, wanted, _facts)
    for contents in read:
        for key, value in contents.facts["kept"].items():
            section.facts.setdefault(key, value)
    args = section.facts.get("args") or {}
    where = _coordinates(dirs, args)
    by_dir = {name: where[f"{name}/"] for name in (d[:-1] for d in dirs)}
    for tensor in section.tensors:
        tp, pp, ep = by_dir[_rank_dir(tensor.file, folder)]
        tensor.rank = (tensor.rank or {}) | {"tp": tp, "pp": pp, "ep": ep}
    _check_grid(section, folder, by_dir, args)
    model = {name for name in by_dir if any(f.startswith(f"{name}/model") for f in wanted)}
    _check_files(section, folder, by_dir, model, optimizers)
    megatron_names.make_global(section.tensors, args)
    _count(section, args)
    section.ranks = _rows(section.tensors)
    section.container += f", {len(model)} model + {len(optimizers)} optimizer files"
    return [section], set(dirs)


def _rank_dir(file: str, folder: Folder) -> str:
    return file[len(folder.rel) + 1 if folder.rel else 0 :].partition("/")[0]


def _facts(contents: Contents) -> dict[str, Any]:
    return single.facts_of(contents.facts.get("root"))


def _files(scan: Scan, folder: Folder, dirs: list[str], section: Section) -> tuple[list[str], set[str]]:
    """(files to read, directories that have an optimizer file of their own)."""
    wanted: list[str] = []
    optimizers: set[str] = set()
    for name in dirs:
        try:
            inside = scan.below(folder, name[:-1]).files
        except UnreadableError as error:
            section.problems.append(error.problem)
            continue
        wanted += [f"{name}{file}" for file in MODEL_FILES if file in inside]
        own = [f"{name}{file}" for file in OPTIMIZER_FILES if file in inside]
        wanted += own
        if own:
            optimizers.add(name[:-1])
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
    """Every rank of the grid must be there; the grid is what the arguments say, or the reach of the names."""
    stated = parallelism(args)
    seen = {key: 1 + max(c[i] for c in by_dir.values()) for i, key in enumerate(("tp", "pp", "ep"))}
    grid = {key: max(size, stated.get(key) or 1) for key, size in seen.items()}
    present = set(by_dir.values())
    section.parallelism = grid | {key: stated.get(key) for key in ("vpp", "cp", "dp") if stated.get(key)}
    section.parallelism |= {"source": "file names", "agrees_with_args": None}
    if stated:
        agrees = all((stated.get(key) or 1) == size for key, size in seen.items())
        section.parallelism |= {"source": "file names and args", "agrees_with_args": agrees}
    if grid["tp"] * grid["pp"] * grid["ep"] > MAX_GRID:
        section.problem("MISSING_RANK", f"the arguments ask for {grid['tp']} x {grid['pp']} x {grid['ep']} ranks")
        return
    missing = [c for c in product(*(range(grid[key]) for key in ("tp", "pp", "ep"))) if c not in present]
    total = grid["tp"] * grid["pp"] * grid["ep"]
    for tp, pp, ep in missing[:MAX_LINES]:
        name = f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if grid["pp"] > 1 else "") + (f"_{ep:03d}" if grid["ep"] > 1 else "")
        degrees = f"TP {grid['tp']} x PP {grid['pp']} x EP {grid['ep']}"
        message = f"missing: {total - len(missing)} of {total} ranks present ({degrees})"
        section.problem("MISSING_RANK", message, folder.named(name))
    if len(missing) > MAX_LINES:
        section.problem("MISSING_RANK", f"{len(missing) - MAX_LINES} more ranks are missing")


def _check_files(
    section: Section, folder: Folder, by_dir: dict[str, Coordinates], model: set[str], optimizers: set[str]
) -> None:
    for name in sorted(set(by_dir) - model)[:MAX_LINES]:
        section.problem("MISSING_FILE", f"no {MODEL_FILES[0]} in it", folder.named(name))
    if optimizers:
        for name in sorted(model - optimizers)[:MAX_LINES]:
            section.problem("MISSING_FILE", f"no {OPTIMIZER_FILES[0]}, which other ranks have", folder.named(name))


def _count(section: Section, args: dict[str, Any]) -> None:
    """Model pieces are put together; a tied output layer on the last stage is a copy; the rest counts as it is."""
    model = [tensor for tensor in section.tensors if tensor.role == "model"]
    inner = Section(section.format, "", section.path, tensors=model)
    pieces.assemble(inner)
    known = section.unread or any(problem.code in GAPS for problem in section.problems)
    section.problems += [] if known else inner.problems
    for tensor in section.tensors:
        if tensor.role != "model":
            tensor.unique = tensor.numel
    if args.get("untie_embeddings_and_output_weights") is False:
        embedding = next((t.name for t in model if t.name.endswith("word_embeddings.weight")), None)
        for tensor in model:
            if embedding and tensor.name.endswith("output_layer.weight"):
                tensor.unique, tensor.alias_of, tensor.note = 0, embedding, "tied copy"


def _rows(tensors: list[StoredTensor]) -> list[dict[str, Any]]:
    """One row per stage and kind of rank; ranks of a stage with equal contents are one row."""
    ranks: dict[Coordinates, list[int]] = {}
    for tensor in tensors:
        rank = tensor.rank or {}
        row = ranks.setdefault((rank["pp"], rank["tp"], rank["ep"]), [0, 0, 0, 0])
        row[0] += 1
        if tensor.role == "model":
            row[1] += tensor.numel
            row[2] += tensor.nbytes
        elif tensor.role in ("optimizer", "master"):
            row[3] += tensor.nbytes
    folded: dict[tuple[int, ...], list[Coordinates]] = {}
    for place, row in sorted(ranks.items()):
        folded.setdefault((place[0], *row), []).append(place)
    rows = []
    for (stage, count, params, model, optimizer), places in folded.items():
        name = (
            f"stage {stage} x{len(places)}" if len(places) > 1 else f"stage {stage} tp {places[0][1]} ep {places[0][2]}"
        )
        rows.append({
            "name": name, "pp": stage, "ranks": len(places), "tensors": count, "params": params,
            "model_bytes": model, "optimizer_bytes": optimizer,
        })  # fmt: skip
    return rows
