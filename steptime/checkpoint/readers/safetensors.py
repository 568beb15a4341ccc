"""safetensors files: an 8-byte little-endian header length, a JSON header, then the tensor data, which is not read.

Format: safetensors README "Format"; limits and checks: `safetensors/src/tensor.rs` (MAX_HEADER_SIZE, validate).
Of two tensors with one name the library silently keeps the last; here that is a problem.
"""

from __future__ import annotations

import json
import re
from operator import attrgetter
from typing import Any

from steptime.checkpoint.dtypes import SAFETENSORS, nbytes
from steptime.checkpoint.pickles.values import shape_of
from steptime.checkpoint.source import Source
from steptime.checkpoint.stored_records import Contents, Shape, StoredTensor, UnreadableError

MAX_HEADER = 100_000_000  # bytes, tensor.rs MAX_HEADER_SIZE
FIRST_READ = 1 << 14


class _SafetensorsHeader(list[tuple[str, Any]]):
    """The pairs of a JSON object in file order, repeated keys included."""


def _integer(digits: str) -> int | None:
    """None represents a number beyond 64 bits, which no field may hold and Python may refuse to convert."""
    return int(digits) if len(digits) < 20 else None


_DECODE = json.JSONDecoder(object_pairs_hook=_SafetensorsHeader, parse_int=_integer).raw_decode
_SPACE = re.compile(r"[ \t\n\r]*")
_ENTRY = re.compile(  # as the library and json.dumps write a tensor; any other spelling goes through the JSON parser
    r'[ \n]*"(?!__metadata__")([^"\\\x00-\x1f]*)": ?\{"dtype": ?"(\w+", ?"shape": ?\[(?:\d{1,18}(?:, ?\d{1,18})*)?)\], ?'
    r'"data_offsets": ?\[(\d{1,18}), ?(\d{1,18})\]\}([,}])'
)


def read(source: Source) -> Contents:
    """Read one file's header. Raises `UnreadableError` if there is no valid header."""
    contents = Contents(source.name, "safetensors", nbytes=source.size)
    length, raw = _raw_header(source)
    try:
        text = str(raw, "utf-8")
        del raw
        _parse(contents, text)
    except UnicodeDecodeError as error:
        raise UnreadableError("INVALID_HEADER", f"header is not UTF-8 at byte {8 + error.start}", source.name) from None
    except RecursionError:
        raise UnreadableError("INVALID_HEADER", "header is nested too deeply", source.name) from None
    except ValueError as error:
        raise UnreadableError("INVALID_HEADER", f"header is not JSON: {str(error)[:120]}", source.name) from None
    _check_layout(contents, source.size - 8 - length)
    return contents


def _raw_header(source: Source) -> tuple[int, bytes]:
    """(header length, header); every length is checked against the file size before it is used."""
    if source.size < 8:
        raise UnreadableError("HEADER_TOO_SMALL", f"{source.size} bytes; a header needs 8", source.name)
    start = source.upto(0, FIRST_READ)
    length = int.from_bytes(start[:8], "little")
    if length > MAX_HEADER:
        message = f"header length {length} exceeds {MAX_HEADER}: the file is not safetensors"
        raise UnreadableError("HEADER_TOO_LARGE", message, source.name)
    if length > source.size - 8:
        message = f"header of {length} bytes, {source.size - 8} bytes left: the file is truncated or not safetensors"
        raise UnreadableError("INVALID_HEADER_LENGTH", message, source.name)
    raw = start[8 : 8 + length]
    if len(raw) < length:
        raw += source.exactly(8 + len(raw), length - len(raw))
    return length, raw


