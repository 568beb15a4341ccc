"""Flax msgpack checkpoints: nested maps whose arrays are extension type 1 = [shape, dtype name, raw bytes].

Format: the MessagePack specification; flax `flax/serialization.py` (_ndarray_to_bytes, _MsgpackExtType,
chunks of large arrays in maps with the key __msgpack_chunked_array__). Payloads are skipped by their length.
"""

from __future__ import annotations

import struct
from typing import Any

from steptime.checkpoint import roles
from steptime.checkpoint.dtypes import from_numpy, nbytes
from steptime.checkpoint.pickles.values import shape_of
from steptime.checkpoint.source import Cursor, Source
from steptime.checkpoint.stored_records import Contents, StoredTensor, UnreadableError

MAX_DEPTH = 60
MAX_ITEMS = 2_000_000
NDARRAY = 1
_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8,
          0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}  # fmt: skip
_EXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


class _Items(Cursor):
    """The values of a file, counted."""

    items = 0

    def size(self, width: int) -> int:
        return int.from_bytes(self.take(width), "big")


def read(source: Source) -> Contents:
    """Read one file. Raises `UnreadableError` if it is not a msgpack map that contains arrays."""
    contents = Contents(source.name, "Flax msgpack", nbytes=source.size)
    cursor = _Items(source)
    try:
        _value(cursor, contents, [], 0)
    except UnreadableError as error:
        if not contents.tensors:
            raise
        contents.problems.append(error.problem)
    if not contents.tensors:
        raise UnreadableError("UNKNOWN_FORMAT", "a msgpack stream without arrays", source.name)
    if cursor.at < source.size and not contents.problems:
        contents.problem("TRAILING_BYTES", f"{source.size - cursor.at} bytes follow the map")
    return contents


def _value(cursor: _Items, contents: Contents, path: list[str], depth: int) -> Any:
    """Read the value at the cursor: text and integers are returned, arrays become tensors, everything else is skipped."""
    cursor.items += 1
    if depth > MAX_DEPTH or cursor.items > MAX_ITEMS:
        raise UnreadableError("TOO_DEEP", f"nested too deeply or too long at byte {cursor.at}", contents.file)
    tag = cursor.size(1)
    if tag < 0x80 or tag >= 0xE0:
        return tag if tag < 0x80 else tag - 256
    if tag <= 0x8F or tag in (0xDE, 0xDF):
        return _map(cursor, contents, path, depth, tag & 15 if tag <= 0x8F else cursor.size(2 if tag == 0xDE else 4))
    if tag <= 0x9F or tag in (0xDC, 0xDD):
        count = tag & 15 if tag <= 0x9F else cursor.size(2 if tag == 0xDC else 4)
        return [_value(cursor, contents, [*path, str(i)], depth + 1) for i in range(count)]
    if tag <= 0xBF or tag in (0xD9, 0xDA, 0xDB):
        length = tag & 31 if tag <= 0xBF else cursor.size(1 << (tag - 0xD9))
        return cursor.take(length).decode("utf-8", "surrogateescape")
    if tag in (0xC4, 0xC5, 0xC6):
        return cursor.skip(cursor.size(1 << (tag - 0xC4)))
    if tag in _FIXED:
        raw = cursor.take(_FIXED[tag])
        return int.from_bytes(raw, "big") if 0xCC <= tag <= 0xCF else None
    if tag in _EXT or tag in (0xC7, 0xC8, 0xC9):
        length = _EXT.get(tag) or cursor.size(1 << (tag - 0xC7))
        return _extension(cursor, contents, path, length)
    raise UnreadableError("MALFORMED", f"byte 0x{tag:02x} at {cursor.at - 1} does not start a value", contents.file)


def _map(cursor: _Items, contents: Contents, path: list[str], depth: int, count: int) -> Any:
    first = len(contents.tensors)
    found: dict[str, Any] = {}
    for _ in range(count):
        key = _value(cursor, contents, path, depth + 1)
        name = key if isinstance(key, str) else str(key)
        found[name] = _value(cursor, contents, [*path, name], depth + 1)
    if "__msgpack_chunked_array__" in found:
        _join(contents, path, first, found)
    return found


def _join(contents: Contents, path: list[str], first: int, found: dict[str, Any]) -> None:
    """Join the flat chunks of an array above 1 GiB; flax stores the shape tuple as a map with numbered keys."""
    chunks = contents.tensors[first:]
    del contents.tensors[first:]
    numbered = found.get("shape")
    shape = shape_of(list(numbered.values())) if isinstance(numbered, dict) else None
    if chunks and shape is not None:
        contents.tensors.append(_named(contents, path, shape, chunks[0].dtype, sum(t.nbytes for t in chunks)))


def _extension(cursor: _Items, contents: Contents, path: list[str], length: int) -> None:
    kind = struct.unpack("b", cursor.take(1))[0]
    end = cursor.at + length
    if kind == NDARRAY and end <= cursor.source.size:
        inner = Contents(contents.file, "")
        if cursor.size(1) == 0x93:
            shape = shape_of(_value(cursor, inner, path, MAX_DEPTH - 8))
            name = _value(cursor, inner, path, MAX_DEPTH - 8)
            if shape is not None and isinstance(name, str):
                dtype = from_numpy(name)
                size = nbytes(shape, dtype)
                contents.tensors.append(_named(contents, path, shape, dtype, size if size is not None else 0))
    cursor.at = end
    if end > cursor.source.size:
        raise UnreadableError(
            "TRUNCATED", f"an array ends at byte {end}, the file has {cursor.source.size}", contents.file
        )


def _named(contents: Contents, path: list[str], shape: tuple[int, ...], dtype: str, size: int) -> StoredTensor:
    top = {path[0]} if path else set()
    role, name = roles.role_and_name(path or ["array"], top)
    return StoredTensor(name, shape, dtype, size, contents.file, role)
