"""numpy .npy and .npz: one header line per array; object arrays are pickles and are checked like pickles.

Format: numpy `numpy/lib/format.py` docstring (versions 1.0 to 3.0).
"""

from __future__ import annotations

import json
import re
import zlib

from steptime.checkpoint import zipdir
from steptime.checkpoint.dtypes import from_numpy, nbytes
from steptime.checkpoint.pickles import pickle_streams
from steptime.checkpoint.pickles.pickle_streams import Streams
from steptime.checkpoint.pickles.pickle_verdict import judge
from steptime.checkpoint.pickles.values import MAX_DIMS
from steptime.checkpoint.readers.torch_file import note_dangers
from steptime.checkpoint.source import Source
from steptime.checkpoint.stored_records import Contents, StoredTensor, UnreadableError
from steptime.checkpoint.zipdir import ZipDirectory, ZipEntry

MAX_DIGITS = 19
MAGIC = b"\x93NUMPY"
HEADER_READ = 1 << 14
MAX_OBJECTS = 16 << 20  # bytes of an array of pickled objects that are interpreted
_HEADER = re.compile(
    r"^\{'descr': (?P<descr>'[^']*'|\[.*\]), 'fortran_order': (?:True|False), 'shape': \((?P<shape>[\d, ]*)\), \}\s*$"
)


def read(source: Source) -> Contents:
    """Read one .npy file, or several consecutive arrays as Equinox writes them, with or without a JSON line before them.

    Raises `UnreadableError` (INVALID_HEADER).
    """
    contents = Contents(source.name, "npy", nbytes=source.size)
    at = _first_array(source, contents)
    stem = source.name.rsplit("/", 1)[-1].removesuffix(".npy")
    while True:
        tensor, start = _array(source.upto(at, HEADER_READ), stem, source.name)
        contents.tensors.append(tensor)
        end = at + start + tensor.nbytes
        if end > source.size:
            message = f"truncated: {source.size - at - start:,} of {tensor.nbytes:,} data bytes present"
            contents.problem("TRUNCATED", message, tensor.name)
        if tensor.dtype == "O":
            note_dangers(
                contents, judge(_objects(contents, tensor, source.upto(at + start, MAX_OBJECTS)), torch_file=False)
            )
        at = end
        if at >= source.size or tensor.dtype == "O" or source.upto(at, len(MAGIC)) != MAGIC:
            break
    if at < source.size and tensor.dtype != "O":
        contents.problem("TRAILING_BYTES", f"{source.size - at:,} bytes after the last array")
    if len(contents.tensors) > 1:
        contents.format = "npy arrays in a row"
        for number, tensor in enumerate(contents.tensors):
            tensor.name = str(number)
    return contents


def _first_array(source: Source, contents: Contents) -> int:
    """Offset of the first array; a JSON line before it (Equinox's hyper-parameters) becomes the file's args."""
    head = source.upto(0, HEADER_READ)
    if head.startswith(MAGIC):
        return 0
    line, _, _ = head.partition(b"\n")
    try:
        args = json.loads(line)
    except (ValueError, RecursionError):
        args = None
    if isinstance(args, dict):
        contents.facts["args"] = args
    return len(line) + 1


def read_npz(source: Source, directory: ZipDirectory) -> Contents:
    """Read every array of a .npz archive; only the first kilobytes of a compressed member are decompressed."""
    contents = Contents(source.name, "npz", nbytes=source.size)
    for duplicate in directory.duplicates:
        contents.problem("DUPLICATE_ENTRY", f"zip entry {duplicate} occurs twice")
    objects: list[Streams] = []
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
        if tensor.dtype == "O":
            objects.append(_objects(contents, tensor, _head(source, entry, MAX_OBJECTS)[start:]))
        contents.tensors.append(tensor)
    if objects:
        note_dangers(contents, judge(*objects, torch_file=False))
    return contents


def _head(source: Source, entry: ZipEntry, length: int = HEADER_READ) -> bytes:
    """At most `length` bytes of a member, decompressed if needed."""
    data = source.upto(zipdir.data_offset(source, entry), min(entry.stored, length))
    if entry.method == 0:
        return data
    if entry.method != zlib.DEFLATED:
        raise UnreadableError("COMPRESSED", f"compression method {entry.method} is not supported", source.name)
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, length)
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
    dims = [n for n in match["shape"].replace(" ", "").split(",") if n]
    if any(len(n) > MAX_DIGITS for n in dims) or len(dims) > MAX_DIMS:
        raise UnreadableError("INVALID_HEADER", "the shape in the numpy header is longer than numpy allows", file)
    shape = tuple(map(int, dims))
    descr = match["descr"].strip("'")
    record = match["descr"].startswith("[")
    dtype = "record" if record else from_numpy(descr)
    return StoredTensor(name, shape, dtype, nbytes(shape, dtype) or 0, file), start + length


def _objects(contents: Contents, tensor: StoredTensor, data: bytes) -> Streams:
    """The pickle that an array of Python objects is, which numpy.load(allow_pickle=True) runs."""
    message = f"array {tensor.name} holds pickled Python objects; they were interpreted, not loaded"
    contents.problem("PICKLED_OBJECTS", message, tensor.name)
    return pickle_streams.read(data, f"array {tensor.name}")
