"""Format of a file from its first bytes, and from its name only where the bytes do not decide.

Unsupported formats are recognized, so that the error names the format. Marks: TensorFlow Lite `tflite/schema.fbs` (file
identifier TFL3), ExecuTorch `schema/program.fbs` (ET and two digits), TensorFlow `saved_model.pb` and `tensor_bundle` (.index,
.data-00000-of-00001).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from steptime.checkpoint import zipdir
from steptime.checkpoint.readers import dcp_metadata, gguf, hdf5, msgpack, npy, pt2, safetensors, torch_file
from steptime.checkpoint.source import Source
from steptime.checkpoint.stored_records import Contents, UnreadableError

Reader = Callable[[Source], Contents]

SUFFIXES = (
    ".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".gguf", ".npy", ".npz", ".h5", ".hdf5",
    ".keras", ".msgpack", ".pt2", ".tar", ".th", ".model", ".t7", ".weights", ".eqx",
)  # fmt: skip


def read_file(path: str, name: str) -> Contents:
    """Headers and metadata of one file, called `name` in what is reported. Raises `UnreadableError`."""
    with Source(path, name) as source:
        contents = _reader(source)(source)
        contents.drop_impossible()
        contents.read = source.read_bytes
    return contents


def _reader(source: Source) -> Reader:
    if source.size == 0:
        raise UnreadableError("EMPTY", "0 bytes", source.name)
    head = source.upto(0, 264)
    if head.startswith(b"version https://git-lfs"):
        raise UnreadableError("LFS_POINTER", "a git-lfs pointer; the file itself was not downloaded", source.name)
    if head.lstrip()[:5].lower() in (b"<!doc", b"<html", b"<?xml"):
        raise UnreadableError("UNKNOWN_FORMAT", "a web page or XML, not a checkpoint", source.name)
    if source.name.endswith(".metadata"):  # a name that only distributed checkpoints have; the bytes are any pickle's
        return dcp_metadata.read
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= source.size - 8:
        return safetensors.read  # first: a header of 640 bytes begins with 80 02, as a pickle does
    for magic, reader in _MAGIC:
        if head.startswith(magic):
            return reader
    if torch_file.is_legacy(head):
        return torch_file.read_legacy
    if head[:1] == b"{" and b"}\n" + npy.MAGIC in source.upto(0, npy.HEADER_READ):
        return npy.read
    if head[:1] == b"\x80" and len(head) > 1 and 2 <= head[1] <= 5:
        return torch_file.read_bare
    if head[257:262] == b"ustar":
        raise UnreadableError("UNSUPPORTED", "a tar archive (torch 0.1 format or a bundle): not read", source.name)
    what = foreign_file(source.name, head)
    if what is not None:
        raise UnreadableError("UNSUPPORTED", refusal(what), source.name)
    if head[8:9] == b"{" or source.name.endswith(".safetensors"):
        return safetensors.read
    if head[:1] in b"\xde\xdf" or 0x80 <= head[0] <= 0x8F:
        return msgpack.read
    if head.lstrip()[:1] in (b"(", b"]", b"}", b"c", b"I", b"N") and source.name.endswith(
        (".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt")
    ):
        return torch_file.read_bare
    raise UnreadableError(
        "UNKNOWN_FORMAT", f"no known checkpoint format (first bytes {head[:8].hex(' ')})", source.name
    )


def _read_zip(source: Source) -> Contents:
    """Any zip archive a framework writes. Raises `UnreadableError`."""
    directory = zipdir.read_directory(source)
    if directory is None:
        return torch_file.salvage(source)
    names = directory.entries
    if not any(name.endswith("data.pkl") for name in names):
        if any(name.endswith("model_weights_config.json") for name in names):
            return pt2.read(source, directory)
        if hdf5.KERAS in names:
            return hdf5.read_keras(source, names[hdf5.KERAS])
        if any(name.endswith(".npy") for name in names):
            return npy.read_npz(source, directory)
    return torch_file.read_zip(source, directory)


_MAGIC: tuple[tuple[bytes, Reader], ...] = (
    (b"GGUF", gguf.read),
    (b"\x93NUMPY", npy.read),
    (b"\x89HDF\r\n\x1a\n", hdf5.read),
    (b"PK\x03\x04", _read_zip),
    (b"PK\x05\x06", _read_zip),
)
_SAVED_MODEL = "a TensorFlow SavedModel"
_BUNDLE = "a TensorFlow checkpoint"
_BY_NAME = (
    (re.compile(r"(?:^|/)saved_model\.pb(?:txt)?$"), _SAVED_MODEL),
    (re.compile(r"\.data-\d{5}-of-\d{5}$|\.ckpt(?:-\d+)?\.(?:index|meta)$|(?:^|/)variables\.index$"), _BUNDLE),
    (re.compile(r"\.onnx$"), "an ONNX model"),
    (re.compile(r"\.pte$"), "an ExecuTorch program"),
    (re.compile(r"\.tflite$"), "a TensorFlow Lite model"),
    (re.compile(r"\.mlmodel$|\.mlpackage/?$"), "a Core ML model"),
    (re.compile(r"\.(?:engine|plan)$"), "a TensorRT engine"),
)


def foreign_file(name: str, head: bytes) -> str | None:
    """The kind of file, in words; None where it is none of these."""
    if head[4:8] == b"TFL3":
        return "a TensorFlow Lite model"
    if head[4:6] == b"ET" and head[6:8].isdigit():
        return "an ExecuTorch program"
    return next((what for pattern, what in _BY_NAME if pattern.search(name.lower())), None)


def foreign_folder(names: Iterable[str]) -> str | None:
    """The kind of a folder of these files, in words."""
    found = [what for name in names if (what := foreign_file(name, b"")) is not None]
    return next((what for what in (_SAVED_MODEL, _BUNDLE) if what in found), found[0] if found else None)


def refusal(what: str) -> str:
    """The message for it."""
    return f"{what}: not supported; give the checkpoint that it was exported from"
