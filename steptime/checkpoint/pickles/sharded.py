"""Offsets of the local pieces of a DTensor or ShardedTensor in the whole tensor, from their records.

Records: torch 2.13 `torch/distributed/tensor/_dtensor_spec.py`, `placement_types.py`, `torch/distributed/device_mesh.py`
(`_layout` or, before 2.9, `mesh`; `_coordinate_on_dim` is the rank's own place) and
`torch/distributed/_shard/sharded_tensor/api.py`. A dimension of size n over s ranks is split into chunks of ceil(n / s).
"""

from __future__ import annotations

from typing import Any

from steptime.checkpoint.pickles.values import CallRecord, mapping, shape_of
from steptime.checkpoint.records import Shape


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
