"""GGUF files: key-values, then one record per tensor, then aligned data, which is not read.

Format: ggml `docs/gguf.md`. Dimensions are stored innermost first and reversed here, to match torch and numpy.
"""

from __future__ import annotations

import struct
from math import prod
from typing import Any

from steptime.checkpoint.dtypes import GGML
from steptime.checkpoint.records import MAX_ELEMENTS, Contents, StoredTensor, UnreadableError
from steptime.checkpoint.source import Source

FIRST_READ = 1 << 20
MAX_HEADER = 256 << 20
KEEP_ITEMS = 16  # of an array value; vocabularies have 128,000
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
MIN_TENSOR, MIN_KEY = 24, 13  # bytes of the smallest possible records


class _Short(Exception):  # noqa: N818 - asks for a longer read
    """The buffer ends inside a record."""


class _HeaderCursor:
    """A cursor over the first bytes of the file."""

    def __init__(self, data: bytes, size: int, order: str) -> None:
        self.data = data
        self.size = size
        self.order = order
        self.at = 24

    def number(self, code: str) -> Any:
        width = struct.calcsize(code)
        if self.at + width > len(self.data):
            raise _Short
        value = struct.unpack_from(self.order + code, self.data, self.at)[0]
        self.at += width
        return value

    def skip(self, length: int) -> bytes:
        if length > self.size - self.at:
            raise ValueError(f"a length of {length} at byte {self.at}, {self.size - self.at} bytes left")
        end = self.at + length
        if end > len(self.data):
            raise _Short
        value = self.data[self.at : end]
        self.at = end
        return value

    def text(self) -> str:
        return self.skip(self.number("Q")).decode("utf-8", "surrogateescape")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(depth)
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind} at byte {self.at}")
        return self.number(_SCALARS[kind])

    def _array(self, depth: int) -> Any:
        kind, count = self.number("I"), self.number("Q")
        if depth > 4:
            raise ValueError(f"arrays nested beyond 4 levels at byte {self.at}")
        if kind in _SCALARS:
            width = struct.calcsize(_SCALARS[kind])
            raw = self.skip(count * width)
            kept = min(count, KEEP_ITEMS)
            return list(struct.unpack_from(f"{self.order}{kept}{_SCALARS[kind]}", raw))
        if count > self.size - self.at:
            raise ValueError(f"an array of {count} items at byte {self.at}, {self.size - self.at} bytes left")
        kept = []
        for index in range(count):
            item = self.value(kind, depth + 1)
            if index < KEEP_ITEMS:
                kept.append(item)
        return kept


def read(source: Source) -> Contents:
    """Read one file. Raises `UnreadableError` (INVALID_HEADER) if counts or lengths exceed the file."""
    contents = Contents(source.name, "GGUF", nbytes=source.size)
    length = FIRST_READ
    while True:
        data = source.upto(0, length)
        try:
            _parse(contents, data, source.size)
        except _Short:
            if len(data) == length < MAX_HEADER:
                length *= 8
                continue
            message = f"header is cut short at {len(data)} bytes"
            if not contents.tensors:
                raise UnreadableError("TRUNCATED", message, source.name) from None
            contents.problem("TRUNCATED", message)
        except ValueError as error:
            raise UnreadableError("INVALID_HEADER", str(error), source.name) from None
        return contents


def _parse(contents: Contents, data: bytes, size: int) -> None:
    contents.tensors.clear()
    if len(data) < 24:
        raise _Short
    order = "<" if int.from_bytes(data[4:8], "little") < 65536 else ">"
    version, count, keys = struct.unpack_from(f"{order}IQQ", data, 4)
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version}; 2 and 3 are read")
    if count * MIN_TENSOR > size or keys * MIN_KEY > size:
        raise ValueError(f"{count} tensors and {keys} keys cannot fit in {size} bytes")
    reader = _HeaderCursor(data, size, order)
    facts: dict[str, Any] = {}
    for _ in range(keys):
        key = reader.text()
        facts[key] = reader.value(reader.number("I"))
    contents.facts["gguf"] = facts
    ends = [_tensor(reader, contents) for _ in range(count)]
    alignment = facts.get("general.alignment", 32)
    alignment = alignment if type(alignment) is int and 0 < alignment < 1 << 20 else 32
    start = -(-reader.at // alignment) * alignment
    need = start + max(ends, default=0)
    if need > size:
        contents.problem("TRUNCATED", f"truncated: {size:,} of {need:,} bytes present")
    names = [t.name for t in contents.tensors]
    if len(set(names)) < len(names):
        contents.problem("DUPLICATE_KEY", "a tensor name occurs twice")


def _tensor(reader: _HeaderCursor, contents: Contents) -> int:
    """Record one tensor and return its end offset in the data section [bytes]."""
    name = reader.text()
    dims = reader.number("I")
    if dims > 64:
        raise ValueError(f"{dims} dimensions at byte {reader.at}")
    shape = tuple(reader.number("Q") for _ in range(dims))[::-1]
    kind, offset = reader.number("I"), reader.number("Q")
    known = GGML.get(kind)
    count = prod(shape)
    if count >= MAX_ELEMENTS:  # ggml refuses the file
        raise ValueError(f"a tensor of 2**63 elements or more at byte {reader.at}")
    size = -(-count // known[1]) * known[2] if known else 0
    dtype = known[0] if known else f"ggml#{kind}"
    contents.tensors.append(
        StoredTensor(name, shape, dtype, size, contents.file, note="" if known else "unknown dtype")
    )
    return int(offset) + size
