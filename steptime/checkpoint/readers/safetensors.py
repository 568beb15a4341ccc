"""safetensors files: an 8-byte little-endian header length, a JSON header, then the tensor data, which is not read.

Format: safetensors README "Format"; limits and checks: `safetensors/src/tensor.rs` (MAX_HEADER_SIZE, validate).
The library keeps the last of two tensors with one name without a word; here that is a problem.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from steptime.checkpoint.dtypes import SAFETENSORS, nbytes
from steptime.checkpoint.pickles.values import shape_of
from steptime.checkpoint.records import Contents, StoredTensor, UnreadableError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from steptime.checkpoint.records import Shape
    from steptime.checkpoint.source import Source

MAX_HEADER = 100_000_000  # bytes, tensor.rs MAX_HEADER_SIZE
FIRST_READ = 1 << 14

Span = tuple[int, int, str]  # first byte, last byte + 1, tensor name
_Entry = tuple[str, str | None, "Shape | None", "Shape | None", Any]


class _Header(list[tuple[str, Any]]):
    """The pairs of a JSON object in file order, repeated keys included."""


_SPACE = re.compile(r"[ \t\n\r]*")
_ENTRY = re.compile(  # as the library and json.dumps write a tensor; any other spelling goes through the JSON parser
    r'[ \n]*"([^"\\\x00-\x1f]*)": ?\{"dtype": ?"(\w+)", ?"shape": ?\[((?:\d{1,18}(?:, ?\d{1,18})*)?)\], ?'
    r'"data_offsets": ?\[(\d{1,18}), ?(\d{1,18})\]\}([,}])'
)


def read(source: Source) -> Contents:
    """One file's header. Raises `UnreadableError` when there is no header to read."""
    contents = Contents(source.name, "safetensors", nbytes=source.size)
    length, raw = _raw_header(source)
    spans: list[Span] = []
    seen: set[str] = set()
    for name, code, shape, offsets, entry in _entries(raw, source.name):
        if name == "__metadata__":
            empty = entry is None and code is None  # null, as MLX writes and the library reads it
            contents.facts["metadata"] = {} if empty else _metadata(contents, entry)
            continue
        if name in seen:
            contents.problem("DUPLICATE_KEY", f"tensor {name} is described twice; a loader keeps the last", name)
        seen.add(name)
        if shape is None or offsets is None or not code or len(offsets) != 2 or offsets[0] > offsets[1]:
            contents.problem("BAD_TENSOR", f"tensor {name}: dtype, shape or data_offsets are not valid", name)
            continue
        if entry is not None and any("\ud800" <= char <= "\udfff" for char in name):
            contents.problem("BAD_NAME", f"tensor name {name!a} is not valid Unicode", name)
        dtype, size = _kind(code, shape)
        first, end = offsets
        if size is not None and size != end - first:
            message = f"tensor {name}: {code} {list(shape)} is {size} bytes, its offsets span {end - first}"
            contents.problem("SIZE_MISMATCH", message, name)
        tensor = StoredTensor(name, shape, dtype, end - first, contents.file)
        if size is None:
            tensor.note = "unknown dtype"
        contents.tensors.append(tensor)
        spans.append((first, end, name))
    _check_layout(contents, spans, source.size - 8 - length)
    return contents


def _raw_header(source: Source) -> tuple[int, bytes]:
    """(header length, header), with every length checked against the file before it is read."""
    if source.size < 8:
        raise UnreadableError("HEADER_TOO_SMALL", f"{source.size} bytes, a header needs 8", source.name)
    start = source.upto(0, FIRST_READ)
    length = int.from_bytes(start[:8], "little")
    if length > MAX_HEADER:
        raise UnreadableError("HEADER_TOO_LARGE", f"header length {length} exceeds {MAX_HEADER}", source.name)
    if length > source.size - 8:
        message = f"header of {length} bytes, {source.size - 8} bytes left: the file is truncated or no safetensors"
        raise UnreadableError("INVALID_HEADER_LENGTH", message, source.name)
    raw = start[8 : 8 + length]
    if len(raw) < length:
        raw += source.exactly(8 + len(raw), length - len(raw))
    return length, raw


