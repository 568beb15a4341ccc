"""Counts every element of a checkpoint once. A tensor is a copy only on evidence.

Evidence is the same storage of a file, the same place in a whole tensor, or the same checksum of the same bytes; a layout
that is known to repeat a tensor on every rank gives its copies the same place. Equal names and shapes are no evidence:
tensor-parallel slices of one matrix also have them.
"""

from __future__ import annotations

from collections import Counter
from math import prod

from steptime.base.grouping import grouped
from steptime.checkpoint.dtypes import itemsize
from steptime.checkpoint.stored_records import Problem, Section, Shape, StoredTensor

MAX_LINES = 10  # problems of one kind written out
DRAG_BYTES = 1 << 20  # below this a view of a larger storage is not worth a line


def count(section: Section) -> None:
    """Set `unique` [elements], and whole shapes where offsets tell them, of every tensor of `section`.

    Pieces that do not cover the whole tensor are a problem, unless files are known to be missing.
    """
    _storages(section.tensors)
    own = [tensor for tensor in section.tensors if tensor.alias_of is None]
    names = {tensor.name for tensor in own}
    twice = Counter([tensor.name for tensor in own]) if len(names) < len(own) else None
    groups: dict[tuple[str, str], list[StoredTensor]] = {}
    for tensor in own:
        piece = tensor.global_shape is not None and tensor.global_shape != tensor.shape and tensor.note != "sparse"
        if piece or (twice and twice[tensor.name] > 1):
            groups.setdefault((tensor.role, tensor.name), []).append(tensor)
    torn = [line for group in groups.values() if (line := _pieces(group))]
    if section.torn or section.facts.get("slices"):
        return
    for name, message in torn[:MAX_LINES]:
        section.problem("INCOMPLETE_COVER", message, tensor=name)
    if len(torn) > MAX_LINES:
        section.problem("INCOMPLETE_COVER", f"{len(torn) - MAX_LINES} more tensors with missing or overlapping pieces")


def _storages(tensors: list[StoredTensor]) -> None:
    """Within a file: tied weights are the same bytes of one storage, a contiguous view inside another is part of it.

    An expanded tensor (stride 0) has no more elements than bytes, and the elements of one storage never exceed its size.
    """
    for tensor in tensors:
        tensor.unique = 0 if tensor.alias_of is not None else prod(tensor.shape)
    stored = [tensor for tensor in tensors if tensor.storage is not None]
    for group in grouped(stored, lambda tensor: (tensor.file, tensor.storage)).values():
        _share(group)


