"""DeepSpeed directories: ZeRO partitions and model files of one tag, and universal checkpoints.

Names and keys: DeepSpeed `deepspeed/checkpoint/constants.py`, `runtime/engine.py` (_get_ckpt_name, _get_zero_ckpt_name),
`utils/zero_to_fp32.py`, `checkpoint/ds_to_universal.py`. Under ZeRO-3 the tensors of `module` have shape [0]: the true
shapes are in `param_shapes`, a list of {name: shape}.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from steptime.checkpoint.dtypes import nbytes
from steptime.checkpoint.layouts import single
from steptime.checkpoint.pickles.tensors import shape_of
from steptime.checkpoint.pickles.values import mapping, pairs
from steptime.checkpoint.records import Section, StoredTensor, UnreadableError

if TYPE_CHECKING:
    from steptime.checkpoint.records import Contents, Shape
    from steptime.checkpoint.scan import Folder, Scan

MODEL = re.compile(r"^(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt$")
OPTIM = re.compile(r"^(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt$")
LAYER = re.compile(r"^layer_(?P<layer>\d+)-model_(?P<mp>\d+)-model_states\.pt$")
EXPERT = re.compile(r"^(?:layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt$")
EXPERT_OPTIM = re.compile(r"^expp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt$")
KINDS = (MODEL, OPTIM, LAYER, EXPERT, EXPERT_OPTIM)
MAX_LINES = 10


def sections(scan: Scan, folder: Folder, files: list[str]) -> tuple[list[Section], set[str]]:
    """The DeepSpeed save in `folder`, if there is one."""
    if "zero/" in files and not any(MODEL.match(name) for name in files if "zero_pp" in name):
        universal, used = _universal(scan, folder)
        ranks, more = _ranks(scan, folder, files) if universal else ([], set())
        for section in ranks:  # the converter copies the ranks' files: the same weights before they were merged
            section.same_as = f"{folder.rel}/zero" if folder.rel else "zero"
            universal[0].facts |= {key: section.facts[key] for key in ("step", "args") if key in section.facts}
        return [*universal, *ranks], used | more
    return _ranks(scan, folder, files)


def _ranks(scan: Scan, folder: Folder, files: list[str]) -> tuple[list[Section], set[str]]:
    """The files that every rank wrote."""
    wanted = [name for name in files if any(kind.match(name) for kind in KINDS)]
    if not any(MODEL.match(n) or OPTIM.match(n) for n in wanted):
        return [], set()
    section = Section("DeepSpeed", f"{len(wanted)} files", folder.rel)
    read = scan.absorb(section, folder, wanted, _facts)
    kept = {contents.file.rpartition("/")[2]: contents.facts["kept"] for contents in read}
    for facts in kept.values():
        for key, value in facts.items():
            section.facts.setdefault(key, value)
    stage = section.facts.get("zero_stage")
    section.format = f"DeepSpeed ZeRO-{stage}" if stage is not None else "DeepSpeed"
    _check_ranks(section, folder, wanted)
    _count(section, kept)
    _parallelism(section, wanted)
    section.ranks = _rows(section)
    return [section], set(wanted)


def _facts(contents: Contents) -> dict[str, Any]:
    """What one rank's file says: ZeRO level, partitions, true shapes, and the usual step and arguments."""
    root = contents.facts.get("root")
    top = mapping(root)
    found = single.facts_of(root)
    shapes: list[tuple[str, Shape]] = []
    groups = top.get("param_shapes")
    for group in groups if type(groups) is list else [groups]:
        shapes += [
            (key, shape) for key, value in pairs(group) if type(key) is str and (shape := shape_of(value)) is not None
        ]
    state = mapping(top.get("optimizer_state_dict"))
    found["zero_stage"] = state.get("zero_stage")
    count = state.get("partition_count")
    found["partition_count"] = count[0] if type(count) is list and count else count
    for key in ("ds_version", "dp_world_size", "mp_world_size"):
        found[key] = top.get(key) if type(top.get(key)) in (int, str) else None
    shared = mapping(top.get("shared_params"))
    found["shared_params"] = {k: v for k, v in shared.items() if type(v) is str}
    found = {key: value for key, value in found.items() if value not in (None, {})}
    return found | ({"param_shapes": shapes} if shapes else {})


def _check_ranks(section: Section, folder: Folder, wanted: list[str]) -> None:
    """Data-parallel and model-parallel ranks must have no gap."""
    for kind, what in ((OPTIM, "optim"), (MODEL, "model")):
        present: dict[tuple[int, int], str] = {}
        for name in wanted:
            match = kind.match(name)
            if match and match["dp"] is not None:
                present[int(match["dp"]), int(match["mp"])] = name
        if not present:
            continue
        counted = section.facts.get("dp_world_size") or section.facts.get("partition_count") or 0
        ranks = max(max(dp for dp, _ in present) + 1, counted if type(counted) is int and counted < 1 << 16 else 0)
        ways = max(mp for _, mp in present) + 1
        missing = [(dp, mp) for mp in range(ways) for dp in range(ranks) if (dp, mp) not in present]
        for dp, mp in missing[:MAX_LINES]:
            name = f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_{what}_states.pt"
            message = f"missing: {len(present)} of {ranks * ways} partitions present"
            section.problem("MISSING_RANK", message, folder.named(name))
        if len(missing) > MAX_LINES:
            section.problem("MISSING_RANK", f"{len(missing) - MAX_LINES} more partitions are missing")