def _entries(raw: bytes, file: str) -> Iterator[_Entry]:
    """(name, dtype, shape, offsets, JSON value) of each entry in file order; None for what is not valid."""
    try:
        text = str(raw, "utf-8")
        del raw
        yield from _scanned(text)
    except UnicodeDecodeError as error:
        raise UnreadableError("INVALID_HEADER", f"header is not UTF-8 at byte {8 + error.start}", file) from None
    except RecursionError:
        raise UnreadableError("INVALID_HEADER", "header is nested too deeply", file) from None
    except ValueError as error:
        raise UnreadableError("INVALID_HEADER", f"header is not JSON: {str(error)[:120]}", file) from None


def _scanned(text: str) -> Iterator[_Entry]:
    """One entry at a time, so that a header of a million tensors is never held as a tree of JSON."""
    if not text.startswith("{"):
        whole = isinstance(json.loads(text), dict)
        raise ValueError("it does not begin with '{'" if whole else "not an object")
    decode = json.JSONDecoder(object_pairs_hook=_Header).raw_decode
    shapes: dict[str, tuple[int, ...]] = {}
    take = _ENTRY.match
    at = _after_space(text, 1)
    mark = text[at : at + 1]
    at += mark == "}"
    while mark != "}":
        match = take(text, at)
        if match is not None:
            name, code, dims, start, end, mark = match.groups()
            if dims not in shapes:
                shapes[dims] = tuple(map(int, dims.split(","))) if dims else ()
            at = match.end()
            yield name, code, shapes[dims], (int(start), int(end)), None
            continue
        at = yield from _decoded(text, _after_space(text, at), decode)
        at = _after_space(text, at)
        mark = text[at : at + 1]
        if mark not in (",", "}"):
            raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
        at += 1
    if (at := _after_space(text, at)) < len(text):
        raise json.JSONDecodeError("Extra data", text, at)


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _decoded(text: str, at: int, decode: Callable[[str, int], tuple[Any, int]]) -> Generator[_Entry, None, int]:
    """One entry through the JSON parser; the index behind it comes back."""
    name, at = decode(text, at)
    at = _after_space(text, at)
    if not isinstance(name, str) or text[at : at + 1] != ":":
        raise json.JSONDecodeError("Expecting property name and ':'", text, at)
    entry, at = decode(text, _after_space(text, at + 1))
    fields = dict(entry) if isinstance(entry, _Header) else {}
    code = fields.get("dtype")
    yield (
        name, code if isinstance(code, str) else None, shape_of(fields.get("shape")), shape_of(fields.get("data_offsets")),
        entry,
    )  # fmt: skip
    return at


def _metadata(contents: Contents, entry: Any) -> dict[str, Any]:
    if not isinstance(entry, _Header) or not all(isinstance(value, str) for _, value in entry):
        contents.problem("METADATA", "__metadata__ is not a map of strings to strings")
        return {}
    return dict(entry)


@lru_cache(1024)
def _kind(code: str, shape: Shape) -> tuple[str, int | None]:
    """(dtype, bytes or None) of a dense tensor."""
    dtype = SAFETENSORS.get(code, code)
    return dtype, nbytes(shape, dtype)


def _check_layout(contents: Contents, spans: list[Span], data_bytes: int) -> None:
    """The tensors must cover the data exactly: no overlap, no hole, nothing behind the last one."""
    spans.sort()
    at = 0
    for start, end, name in spans:
        if start < at:
            contents.problem("OVERLAP", f"tensor {name} begins at {start}, inside the one before it", name)
        elif start > at:
            contents.problem("HOLE", f"{start - at} bytes before tensor {name} belong to none", name)
        at = max(at, end)
    if at > data_bytes:
        here = sum(1 for _, end, _ in spans if end <= data_bytes)
        message = f"truncated: {data_bytes:,} of {at:,} data bytes present, {here} of {len(spans)} tensors whole"
        contents.problem("TRUNCATED", message)
    elif at < data_bytes:
        contents.problem("TRAILING_BYTES", f"{data_bytes - at} bytes behind the last tensor")
