"""The `.metadata` file of torch.distributed.checkpoint: shapes, types and chunks of tensors, and where each chunk is.

Layout: torch 2.13 `torch/distributed/checkpoint/metadata.py` (Metadata, TensorStorageMetadata, ChunkStorageMetadata,
MetadataIndex) and `filesystem.py` (_StorageInfo; read there with plain `pickle.load`, which runs what it names).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

from steptime.checkpoint import roles
from steptime.checkpoint.dtypes import nbytes
from steptime.checkpoint.pickles import pickle_streams
from steptime.checkpoint.pickles.object_graph import key_text
from steptime.checkpoint.pickles.pickle_verdict import judge
from steptime.checkpoint.pickles.values import CallRecord, Pairs, Ref, mapping, pairs, shape_of
from steptime.checkpoint.readers.torch_file import note_dangers, whole_file
from steptime.checkpoint.source import Source
from steptime.checkpoint.stored_records import Contents, Shape, StoredTensor, UnreadableError

MAX_LINES = 10


Chunks = dict[Shape, int]
"""Elements of each chunk of a tensor by its offsets."""


@dataclass(slots=True)
class Placement:
    """Location of the pieces: for each file, the end offset of its last piece and, by role, [pieces, elements, bytes].

    `objects` are entries that are not tensors: (file, first byte, bytes) by name.
    """

    ends: dict[str, int] = field(default_factory=dict)
    by_file: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    objects: dict[str, tuple[str, int, int]] = field(default_factory=dict)


def read(source: Source) -> Contents:
    """One `.metadata`; the placement is in facts["placement"]. Raises `UnreadableError`."""
    contents = Contents(source.name, "torch DCP", nbytes=source.size)
    found = pickle_streams.read(whole_file(source), source.name)
    note_dangers(contents, judge(found, torch_file=False), found)
    fields = mapping(found.root)
    if "state_dict_metadata" in fields:
        _fill(contents, fields)
    elif contents.problems:  # torch reads this file with plain pickle.load: what it would run must be reported
        contents.problem("NOT_DCP", "not the metadata of a distributed checkpoint")
        contents.facts["placement"] = Placement()
    else:
        raise UnreadableError("NOT_DCP", "not the metadata of a distributed checkpoint", source.name)
    return contents


def _fill(contents: Contents, fields: dict[str, Any]) -> None:
    planned = {
        key: value for key, value in mapping(fields.get("planner_data")).items() if type(value) is tuple and value
    }
    nested = roles.below_wrapper([list(map(key_text, path)) for path in planned.values()])
    paths = dict(zip(planned, nested, strict=True))
    entries = pairs(fields["state_dict_metadata"])
    tops = {path[0] for path in nested if len(path) > 1}
    flat_tops = {key_text(key).partition(".")[0] for key, _ in entries}
    torn = 0
    known: dict[str, tuple[StoredTensor, Chunks]] = {}
    for key, entry in entries:
        name = key_text(key)
        parts = path if len(path := paths.get(name, [])) > 1 else [name]
        tensor = _tensor(entry)
        if tensor is None:
            continue
        tensor.file = contents.file
        tensor.role, tensor.name = _role(parts, tops, flat_tops)
        known[name] = tensor, _chunks(mapping(entry).get("chunks"))
        contents.tensors.append(tensor)
        torn += _check_cover(contents, tensor, known[name][1], torn < MAX_LINES)
    if torn > MAX_LINES:
        contents.problem("INCOMPLETE_COVER", f"{torn - MAX_LINES} more tensors with missing or overlapping chunks")
    contents.facts["placement"] = _placement(fields.get("storage_data"), known)


def _role(parts: list[str], tops: set[str], flat_tops: set[str]) -> tuple[str, str]:
    """Role and name, from the nested path if the planner saved one, else from the parts of the flat name."""
    if len(parts) > 1:
        return roles.role_and_name(parts, tops)
    name = parts[0]
    pieces = name.split(".", 64)
    numbered = pieces[0].startswith("chained_") and len(pieces) > 1
    if roles.is_optimizer_key(pieces[1] if numbered else pieces[0]) or pieces[-1] in roles.STATE_NAMES:
        return roles.optimizer_role(pieces), name
    if pieces[0] in ("model", "module", "state_dict") and any(map(roles.is_optimizer_key, flat_tops)):
        return "model", name.partition(".")[2]
    return (
        "other" if "rng" in pieces[0] or pieces[0] in ("rerun_state_machine_state", "train_state") else "model"
    ), name


def _tensor(entry: Any) -> StoredTensor | None:
    if type(entry) is not CallRecord or not entry.path.endswith("TensorStorageMetadata"):
        return None
    fields = mapping(entry)
    shape = shape_of(fields.get("size"))
    properties = fields.get("properties")
    state = properties.state if type(properties) is CallRecord else None
    first = state[0] if type(state) is tuple and state else mapping(properties).get("dtype")
    dtype = first.name if type(first) is Ref else "unknown"
    if shape is None:
        return None
    return StoredTensor("", shape, dtype, nbytes(shape, dtype) or 0)


def _chunks(chunks: Any) -> Chunks:
    """Elements by offsets. The usual order of fields (offsets, sizes) is tried first, since this loop is hot."""
    found: Chunks = {}
    for chunk in chunks if type(chunks) is list else ():
        flat: Any = chunk.state if type(chunk) is CallRecord and type(chunk.state) is Pairs else ()
        usual = len(flat) > 3 and flat[0] == "offsets" and flat[2] == "sizes"
        offsets, sizes = (flat[1], flat[3]) if usual else map(mapping(chunk).get, ("offsets", "sizes"))
        if type(sizes) is tuple and (place := shape_of(offsets)) is not None:
            found[place] = found.get(place, 0) + prod(n for n in sizes if type(n) is int)
    return found


def _check_cover(contents: Contents, tensor: StoredTensor, chunks: Chunks, tell: bool) -> int:
    """1 if the chunks do not cover the tensor, else 0; at most one problem per tensor."""
    covered = sum(chunks.values())
    if covered == tensor.numel or not chunks:
        return 0
    if tell:
        message = f"chunks of {tensor.name} hold {covered:,} of {tensor.numel:,} elements"
        contents.problem("INCOMPLETE_COVER", message, tensor.name)
    return 1


def _placement(storage: Any, known: dict[str, tuple[StoredTensor, Chunks]]) -> Placement:
    """Sum up the storage entries: {MetadataIndex(fqn, offset, ...): _StorageInfo(relative_path, offset, length)}."""
    found = Placement()
    flat = storage if type(storage) is Pairs else []
    for index, info in zip(flat[::2], flat[1::2], strict=False):
        where = _info(info)
        fqn, place = _index(index)
        if where is None or fqn is None:
            continue
        path, offset, length = where
        end = offset + length
        if end > found.ends.get(path, -1):
            found.ends[path] = end
        if fqn not in known:
            found.objects[fqn] = where
            continue
        tensor, chunks = known[fqn]
        elements = chunks.get(place, 0)
        sums = found.by_file.setdefault(path, {}).setdefault(tensor.role, [0, 0, 0])
        sums[0] += 1
        sums[1] += elements
        sums[2] += elements * tensor.nbytes // (tensor.numel or 1)  # what is stored has a frame around it
    return found


def _index(index: Any) -> tuple[str | None, Any]:
    """Name and offsets. A hot loop: 217,600 entries for 64 ranks of a large model, so the usual order is tried first."""
    state = index.state if type(index) is CallRecord else None
    flat: Any = state if type(state) is Pairs else ()
    usual = len(flat) > 3 and flat[0] == "fqn" and flat[2] == "offset"
    value, place = (flat[1], flat[3]) if usual else map(mapping(index).get, ("fqn", "offset"))
    return (value if type(value) is str else None), (place if type(place) is tuple else ())


def _info(info: Any) -> tuple[str, int, int] | None:
    state = info.state if type(info) is CallRecord else None
    flat = state if type(state) is Pairs else ()
    if len(flat) >= 6 and flat[0] == "relative_path" and flat[2] == "offset" and flat[4] == "length":
        path, offset, length = flat[1], flat[3], flat[5]
    else:
        fields = mapping(info)
        path, offset, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
    if type(path) is str and type(offset) is int and type(length) is int and offset >= 0 and length >= 0:
        return path, offset, length
    return None
