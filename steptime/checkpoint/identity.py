"""A structural hash of a checkpoint: names, shapes and element types, never values."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from steptime.checkpoint.records import Shape, StoredTensor

CHUNK = 10_000  # lines hashed at once
Structure = dict[str, tuple["Shape", str]]


def structure(tensors: Iterable[StoredTensor]) -> Structure:
    """{name: (whole shape, dtype)}: pieces and replicas of one tensor are one entry."""
    return {t.name: (t.shape if t.global_shape is None else t.global_shape, t.dtype) for t in tensors}


def structural_hash(own: Structure) -> str:
    """32 hexadecimal digits, independent of file layout, sharding, order and training step."""
    ends = {kind: f" {kind[1]!r} {kind[0]}\n" for kind in set(own.values())}
    names, digest = sorted(own), blake2b(digest_size=16)
    for at in range(0, len(names), CHUNK):
        digest.update("".join([f"{name!r}{ends[own[name]]}" for name in names[at : at + CHUNK]]).encode())
    return digest.hexdigest()
