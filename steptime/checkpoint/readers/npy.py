"""numpy .npy and .npz: one header line per array; object arrays are pickles and stay unread.

Format: numpy `numpy/lib/format.py` docstring (versions 1.0 to 3.0).
"""

from __future__ import annotations

import re
import zlib
from typing import TYPE_CHECKING

from steptime.checkpoint import zipdir
from steptime.checkpoint.dtypes import from_numpy, nbytes
from steptime.checkpoint.records import Contents, StoredTensor, UnreadableError

if TYPE_CHECKING:
    from steptime.checkpoint.source import Source
    from steptime.checkpoint.zipdir import ZipDirectory, ZipEntry

MAGIC = b"\x93NUMPY"
HEADER_READ = 1 << 14
_HEADER = re.compile(
    r"^\{'descr': (?P<descr>'[^']*'|\[.*\]), 'fortran_order': (?:True|False), 'shape': \((?P<shape>[\d, ]*)\), \}\s*$"
)


def read(source: Source) -> Contents:
    """One .npy file. Raises `UnreadableError` (INVALID_HEADER)."""
    contents = Contents(source.name, "npy", nbytes=source.size)
    name = source.name.rsplit("/", 1)[-1].removesuffix(".npy")
    tensor, start = _array(source.upto(0, HEADER_READ), name, source.name)
    if start + tensor.nbytes > source.size:
        message = f"truncated: {source.size - start:,} of {tensor.nbytes:,} data bytes present"
        contents.problem("TRUNCATED", message, name)
    _warn_objects(contents, tensor)
    contents.tensors.append(tensor)
    return contents


def read_npz(source: Source, directory: ZipDirectory) -> Contents:
    """Every array of a .npz archive; of compressed members only the first kilobytes are expanded."""
    contents = Contents(source.name, "npz", nbytes=source.size)
    for duplicate in directory.duplicates:
        contents.problem("DUPLICATE_ENTRY", f"zip entry {duplicate} occurs twice")
    for entry in directory.entries.values():
        if not entry.name.endswith(".npy"):
            continue
        name = entry.name.removesuffix(".npy")
        try:
            tensor, start = _array(_head(source, entry), name, source.name)
        except UnreadableError as error:
            contents.problem(error.problem.code, f"{entry.name}: {error.problem.message}", name)
            continue
        if start + tensor.nbytes > entry.size:
            contents.problem("SIZE_MISMATCH", f"{entry.name} has {entry.size} bytes, its header needs more", name)
        _warn_objects(contents, tensor)
        contents.tensors.append(tensor)
    return contents


def _head(source: Source, entry: ZipEntry) -> bytes:
    data = source.upto(zipdir.data_offset(source, entry), min(entry.stored, HEADER_READ))
    if entry.method == 0:
        return data
    if entry.method != zlib.DEFLATED:
        raise UnreadableError("COMPRESSED", f"compression method {entry.method} is not read", source.name)
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, HEADER_READ)
    except zlib.error:
        raise UnreadableError("INVALID_HEADER", "damaged compressed data", source.name) from None


def _array(head: bytes, name: str, file: str) -> tuple[StoredTensor, int]:
    """(tensor, first data byte) from the start of a .npy stream."""
    width = 2 if head[6:7] == b"\x01" else 4
    start = 8 + width
    length = int.from_bytes(head[8:start], "little")
    if not head.startswith(MAGIC) or length > HEADER_READ or start + length > len(head):
        raise UnreadableError("INVALID_HEADER", "no complete numpy header", file)
    match = _HEADER.match(head[start : start + length].decode("latin-1").strip())
    if match is None:
        raise UnreadableError("INVALID_HEADER", "the numpy header is not one numpy writes", file)
    shape = tuple(int(n) for n in match["shape"].replace(" ", "").split(",") if n and len(n) < 20)
    descr = match["descr"].strip("'")
    record = match["descr"].startswith("[")
    dtype = "record" if record else from_numpy(descr)
    return StoredTensor(name, shape, dtype, nbytes(shape, dtype) or 0, file), start + length


def _warn_objects(contents: Contents, tensor: StoredTensor) -> None:
    if tensor.dtype == "O":
        message = f"array {tensor.name} holds pickled Python objects; they are not read"
        contents.problem("PICKLED_OBJECTS", message, tensor.name)
