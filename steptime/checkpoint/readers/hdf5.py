"""HDF5 files (Keras, older TensorFlow), through h5py where it is installed. External and soft links are never followed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from steptime.checkpoint.dtypes import BITS
from steptime.checkpoint.records import Contents, StoredTensor, UnreadableError

if TYPE_CHECKING:
    from steptime.checkpoint.source import Source

MAX_OBJECTS = 200_000
MAX_DEPTH = 64


def read(source: Source) -> Contents:
    """Every dataset of one file. Raises `UnreadableError`, with code MISSING_EXTRA where h5py is not installed."""
    try:
        h5py = importlib.import_module("h5py")
    except ImportError:
        message = "HDF5 needs h5py: pip install 'steptime[checkpoint-formats]'"
        raise UnreadableError("MISSING_EXTRA", message, source.name) from None
    contents = Contents(source.name, "HDF5", nbytes=source.size)
    try:
        with h5py.File(source.path, "r") as file:
            _walk(h5py, file, contents)
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        reason = str(error).splitlines()[0][:120]
        raise UnreadableError("INVALID_HEADER", f"h5py cannot read it: {reason}", source.name) from None
    return contents


def _walk(h5py: Any, file: Any, contents: Contents) -> None:
    pending: list[tuple[Any, str, int]] = [(file, "", 0)]
    visited: set[Any] = set()
    while pending:
        group, prefix, depth = pending.pop()
        for key in group:
            name = f"{prefix}.{key}" if prefix else str(key)
            if not isinstance(group.get(key, getlink=True), h5py.HardLink):
                contents.problem("LINK", f"{name} is a link to elsewhere; it is not followed", severity="warning")
                continue
            item = group[key]
            address = h5py.h5o.get_info(item.id).addr
            if address in visited or len(visited) > MAX_OBJECTS or depth > MAX_DEPTH:
                continue
            visited.add(address)
            if isinstance(item, h5py.Dataset):
                contents.tensors.append(_tensor(item, name, contents.file))
            elif isinstance(item, h5py.Group):
                pending.append((item, name, depth + 1))


def _tensor(item: Any, name: str, file: str) -> StoredTensor:
    dtype = str(item.dtype)
    role = "optimizer" if "optimizer" in name.partition(".")[0] else ""
    shape = tuple(int(n) for n in item.shape or ())
    size = int(item.dtype.itemsize)
    for length in shape:
        size *= length
    return StoredTensor(name, shape, dtype if dtype in BITS else f"hdf5 {dtype}", size, file, role)
