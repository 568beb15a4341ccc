"""DeepSpeed directories: ZeRO partitions and model files of one tag, and universal checkpoints.

Names and keys: DeepSpeed `deepspeed/checkpoint/constants.py`, `runtime/engine.py` (_get_ckpt_name, _get_zero_ckpt_name),
`utils/zero_to_fp32.py`, `checkpoint/ds_to_universal.py`. Under ZeRO-3 the tensors of `module` have shape [0]: the true
shapes are in `param_shapes`, a list of {name: shape}.
"""

from __future__ import annotations

import re
from math import prod
from typing import Any

from steptime.base.words import counted
from steptime.checkpoint.dtypes import nbytes
from steptime.checkpoint.layouts import rank_grid, single
from steptime.checkpoint.layouts.tensor_parallel import place, split_dim
from steptime.checkpoint.pickles.values import CallRecord, mapping, pairs, shape_of
from steptime.checkpoint.scan import Folder, FolderScan
from steptime.checkpoint.stored_records import MAX_ELEMENTS, Contents, Section, Shape, StoredTensor, UnreadableError

MODEL = re.compile(r"^(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt$")
OPTIM = re.compile(r"^(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt$")
LAYER = re.compile(r"^layer_(?P<layer>\d+)(?:-model_(?P<mp>\d+))?-model_states\.pt$")
EXPERT = re.compile(r"^(?:layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt$")
EXPERT_OPTIM = re.compile(r"^expp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt$")
KINDS = (MODEL, OPTIM, LAYER, EXPERT, EXPERT_OPTIM)


def sections(scan: FolderScan, folder: Folder, files: list[str]) -> tuple[list[Section], set[str]]:
    """The DeepSpeed save in `folder`, if there is one."""
    if "zero/" in files and not any(MODEL.match(name) for name in files if "zero_pp" in name):
        universal, used = _universal(scan, folder)
        ranks, more = _ranks(scan, folder, files) if universal else ([], set())
        for section in ranks:  # the converter copies the ranks' files: the same weights before they were merged
            section.same_as = f"{folder.rel}/zero" if folder.rel else "zero"
            universal[0].facts |= {key: section.facts[key] for key in ("step", "args") if key in section.facts}
        return [*universal, *ranks], used | more
    return _ranks(scan, folder, files)


def _ranks(scan: FolderScan, folder: Folder, files: list[str]) -> tuple[list[Section], set[str]]:
    """The files that every rank wrote."""
    wanted = [name for name in files if any(kind.match(name) for kind in KINDS)]
    if not any(MODEL.match(n) or OPTIM.match(n) or LAYER.match(n) for n in wanted):
        return [], set()
    section = Section("DeepSpeed", counted(len(wanted), "file"), folder.rel)
    read = scan.absorb(section, folder, wanted, _facts)
    stage = section.facts.get("zero_stage")
    section.format = f"DeepSpeed ZeRO-{stage}" if stage is not None else "DeepSpeed"
    _check_ranks(section, folder, wanted)
    _name(section, {_base(contents.file): contents.facts["kept"] for contents in read})
    _parallelism(section, wanted)
    section.ranks = rank_grid.rows(section.tensors, _rank_name)
    return [section], set(wanted)


def _facts(contents: Contents) -> dict[str, Any]:
    """The content of one rank's file: ZeRO level, partitions, true shapes, and the usual step and arguments."""
    root = contents.facts.get("root")
    top = mapping(root)
    found = single.facts_of(contents)
    shapes: list[tuple[str, Shape]] = []
    for key in ("param_shapes", "frozen_param_shapes"):
        groups = top.get(key)
        for group in groups if type(groups) is list else [groups]:
            named = ((name, shape_of(value)) for name, value in pairs(group) if type(name) is str)
            shapes += [(name, shape) for name, shape in named if shape is not None and prod(shape) < MAX_ELEMENTS]
    state = mapping(top.get("optimizer_state_dict"))
    found["zero_stage"] = _number(state.get("zero_stage"))
    count = state.get("partition_count")
    found["partition_count"] = _number(count[0] if type(count) is list and count else count)
    for key in ("ds_version", "dp_world_size", "mp_world_size"):
        found[key] = top.get(key) if type(top.get(key)) in (int, str) else None
    shared = mapping(top.get("shared_params"))
    found["shared_params"] = {k: v for k, v in shared.items() if type(v) is str}
    found = {key: value for key, value in found.items() if value not in (None, {})}
    return found | ({"param_shapes": shapes} if shapes else {})


def _number(value: Any) -> int | None:
    """An integer, or that of an enum member, which pickles as a call of its class."""
    if type(value) is CallRecord and type(value.args) is tuple and len(value.args) == 1:
        value = value.args[0]
    return value if type(value) is int else None


def _base(file: str) -> str:
    return file.rpartition("/")[2]


def _writer(file: str) -> tuple[re.Pattern[str] | None, int | None, int]:
    """(kind of file, data-parallel rank where there is one, model-parallel rank) by a file's name."""
    for kind in KINDS:
        if match := kind.match(_base(file)):
            rank = match.groupdict().get("dp")
            return kind, None if rank is None else int(rank), int(match["mp"] or 0)
    return None, None, 0


