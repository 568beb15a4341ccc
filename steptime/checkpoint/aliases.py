"""Count every element once: tensors that share a storage are told apart from those that repeat it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.checkpoint.dtypes import itemsize
from steptime.checkpoint.records import Problem

if TYPE_CHECKING:
    from steptime.checkpoint.records import StoredTensor

DRAG_BYTES = 1 << 20  # below this a view of a larger storage is not worth a line


def mark(tensors: list[StoredTensor]) -> None:
    """Set `unique` [elements] and `alias_of` of every tensor.

    Tied weights have the same bytes of one storage; a contiguous view inside another is part of it; an expanded tensor
    (stride 0) has no more elements than bytes. The elements of one storage never exceed its size.
    """
    shared: dict[tuple[str, str], list[StoredTensor]] = {}
    for tensor in tensors:
        tensor.unique = tensor.numel
        if tensor.storage is not None:
            shared.setdefault((tensor.file, tensor.storage), []).append(tensor)
    for group in shared.values():
        _mark_group(group)


def _mark_group(group: list[StoredTensor]) -> None:
    room = group[0].storage_nbytes
    kept: list[StoredTensor] = []
    for tensor in sorted(group, key=lambda t: (-t.extent, t.start)) if len(group) > 1 else group:
        width = itemsize(tensor.dtype) or 1
        tensor.unique = min(tensor.unique, tensor.extent // width, max(room, 0) // width)
        owner = next((k for k in kept if _inside(tensor, k)), None) if len(kept) < 256 else None
        if owner is not None:
            tensor.unique = 0
            tensor.alias_of = owner.name
            continue
        room -= tensor.unique * width
        kept.append(tensor)


def _inside(tensor: StoredTensor, other: StoredTensor) -> bool:
    same = tensor.start == other.start and tensor.extent == other.extent and tensor.numel == other.numel
    contiguous = other.extent == other.numel * (itemsize(other.dtype) or 1)
    within = other.start <= tensor.start and tensor.start + tensor.extent <= other.start + other.extent
    return same or (contiguous and within and tensor.extent > 0)


def stored_bytes(tensors: list[StoredTensor]) -> int:
    """Bytes of the distinct storages, and of the tensors that have none of their own."""
    storages: dict[tuple[str, str], int] = {}
    loose = 0
    for tensor in tensors:
        if tensor.storage is None:
            loose += tensor.nbytes
        else:
            storages[tensor.file, tensor.storage] = max(0, tensor.storage_nbytes)
    return loose + sum(storages.values())


def dragged(tensors: list[StoredTensor]) -> list[Problem]:
    """A warning for each storage much larger than what is used of it: a saved view carries its whole storage."""
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
