"""A structural hash of a checkpoint, and the difference between two: names, shapes and element types, never values."""

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


def difference(left: Iterable[StoredTensor], right: Iterable[StoredTensor]) -> list[str]:
    """One line per tensor that only one side has or that differs in shape or type; [] when the structures agree."""
    a, b = structure(left), structure(right)
    lines = [f"- {name} {_text(a[name])}" for name in a if name not in b]
    lines += [f"+ {name} {_text(b[name])}" for name in b if name not in a]
    lines += [f"~ {name} {_text(a[name])} -> {_text(b[name])}" for name in a if name in b and a[name] != b[name]]
    return lines


def _text(entry: tuple[Shape, str]) -> str:
    return f"{entry[1]} {list(entry[0])}"