def _check_ranks(section: Section, folder: Folder, wanted: list[str]) -> None:
    """Data-parallel and model-parallel ranks must have no gap."""
    for kind, what in ((OPTIM, "optim"), (MODEL, "model")):
        present = {(mp, dp): name for name in wanted for of, dp, mp in [_writer(name)] if of is kind and dp is not None}
        if not present:
            continue
        stated = section.facts.get("dp_world_size") or section.facts.get("partition_count") or 0
        ranks = max(max(dp for _, dp in present) + 1, stated if type(stated) is int else 0)
        prefix = next(iter(present.values())).partition("zero_pp_rank_")[0]
        rank_grid.check(
            section, {"mp": 1 + max(mp for mp, _ in present), "dp": ranks}, present,
            lambda mp, dp, prefix=prefix, what=what: folder.named(f"{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_{what}_states.pt"),
        )  # fmt: skip


def _name(section: Section, kept: dict[str, dict[str, Any]]) -> None:
    """Roles, layer numbers and places of what the files hold; ZeRO-3's empty tensors get their true shapes."""
    shared = section.facts.get("shared_params") or {}
    for tensor in section.tensors:  # pipeline layers and experts are bare state dicts, without a key that says so
        name = _base(tensor.file)
        layer = LAYER.match(name)
        tensor.role = tensor.role or ("model" if layer or EXPERT.match(name) else "other")
        if layer:
            tensor.name = f"layers.{int(layer['layer'])}.{tensor.name}"
        if tensor.role == "model" and tensor.name in shared:
            tensor.alias_of = shared[tensor.name]
    _true_shapes(section, kept)
    model = [tensor for tensor in section.tensors if tensor.role == "model"]
    ways = 1 + max((_writer(tensor.file)[2] for tensor in model), default=0)
    if ways == 1:
        return
    for tensor in model:
        place(tensor, ways, _writer(tensor.file)[2], split_dim(tensor.name))
    if any(tensor.offsets is None for tensor in model):
        section.notes.append(
            f"{ways} model-parallel ranks: DeepSpeed files do not record which tensors are split; tensors with names "
            "unknown to Megatron count on each rank unless their bytes are equal"
        )


def _true_shapes(section: Section, kept: dict[str, dict[str, Any]]) -> None:
    """Under ZeRO-3 the tensors of `module` are empty; every rank states the true shapes of its model-parallel rank."""
    model = [tensor for tensor in section.tensors if tensor.role == "model"]
    stated = {
        _writer(file)[2]: (file, facts["param_shapes"])
        for file, facts in reversed(kept.items())
        if "param_shapes" in facts
    }
    empty = any(t.shape == (0,) for t in model) and all(t.shape == (0,) for t in model if t.note == "")
    if not empty or not stated:
        return
    dtype, folder = model[0].dtype, model[0].file.removesuffix(_base(model[0].file))
    section.tensors = [t for t in section.tensors if t.role != "model"]
    note = "sharded: bytes are in the optimizer's flat groups"
    for file, shapes in stated.values():
        section.tensors += [
            StoredTensor(name, shape, dtype, 0, folder + file, "model", note=note) for name, shape in shapes
        ]
    gathered = sum(nbytes(shape, dtype) or 0 for _, shapes in stated.values() for _, shape in shapes)
    section.notes.append(
        "ZeRO-3: the module tensors are empty, shapes are from param_shapes; a gathered "
        f"{dtype} copy would be {gathered:,} bytes"
    )


def _rank_name(tensor: StoredTensor) -> str | None:
    kind, dp, mp = _writer(tensor.file)
    return None if kind not in (OPTIM, MODEL) else f"mp {mp:02d}" if dp is None else f"dp {dp} mp {mp:02d}"


def _parallelism(section: Section, wanted: list[str]) -> None:
    ranks = [(dp, mp) for kind, dp, mp in map(_writer, wanted) if kind in (MODEL, OPTIM)]
    dps = [dp for dp, _ in ranks if dp is not None]
    section.parallelism = {"tp": 1 + max((mp for _, mp in ranks), default=0), **({"dp": 1 + max(dps)} if dps else {})}
    section.parallelism["source"] = "file names"


def _universal(scan: FolderScan, folder: Folder) -> tuple[list[Section], set[str]]:
    """zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt: one small archive per tensor, read by a pool of threads."""
    try:
        zero = scan.below(folder, "zero")
    except UnreadableError:
        return [], set()
    section = Section("DeepSpeed universal", counted(len(zero.dirs), "parameter"), folder.rel)
    wanted: list[str] = []
    for parameter in scan.inside(zero, zero.dirs, section.problems):
        name = zero.inner(parameter.rel)
        wanted += [f"{name}/{file}" for file in parameter.files if file.endswith(".pt")]
        if "fp32.pt" not in parameter.files:
            section.problem("MISSING_FILE", "contains no fp32.pt", parameter.rel)
    if not wanted:
        return [], set()
    scan.absorb(section, zero, wanted)
    for tensor in section.tensors:
        name, _, file = zero.inner(tensor.file).rpartition("/")
        state = file.removesuffix(".pt")
        weight = state == "fp32"
        tensor.name = name if weight else f"{name}.{state}"
        tensor.role = "model" if weight else "optimizer"
        tensor.note = "fp32 master copy" if weight else ""
    return [section], {"zero/"}
