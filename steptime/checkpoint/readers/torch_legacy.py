"""torch.save of torch before 1.6: magic, protocol, system info, object and storage keys as five pickles, then raw storages.

Layout: torch 2.13 `torch/serialization.py` `_legacy_save` and `_legacy_load`: after the fifth pickle each storage is
an int64 element count followed by its bytes.
"""

from __future__ import annotations

from steptime.checkpoint.pickles.interpreter import MalformedError, PickleInterpreter
from steptime.checkpoint.pickles.pickle_verdict import judge
from steptime.checkpoint.pickles.values import CallRecord, Pairs, mapping
from steptime.checkpoint.readers.torch_file import collect, first_streams, note_dangers
from steptime.checkpoint.records import Contents, UnreadableError
from steptime.checkpoint.source import Source

MAGIC = 0x1950A86A20F9469CFC6C  # torch.serialization.MAGIC_NUMBER, pickled by itself in front of the file


def begins(head: bytes) -> bool:
    """Whether a file with these first bytes is a legacy torch file, of any pickle protocol."""
    if head[:1] not in (b"\x80", b"L"):
        return False
    try:
        return bool(PickleInterpreter(head).run() == MAGIC)
    except MalformedError:
        return False


def read(source: Source) -> Contents:
    """Read a legacy file up to its fifth pickle. Raises `UnreadableError` if the object pickle is damaged."""
    contents = Contents(source.name, "torch legacy", nbytes=source.size)
    found = first_streams(source, 0, 5, "the file")
    values = found.roots
    if len(values) < 4:
        raise UnreadableError("MALFORMED_PICKLE", str(found.error), source.name)
    note_dangers(contents, judge(found))
    collect(contents, values[3], [])
    contents.facts["root"] = values[3]
    info = values[2]
    if isinstance(info, (CallRecord, Pairs)) and mapping(info).get("little_endian") is False:
        contents.problem("BIG_ENDIAN", "written on a big-endian machine", severity="warning")
    storages = {t.storage: t.storage_nbytes for t in contents.tensors if t.storage is not None}
    keys = values[4] if len(values) > 4 else None
    need = found.end + sum(8 + size for size in storages.values())
    if keys is None or source.size < need:
        contents.problem("TRUNCATED", f"truncated: {source.size:,} bytes present, {need:,} expected")
    elif type(keys) is list and not set(storages) <= {str(k) for k in keys}:
        contents.problem("STORAGE_MISSING", "a storage of the object is not in the file's list of storages")
    elif type(keys) is list and len(keys) == len(storages) and source.size > need:
        contents.problem("TRAILING_BYTES", f"{source.size - need:,} bytes after the last storage", severity="warning")
    return contents