def _parse(contents: Contents, text: str) -> None:
    """Parse one entry at a time, so that a header of a million tensors never exists as parsed JSON."""
    if not text.startswith("{"):
        whole = isinstance(json.loads(text), dict)
        raise ValueError("it does not begin with '{'" if whole else "not an object")
    kinds: dict[str, tuple[Shape, str, int | None]] = {}
    take, add, file = _ENTRY.match, contents.tensors.append, contents.file
    at = _after_space(text, 1)
    mark = text[at : at + 1]
    at += mark == "}"
    while mark != "}":
        match = take(text, at)
        if match is None:
            at = _after_space(text, _decoded(contents, text, _after_space(text, at)))
            mark = text[at : at + 1]
            if mark not in (",", "}"):
                raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
            at += 1
            continue
        name, kind, start, end, mark = match.groups()
        at = match.end()
        known = kinds.get(kind)
        if known is None:
            code, _, dims = kind.partition('"')
            shape = tuple(map(int, re.findall(r"\d+", dims)))
            dtype = SAFETENSORS.get(code, code)
            known = kinds[kind] = shape, dtype, nbytes(shape, dtype)
        shape, dtype, size = known
        first = int(start)
        if size is not None and int(end) - first == size:
            add(StoredTensor(name, shape, dtype, size, file, "", None, 0, first))  # by position: half the time
        else:
            _record(contents, name, kind.partition('"')[0], shape, (first, int(end)))
    if (at := _after_space(text, at)) < len(text):
        raise json.JSONDecodeError("Extra data", text, at)


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _decoded(contents: Contents, text: str, at: int) -> int:
    """Parse one entry with the JSON parser and return the index after it."""
    name, at = _DECODE(text, at)
    at = _after_space(text, at)
    if not isinstance(name, str) or text[at : at + 1] != ":":
        raise json.JSONDecodeError("Expecting property name and ':'", text, at)
    entry, at = _DECODE(text, _after_space(text, at + 1))
    if name == "__metadata__":
        contents.facts["metadata"] = {} if entry is None else _metadata(contents, entry)  # null, as MLX writes it
        return at
    fields = dict(entry) if isinstance(entry, _SafetensorsHeader) else {}
    if any("\ud800" <= char <= "\udfff" for char in name):
        contents.problem("BAD_NAME", f"tensor name {name!a} is not valid Unicode", name)
    _record(contents, name, fields.get("dtype"), shape_of(fields.get("shape")), shape_of(fields.get("data_offsets")))
    return at


def _record(contents: Contents, name: str, code: Any, shape: Shape | None, offsets: Shape | None) -> None:
    """Add one tensor, or the problem with its entry."""
    if shape is None or offsets is None or len(offsets) != 2 or offsets[0] > offsets[1] or not isinstance(code, str):
        contents.problem("BAD_TENSOR", f"tensor {name}: dtype, shape or data_offsets are not valid", name)
        return
    dtype = SAFETENSORS.get(code, code)
    size, span = nbytes(shape, dtype), offsets[1] - offsets[0]
    if size is not None and size != span:
        message = f"tensor {name}: {code} {list(shape)} is {size} bytes, its offsets span {span} bytes"
        contents.problem("SIZE_MISMATCH", message, name)
    note = "unknown dtype" if size is None else ""
    contents.tensors.append(StoredTensor(name, shape, dtype, span, contents.file, start=offsets[0], note=note))


def _metadata(contents: Contents, entry: Any) -> dict[str, Any]:
    if not isinstance(entry, _SafetensorsHeader) or not all(isinstance(value, str) for _, value in entry):
        contents.problem("METADATA", "__metadata__ is not a map of strings to strings")
        return {}
    return dict(entry)


def _check_layout(contents: Contents, data_bytes: int) -> None:
    """The tensors must cover the data exactly: no repeated name, no overlap, no gap, nothing after the last one."""
    seen: set[str] = set()
    tensors = list(contents.tensors)
    if len({tensor.name for tensor in tensors}) < len(tensors):
        for tensor in tensors:
            if tensor.name in seen:
                message = f"tensor {tensor.name} is described twice; a loader keeps the last"
                contents.problem("DUPLICATE_KEY", message, tensor.name)
            seen.add(tensor.name)
    ends = [tensor.start + tensor.nbytes for tensor in tensors]
    in_row = [tensor.start for tensor in tensors] == [0, *ends[:-1]]  # as nearly every file has them
    for key in () if in_row else ("nbytes", "start"):  # what is empty comes before what begins at the same byte
        tensors.sort(key=attrgetter(key))
    at = ends[-1] if in_row else 0
    for tensor in () if in_row else tensors:
        start = tensor.start
        if start < at:
            message = f"tensor {tensor.name} begins at {start}, inside the previous one"
            contents.problem("OVERLAP", message, tensor.name)
        elif start > at:
            contents.problem("HOLE", f"{start - at} bytes before tensor {tensor.name} belong to no tensor", tensor.name)
        at = max(at, start + tensor.nbytes)
    if at > data_bytes:
        here = sum(1 for tensor in tensors if tensor.start + tensor.nbytes <= data_bytes)
        message = f"truncated: {data_bytes:,} of {at:,} data bytes present, {here} of {len(tensors)} tensors whole"
        contents.problem("TRUNCATED", message)
    elif at < data_bytes:
        contents.problem("TRAILING_BYTES", f"{data_bytes - at} bytes after the last tensor")
