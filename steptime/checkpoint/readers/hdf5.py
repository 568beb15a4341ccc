"""HDF5 files (Keras, older TensorFlow), through h5py where it is installed. External and soft links are never followed."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from steptime.checkpoint import zipdir
from steptime.checkpoint.dtypes import BITS
from steptime.checkpoint.source import Source, Window
from steptime.checkpoint.stored_records import Contents, StoredTensor, UnreadableError
from steptime.checkpoint.zipdir import ZipEntry

KERAS = "model.weights.h5"
MAX_OBJECTS = 200_000
MAX_DEPTH = 64
MAX_BYTES = 400 << 20
"""Limit of libhdf5's allocations; it trusts the block sizes of a damaged file (1.6 GB for one of 3 kB)."""


class _File(io.RawIOBase):
    """A file object for h5py over a part of a file."""

    def __init__(self, window: Window) -> None:
        super().__init__()
        self._window = window
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._window.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._window.upto(self._at, len(buffer)) if 0 <= self._at < self._window.size else b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def read(source: Source) -> Contents:
    """Read every dataset of one file. Raises `UnreadableError`, with code MISSING_EXTRA if h5py is not installed."""
    return _read(Contents(source.name, "HDF5", nbytes=source.size), source.path)


def read_keras(source: Source, entry: ZipEntry) -> Contents:
    """Read the weights inside a .keras archive, which Keras stores uncompressed. Raises `UnreadableError`."""
    if entry.method != 0:
        raise UnreadableError("COMPRESSED", f"{KERAS} is compressed; Keras stores it uncompressed", source.name)
    window = Window(source, zipdir.data_offset(source, entry), entry.size)
    return _read(Contents(source.name, "Keras", nbytes=source.size), _File(window))


def _read(contents: Contents, file: str | _File) -> Contents:
    try:
        h5py = importlib.import_module("h5py")
    except ImportError:
        message = "HDF5 needs h5py: pip install 'steptime[checkpoint-formats]'"
        raise UnreadableError("MISSING_EXTRA", message, contents.file) from None
    try:
        with bounded_memory(MAX_BYTES), h5py.File(file, "r") as opened:
            _walk(h5py, opened, contents)
    except (OSError, RuntimeError, KeyError, ValueError, MemoryError) as error:
        reason = (str(error) or f"more than {MAX_BYTES >> 20} MB are needed").splitlines()[0][:120]
        raise UnreadableError("INVALID_HEADER", f"h5py cannot read it: {reason}", contents.file) from None
    return contents


@contextlib.contextmanager
def bounded_memory(most: int) -> Iterator[None]:
    """Let the process allocate only so many bytes more; without effect where the system has no /proc."""
    try:
        import resource

        here = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    except (ImportError, OSError):
        yield
        return
    unlimited = (-1, resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_AS, (here + most if soft in unlimited else min(soft, here + most), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _walk(h5py: Any, file: Any, contents: Contents) -> None:
    pending: list[tuple[Any, str, int]] = [(file, "", 0)]
    visited: set[Any] = set()
    while pending:
        group, prefix, depth = pending.pop()
        for key in group:
            name = f"{prefix}.{key}" if prefix else str(key)
            if not isinstance(group.get(key, getlink=True), h5py.HardLink):
                contents.problem("LINK", f"{name} is an external link; not followed", severity="warning")
                continue
            item = group[key]
            address = h5py.h5o.get_info(item.id).addr
            if address in visited:
                continue
            if len(visited) == MAX_OBJECTS or depth > MAX_DEPTH:
                what = f"more than {MAX_OBJECTS:,} objects, or {MAX_DEPTH} groups inside each other"
                contents.problem("TOO_MANY", f"{what}: {name} and all following objects are not read")
                return
            visited.add(address)
            if isinstance(item, h5py.Dataset):
                contents.tensors.append(_tensor(item, name, contents.file))
            elif isinstance(item, h5py.Group):
                pending.append((item, name, depth + 1))


def _tensor(item: Any, name: str, file: str) -> StoredTensor:
    dtype = str(item.dtype)
    role = "optimizer" if "optimizer" in name.partition(".")[0] else ""
    shape = tuple(int(n) for n in item.shape or ())
    size = int(item.dtype.itemsize) * prod(shape)
    return StoredTensor(name, shape, dtype if dtype in BITS else f"hdf5 {dtype}", size, file, role)
