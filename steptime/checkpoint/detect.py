"""Which format a file is, by its first bytes; the name is asked only where bytes cannot tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.checkpoint import foreign
from steptime.checkpoint.readers import (
    gguf,
    hdf5,
    msgpack,
    npy,
    safetensors,
    torch_file,
    torch_legacy,
    zipped,
)
from steptime.checkpoint.records import UnreadableError
from steptime.checkpoint.source import Source

if TYPE_CHECKING:
    from collections.abc import Callable

    from steptime.checkpoint.records import Contents

    Reader = Callable[[Source], Contents]

SUFFIXES = (
    ".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".gguf", ".npy", ".npz", ".h5", ".hdf5",
    ".keras", ".msgpack", ".pt2", ".tar", ".th", ".model", ".t7", ".weights", ".eqx",
)  # fmt: skip
_MAGIC: tuple[tuple[bytes, Reader], ...] = (
    (b"GGUF", gguf.read),
    (b"\x93NUMPY", npy.read),
    (b"\x89HDF\r\n\x1a\n", hdf5.read),
    (b"PK\x03\x04", zipped.read),
    (b"PK\x05\x06", zipped.read),
)


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
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= source.size - 8:
        return safetensors.read  # first: a header of 640 bytes begins with 80 02, as a pickle does
    for magic, reader in _MAGIC:
        if head.startswith(magic):
            return reader
    if torch_legacy.begins(head):
        return torch_legacy.read
    if head[:1] == b"{" and b"}\n" + npy.MAGIC in source.upto(0, npy.HEADER_READ):
        return npy.read
    if head[:1] == b"\x80" and len(head) > 1 and 2 <= head[1] <= 5:
        return torch_file.read_bare
    if head[257:262] == b"ustar":
        raise UnreadableError("UNSUPPORTED", "a tar archive (torch 0.1 format or a bundle): not read", source.name)
    what = foreign.of_file(source.name, head)
    if what is not None:
        raise UnreadableError("UNSUPPORTED", foreign.refusal(what), source.name)
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
