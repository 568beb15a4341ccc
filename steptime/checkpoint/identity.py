"""A structural hash of a checkpoint: names, shapes and element types, never values."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from steptime.checkpoint.records import Shape, StoredTensor

Structure = dict[str, tuple["Shape", str]]


def structure(tensors: Iterable[StoredTensor]) -> Structure:
    """{name: (whole shape, dtype)}: pieces and replicas of one tensor are one entry."""
    return {tensor.name: (tensor.whole, tensor.dtype) for tensor in tensors}


def structural_hash(tensors: Iterable[StoredTensor]) -> str:
    """32 hexadecimal digits, independent of file layout, sharding, order and training step."""
    digest = blake2b(digest_size=16)
    for name, (shape, dtype) in sorted(structure(tensors).items()):
        digest.update(f"{name!r} {dtype!r} {shape}\n".encode())
    return digest.hexdigest()
