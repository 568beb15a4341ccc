"""GGUF files: key-values, then one record per tensor, then aligned data, which is not read.

Format: ggml `docs/gguf.md`. Dimensions are stored innermost first and reversed here, to match torch and numpy.
"""

from __future__ import annotations

import struct
from math import prod
from typing import Any

from steptime.checkpoint.dtypes import GGML
from steptime.checkpoint.source import Cursor, Source
from steptime.checkpoint.stored_records import MAX_ELEMENTS, Contents, StoredTensor, UnreadableError

MAX_HEADER = 256 << 20  # bytes; vocabularies take a few MB
MAX_TEXT = 1 << 20  # bytes kept of a text
KEEP_ITEMS = 16  # of an array value; vocabularies have 128,000
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
MIN_TENSOR, MIN_KEY = 24, 13  # bytes of the smallest possible records


class _GgufHeader(Cursor):
    """The records of a header in one byte order."""

    order = "<"

    def number(self, code: str) -> Any:
        if self.at > MAX_HEADER:
            raise ValueError(f"a header of more than {MAX_HEADER} bytes")
        return struct.unpack(self.order + code, self.take(struct.calcsize(code)))[0]

    def text(self) -> str:
        length = self.number("Q")
        kept = self.take(min(length, MAX_TEXT))
        self.skip(length - len(kept))
        return kept.decode("utf-8", "surrogateescape")

    def value(self, depth: int = 0) -> Any:
        return self._items(self.number("I"), 1, depth)[0]

    def _items(self, kind: int, count: int, depth: int) -> list[Any]:
        """The first of `count` values of a kind; the others are stepped over."""
        if kind in _SCALARS:
            kept = [self.number(_SCALARS[kind]) for _ in range(min(count, KEEP_ITEMS))]
            self.skip((count - len(kept)) * struct.calcsize(_SCALARS[kind]))
            return kept
        if kind not in (_STRING, _ARRAY) or depth > 4:
            raise ValueError(f"unknown value type {kind}, or arrays nested beyond 4 levels, at byte {self.at}")
        if count > self.source.size - self.at:
            raise ValueError(f"an array of {count} items at byte {self.at}, {self.source.size - self.at} bytes left")
        found: list[Any] = []
        for _ in range(count):
            item = self.text() if kind == _STRING else self._items(self.number("I"), self.number("Q"), depth + 1)
            if len(found) < KEEP_ITEMS:
                found.append(item)
        return found


def read(source: Source) -> Contents:
    """Read one file. Raises `UnreadableError` if counts or lengths exceed the file, unless tensors were read before."""
    contents = Contents(source.name, "GGUF", nbytes=source.size)
    try:
        _parse(contents, _GgufHeader(source, 4))
    except ValueError as error:
        raise UnreadableError("INVALID_HEADER", str(error), source.name) from None
    except UnreadableError as error:
        if not contents.tensors:
            raise
        contents.problems.append(error.problem)
    return contents


def _parse(contents: Contents, header: _GgufHeader) -> None:
    size = header.source.size
    version = header.number("I")
    if version >= 65536:
        header.order, version = ">", int.from_bytes(version.to_bytes(4, "little"), "big")
    count, keys = header.number("Q"), header.number("Q")
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version} is not supported (2 and 3 are)")
    if count * MIN_TENSOR > size or keys * MIN_KEY > size:
        raise ValueError(f"{count} tensors and {keys} keys cannot fit in {size} bytes")
    facts = contents.facts["gguf"] = {}
    for _ in range(keys):
        key = header.text()
        facts[key] = header.value()
    ends = [_tensor(header, contents) for _ in range(count)]
    alignment = facts.get("general.alignment", 32)
    alignment = alignment if type(alignment) is int and 0 < alignment < 1 << 20 else 32
    need = -(-header.at // alignment) * alignment + max(ends, default=0)
    if need > size:
        contents.problem("TRUNCATED", f"truncated: {size:,} of {need:,} bytes present")
    names = [t.name for t in contents.tensors]
    if len(set(names)) < len(names):
        contents.problem("DUPLICATE_KEY", "a tensor name occurs twice")


def _tensor(reader: _GgufHeader, contents: Contents) -> int:
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