def _share(group: list[StoredTensor]) -> None:
    """Count the tensors of one storage in order of their first byte, so that a view comes after the tensor that contains it."""
    room = group[0].storage_nbytes
    last = cover = None  # the tensor before, and the dense one that reaches furthest
    for tensor in sorted(group, key=lambda t: (t.start, -t.extent)) if len(group) > 1 else group:
        width = itemsize(tensor.dtype) or 1
        tensor.unique = min(tensor.unique, tensor.extent // width, max(room, 0) // width)
        owner = next((k for k in (last, cover) if k is not None and _inside(tensor, k)), None)
        if owner is not None:
            tensor.unique = 0
            tensor.alias_of = owner.name
            continue
        room -= tensor.unique * width
        last = tensor
        if cover is None or tensor.start + tensor.extent > cover.start + cover.extent:
            cover = tensor


def _inside(tensor: StoredTensor, other: StoredTensor) -> bool:
    same = tensor.start == other.start and tensor.extent == other.extent and tensor.numel == other.numel
    contiguous = other.extent == other.numel * (itemsize(other.dtype) or 1)
    within = other.start <= tensor.start and tensor.start + tensor.extent <= other.start + other.extent
    return same or (contiguous and within and tensor.extent > 0)


def _pieces(group: list[StoredTensor]) -> tuple[str, str] | None:
    """Count the pieces of one name; (name, what is wrong) where they do not cover the whole."""
    if any(tensor.offsets is not None for tensor in group):
        covered, whole = _by_place(group)
    elif group[0].global_shape is not None:
        covered, whole = _up_to_whole(group)
    else:
        _by_checksum(group)
        return None
    if covered == whole:
        return None
    what = "overlap" if covered > whole else "leave gaps"
    return group[0].name, f"pieces of {group[0].name} {what}: {covered:,} of {whole:,} elements"


def _by_place(group: list[StoredTensor]) -> tuple[int, int]:
    """Pieces at the same place of the whole are copies: (elements of the distinct pieces, elements of the whole)."""
    placed = [tensor for tensor in group if tensor.offsets is not None]
    whole = placed[0].global_shape or _reach(placed)
    seen: set[tuple[Shape | None, Shape]] = set()
    covered = 0
    for tensor in placed:
        tensor.global_shape = whole
        place = (tensor.offsets, tensor.shape)
        if place in seen:
            _copy(tensor)
        else:
            seen.add(place)
            covered += tensor.numel
    return covered, prod(whole)


def _reach(group: list[StoredTensor]) -> Shape:
    corners = [tuple(o + n for o, n in zip(t.offsets or (), t.shape, strict=True)) for t in group]
    dims = len(corners[0])
    return tuple(max(c[d] for c in corners if len(c) == dims) for d in range(dims))


def _up_to_whole(group: list[StoredTensor]) -> tuple[int, int]:
    """Pieces with a known whole but unknown offsets: count them until the whole is covered."""
    whole = left = prod(group[0].whole)
    for tensor in group:
        tensor.unique = min(tensor.unique, left)
        left -= tensor.unique
        if tensor.numel and not tensor.unique:
            _copy(tensor)
    return whole - left, whole


def _by_checksum(group: list[StoredTensor]) -> None:
    """Equal checksums mean a copy. Without a checksum, or with another one, a tensor counts by itself."""
    seen: set[object] = set()
    for tensor in group if group[0].role in ("", "model") else ():
        evidence = (tensor.checksum, tensor.storage_nbytes, tensor.start, tensor.shape, tensor.dtype)
        if tensor.checksum is not None and evidence in seen:
            _copy(tensor)
        seen.add(evidence)


def _copy(tensor: StoredTensor) -> None:
    tensor.unique = 0
    tensor.note = tensor.note or "replica"


def stored_bytes(tensors: list[StoredTensor]) -> int:
    """Bytes of the distinct storages, and of the tensors without one."""
    storages: dict[tuple[str, str], int] = {}
    loose = 0
    for tensor in tensors:
        if tensor.storage is None:
            loose += tensor.nbytes
        else:
            storages[tensor.file, tensor.storage] = max(0, tensor.storage_nbytes)
    return loose + sum(storages.values())


def dragged(tensors: list[StoredTensor]) -> list[Problem]:
    """A warning for each storage much larger than the tensors that use it: saving a view saves its whole storage."""
    used: dict[tuple[str, str], int] = {}
    owner: dict[tuple[str, str], StoredTensor] = {}
    for tensor in tensors:
        if tensor.storage is not None:
            key = (tensor.file, tensor.storage)
            width = itemsize(tensor.dtype) or 1  # `unique` would be 0 for a replica on another rank
            own = min(tensor.numel * width, tensor.extent) if tensor.alias_of is None else 0
            used[key] = used.get(key, 0) + own
            owner.setdefault(key, tensor)
    found = []
    for key, tensor in owner.items():
        extra = tensor.storage_nbytes - used[key]
        if extra > DRAG_BYTES and extra > used[key] and tensor.note != "sparse":
            message = (
                f"tensor {tensor.name} uses {used[key]:,} of the {tensor.storage_nbytes:,} bytes saved with it: "
                "a view keeps its whole storage; clone it before saving"
            )
            found.append(Problem("VIEW_DRAGS_STORAGE", message, tensor.file, tensor.name, "warning"))
    return found
