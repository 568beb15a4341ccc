"""Tensor records in a pickled object graph: each rebuild function of torch and numpy, read as shape, dtype and bytes.

Layout of the records: torch 2.13 `torch/_utils.py` (_rebuild_*), `torch/_tensor.py` (_reduce_ex_internal,
_rebuild_from_type_v2), `torch/distributed/tensor`, `torch/distributed/_shard/sharded_tensor`; numpy
`numpy/_core/src/multiarray/methods.c` (array_reduce).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from steptime.checkpoint.dtypes import TORCH_STORAGES, from_numpy, itemsize, nbytes
from steptime.checkpoint.pickles.values import STORAGE_LOADER, CallRecord, Opaque, Pid, Ref, mapping, shape_of
from steptime.checkpoint.stored_records import Shape, StoredTensor

Args = Sequence[Any]
Build = Callable[[Args], StoredTensor | None]


def _text(value: Any) -> str:
    return value.decode("latin-1") if type(value) is bytes else value if type(value) is str else ""


def storage_of(value: Any) -> tuple[str, str, int] | None:
    """(key, dtype, bytes) of a torch storage id; the element count of an UntypedStorage is in bytes."""
    if type(value) is CallRecord and value.path == STORAGE_LOADER and value.args:
        value = value.args[0]  # as `streams` read the bytes it is called with
    pid = value.value if type(value) is Pid else None
    if type(pid) is not tuple or len(pid) < 5 or _text(pid[0]) != "storage" or type(pid[1]) is not Ref:
        return None
    key, numel = pid[2], pid[4]
    dtype = TORCH_STORAGES.get(pid[1].name)
    if dtype is None or type(numel) is not int:
        return None
    key = str(key) if type(key) is int else _text(key)
    return key, dtype, numel * itemsize(dtype)


def _dense(storage: Any, offset: Any, size: Any, stride: Any, dtype: str | None = None) -> StoredTensor | None:
    found = storage_of(storage)
    shape = shape_of(size)
    if found is None or shape is None or type(offset) is not int:
        return None
    key, own, stored = found
    dtype = dtype or own
    width = itemsize(dtype)
    span = 0
    if 0 not in shape:
        row_major = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        steps = stride if type(stride) in (tuple, list) and len(stride) == len(shape) else row_major
        span = 1 + sum((n - 1) * s for n, s in zip(shape, steps, strict=True) if type(s) is int)
    return StoredTensor(
        "", shape, dtype, nbytes(shape, dtype) or 0, storage=key, storage_nbytes=stored,
        start=offset * width, extent=span * width,
    )  # fmt: skip


def _v2(args: Args) -> StoredTensor | None:
    return _dense(*args[:4]) if len(args) >= 4 else None


def _dtype_name(value: Any) -> str:
    return value.name if type(value) is Ref else ""


def _v3(args: Args) -> StoredTensor | None:
    return _dense(args[0], args[1], args[2], args[3], _dtype_name(args[6])) if len(args) >= 7 else None


def _inner(args: Args) -> StoredTensor | None:
    return _decode(args[0]) if args else None


def _noted(build: Build, note: str) -> Build:
    """The same, with a note."""

    def noted(args: Args) -> StoredTensor | None:
        found = build(args)
        if found is not None:
            found.note = note
        return found

    return noted


def _without_data(dtype: int, note: str) -> Build:
    """A tensor of a shape alone, its type at place `dtype` of the arguments and the shape behind it."""

    def build(args: Args) -> StoredTensor | None:
        shape = shape_of(args[dtype + 1]) if len(args) >= dtype + 2 else None
        return None if shape is None else StoredTensor("", shape, _dtype_name(args[dtype]), 0, note=note)

    return build


def _sparse(args: Args) -> StoredTensor | None:
    """COO (indices, values, size) or compressed (crow, col, values, size); the values are the parameters."""
    parts = args[1] if len(args) >= 2 and type(args[1]) is tuple else ()
    shape = next((s for s in map(shape_of, parts) if s is not None), None)
    pieces = [t for t in map(_decode, parts) if t is not None]
    if shape is None or not pieces:
        return None
    values = pieces[-1]
    stored = sum(t.nbytes for t in pieces)
    return StoredTensor(
        "", values.shape, values.dtype, stored, storage=values.storage, storage_nbytes=values.storage_nbytes,
        start=values.start, extent=values.extent, global_shape=shape, note="sparse",
    )  # fmt: skip


def _from_type(args: Args) -> StoredTensor | None:
    """(func, type, args, state): a DTensor or ShardedTensor keeps its local piece in the state."""
    if len(args) < 4 or type(args[0]) is not Ref or type(args[2]) is not tuple:
        return None
    build = _REBUILD.get(args[0].path)
    found = build(args[2]) if build else None
    kind = _dtype_name(args[1])
    if kind == "DTensor" and found is not None:
        return _dtensor(found.shape, args[3])
    if found is not None and found.note == "wrapper":  # another wrapper subclass: its tensors are in the state
        parts = [t for t in (_decode(v) for v in mapping(args[3]).values()) if t is not None]
        found.nbytes = sum(t.nbytes for t in parts)
        found.note = kind
        if parts:
            found.dtype = max(parts, key=lambda t: t.nbytes).dtype
    return found


def _dtensor(shape: Shape, state: Any) -> StoredTensor | None:
    fields = mapping(state)
    local = _decode(fields.get("_local_tensor"))
    if local is None:
        return None
    spec = fields.get("_spec")
    words = [kind if dim is None else f"{kind}({dim})" for kind, dim in placements(spec)]
    local.global_shape = shape
    local.offsets = offsets(shape, local.shape, spec)
    local.note = "DTensor " + ", ".join(words)
    return local


def _sharded(args: Args) -> list[StoredTensor] | None:
    """The pieces of a ShardedTensor on its rank; None when `args` describe something else."""
    build = _REBUILD.get(args[0].path) if len(args) >= 4 and type(args[0]) is Ref else None
    whole = build(args[2]) if build and _dtype_name(args[1]) == "ShardedTensor" and type(args[2]) is tuple else None
    if whole is None:
        return None
    found = []
    for record, at in local_shards(args[3]):
        local = _decode(record)
        if local is not None:
            local.global_shape, local.offsets, local.note = whole.shape, at, "ShardedTensor"
            found.append(local)
    return found


def numpy_array(state: Any) -> StoredTensor | None:
    """A numpy array from the state of its record: (version, shape, dtype, order, bytes)."""
    if type(state) is not tuple or len(state) < 5:
        return None
    shape = shape_of(state[1])
    descr = state[2].args[0] if type(state[2]) is CallRecord and state[2].args else ""
    dtype = from_numpy(_text(descr))
    if shape is None:
        return None
    raw = state[4]
    length = raw.size if type(raw) is Opaque else len(raw) if type(raw) is bytes else 0
    return StoredTensor("", shape, dtype, nbytes(shape, dtype) or length, note="numpy")


def _frombuffer(args: Args) -> StoredTensor | None:
    """A numpy array in pickle protocol 5: (bytes, dtype, shape, order)."""
    return numpy_array((1, args[2], args[1], args[3], args[0])) if len(args) == 4 else None


def _jagged(args: Args) -> StoredTensor | None:
    """A jagged tensor: its values; the offsets of its rows are no parameters."""
    return _decode(mapping(args[0]).get("values")) if args else None


_T = "torch._utils."
_REBUILD: dict[str, Build] = {
    f"{_T}_rebuild_tensor": _v2, f"{_T}_rebuild_tensor_v2": _v2, f"{_T}_rebuild_tensor_v3": _v3,
    f"{_T}_rebuild_parameter": _inner, f"{_T}_rebuild_parameter_with_state": _inner,
    f"{_T}_rebuild_qtensor": _noted(_v2, "quantized"), f"{_T}_rebuild_meta_tensor_no_storage": _without_data(0, "meta"),
    f"{_T}_rebuild_sparse_tensor": _sparse, f"{_T}_rebuild_sparse_csr_tensor": _sparse,
    f"{_T}_rebuild_wrapper_subclass": _without_data(1, "wrapper"), f"{_T}_rebuild_nested_tensor": _noted(_inner, "nested"),
    f"{_T}_rebuild_device_tensor_from_numpy": _inner, f"{_T}_rebuild_device_tensor_from_cpu_tensor": _inner,
    f"{_T}_rebuild_xla_tensor": _inner, "torch.tensor._rebuild_from_type": _from_type,
    "torch._tensor._rebuild_from_type_v2": _from_type, "torch.nn.parameter.Parameter": _inner,
    "torch.nested._internal.nested_tensor._rebuild_njt": _noted(_jagged, "jagged"),
    "numpy.core.numeric._frombuffer": _frombuffer, "numpy._core.numeric._frombuffer": _frombuffer,
}  # fmt: skip
_FROM_TYPE = {path for path, build in _REBUILD.items() if build is _from_type}
_NUMPY = {f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")}


def tensors_of(value: Any) -> list[StoredTensor] | None:
    """The tensors that a record describes, without names, or None if it is not a tensor.

    One tensor, except for a rank's ShardedTensor, which may hold several pieces or none. Rebuild functions can be
    nested; a hostile stream that nests them too deeply is not a tensor.
    """
    try:
        if type(value) is CallRecord and value.path in _FROM_TYPE and type(value.args) is tuple:
            pieces = _sharded(value.args)
            if pieces is not None:
                return pieces
        found = _decode(value)
    except RecursionError:
        return None
    return None if found is None else [found]


def _decode(value: Any) -> StoredTensor | None:
    if type(value) is Pid:
        return _bare_storage(value)
    if type(value) is not CallRecord or type(value.args) is not tuple:
        return None
    path = value.path
    if path in _NUMPY:
        return numpy_array(value.state)
    build = _REBUILD.get(path)
    if build is not None:
        return build(value.args)
    if path.startswith("torch.") and path.endswith("Tensor") and type(value.state) is tuple:
        return _v2(value.state)  # torch before 0.4: FloatTensor() then BUILD (storage, offset, size, stride)
    return None


def _bare_storage(value: Pid) -> StoredTensor | None:
    found = storage_of(value)
    if found is None:
        return None
    key, dtype, size = found
    count = size // max(1, itemsize(dtype))
    return StoredTensor("", (count,), dtype, size, storage=key, storage_nbytes=size, extent=size, note="storage")


def placements(spec: Any) -> list[tuple[str, int | None]]:
    """(kind, dimension) per axis of the mesh, e.g. ("Shard", 0) or ("Replicate", None)."""
    value: Any = mapping(spec).get("placements")
    found = []
    for item in value if type(value) in (tuple, list) else ():
        dim = mapping(item).get("dim") if type(item) is CallRecord else None
        args = item.args if type(item) is CallRecord and type(item.args) is tuple else ()
        kind = item.path.rsplit(".", 1)[-1] if type(item) is CallRecord else "?"
        found.append((kind, dim if type(dim) is int else next((a for a in args if type(a) is int), None)))
    return found


def offsets(whole: Shape, local: Shape, spec: Any) -> Shape | None:
    """Offsets of the local piece of a DTensor in every dimension [elements]; None if the record is incomplete."""
    mesh = mapping(mapping(spec).get("mesh"))
    place, sizes = shape_of(mesh.get("_coordinate_on_dim")), _sizes(mesh)
    kinds = placements(spec)
    if place is None or sizes is None or not len(place) == len(sizes) == len(kinds):
        return None
    start, length = [0] * len(whole), list(whole)
    for axis in sorted(range(len(kinds)), key=lambda axis: kinds[axis][0] == "_StridedShard"):  # FSDP over TP: TP first
        kind, dim = kinds[axis]
        if dim is None or not kind.endswith("Shard"):
            continue
        if dim >= len(whole) or sizes[axis] < 1:
            return None
        chunk = -(-length[dim] // sizes[axis])
        first = min(place[axis] * chunk, length[dim])
        start[dim] += first
        length[dim] = min(chunk, length[dim] - first)
    return tuple(start) if tuple(length) == local else None


def _sizes(mesh: dict[str, Any]) -> Shape | None:
    """Ranks per axis of the mesh."""
    axes = mapping(mesh.get("_layout")).get("axes")
    if type(axes) is tuple:
        shapes = [shape for axis in axes if len(shape := shape_of(mapping(axis).get("shape")) or ()) == 1]
        return tuple(shape[0] for shape in shapes) if len(shapes) == len(axes) else None
    old = mesh.get("mesh")
    return shape_of(old.args[2]) if type(old) is CallRecord and type(old.args) is tuple and len(old.args) > 2 else None


def local_shards(state: Any) -> list[tuple[Any, Shape | None]]:
    """(tensor record, offsets) of each piece a ShardedTensor holds on its rank; there may be none."""
    shards = state[0] if type(state) is tuple and state else None
    fields = [mapping(shard) for shard in shards] if type(shards) is list else []
    return [(field.get("tensor"), shape_of(mapping(field.get("metadata")).get("shard_offsets"))) for field in fields]