def _count(section: Section, kept: dict[str, dict[str, Any]]) -> None:
    """Replace ZeRO-3's empty tensors by their true shapes and count what every data-parallel rank repeats once."""
    for tensor in section.tensors:  # pipeline layers and experts are bare state dicts, without a key that says so
        name = tensor.file.rpartition("/")[2]
        tensor.role = tensor.role or ("model" if LAYER.match(name) or EXPERT.match(name) else "other")
    model = [t for t in section.tensors if t.role == "model"]
    empty = bool(model) and all(t.shape == (0,) for t in model if t.note == "") and any(t.shape == (0,) for t in model)
    shapes: list[tuple[str, Shape]] = next(
        (facts["param_shapes"] for facts in kept.values() if "param_shapes" in facts), []
    )
    for tensor in section.tensors:
        tensor.unique = tensor.numel if tensor.role != "model" else 0
    if empty and shapes:
        dtype = model[0].dtype
        source = model[0].file
        section.tensors = [t for t in section.tensors if t.role != "model"]
        for name, shape in shapes:
            tensor = StoredTensor(
                name, shape, dtype, 0, source, "model", note="sharded: bytes are in the optimizer's flat groups"
            )
            tensor.unique = tensor.numel
            section.tensors.append(tensor)
        section.notes.append(
            f"ZeRO-3: the module tensors are empty, shapes are from param_shapes; a gathered {dtype} copy would be "
            f"{sum(nbytes(shape, dtype) or 0 for _, shape in shapes):,} bytes"
        )
        return
    _count_copies(section, model)


def _count_copies(section: Section, model: list[StoredTensor]) -> None:
    """The same name in several files: equal shapes on data-parallel ranks are copies, tensor-parallel pieces are not known."""
    shared = section.facts.get("shared_params") or {}
    seen: dict[tuple[str, str], str] = {}
    for tensor in model:
        mp = re.search(r"mp_rank_(\d+)|-model_(\d+)", tensor.file)
        layer = LAYER.match(tensor.file.rpartition("/")[2])
        if layer:
            tensor.name = f"layers.{int(layer['layer'])}.{tensor.name}"
        key = (tensor.name, mp[0] if mp else "")
        if key in seen:
            tensor.note = "replica"
        elif tensor.name in shared:
            tensor.alias_of = shared[tensor.name]
        else:
            tensor.unique = tensor.numel
        seen[key] = tensor.file
    ways = {key[1] for key in seen}
    if len(ways) > 1:
        section.notes.append(
            f"{len(ways)} tensor-parallel ranks: DeepSpeed files do not say which tensors are split, each rank's count"
        )


def _parallelism(section: Section, wanted: list[str]) -> None:
    matches = [m for name in wanted for kind in (MODEL, OPTIM) if (m := kind.match(name))]
    dps = [int(m["dp"]) for m in matches if m["dp"] is not None]
    found: dict[str, Any] = {"tp": 1 + max((int(m["mp"]) for m in matches), default=0)}
    if dps:
        found["dp"] = 1 + max(dps)
    section.parallelism = found | {"source": "file names"}


def _rows(section: Section) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for tensor in section.tensors:
        match = next((m for kind in (OPTIM, MODEL) if (m := kind.match(tensor.file.rpartition("/")[2]))), None)
        if match is None:
            continue
        name = f"dp {match['dp']} mp {match['mp']}" if match["dp"] is not None else f"mp {match['mp']}"
        row = rows.setdefault(name, {"name": name, "tensors": 0, "params": 0, "model_bytes": 0, "optimizer_bytes": 0})
        row["tensors"] += 1
        if tensor.role == "model":
            row["params"] += tensor.numel
            row["model_bytes"] += tensor.nbytes
        else:
            row["optimizer_bytes"] += tensor.nbytes
    return list(rows.values())


def _universal(scan: Scan, folder: Folder) -> tuple[list[Section], set[str]]:
    """zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt: one small archive per tensor, read by a pool of threads."""
    try:
        zero = scan.below(folder, "zero")
    except UnreadableError:
        return [], set()
    section = Section("DeepSpeed universal", f"{len(zero.dirs)} parameters", folder.rel)
    wanted: list[str] = []
    for name in zero.dirs:
        try:
            inside = scan.below(zero, name).files
        except UnreadableError as error:
            section.problems.append(error.problem)
            continue
        wanted += [f"{name}/{file}" for file in inside if file.endswith(".pt")]
        if "fp32.pt" not in inside:
            section.problem("MISSING_FILE", "no fp32.pt in it", zero.named(name))
    if not wanted:
        return [], set()
    scan.absorb(section, zero, wanted)
    for tensor in section.tensors:
        parameter, _, file = tensor.file[len(zero.rel) + 1 :].rpartition("/")
        state = file.removesuffix(".pt")
        weight = state == "fp32"
        tensor.name = parameter if weight else f"{parameter}.{state}"
        tensor.role = "model" if weight else "optimizer"
        tensor.unique = tensor.numel
        tensor.note = "fp32 master copy" if weight else ""
    return [section], {"zero/"}
