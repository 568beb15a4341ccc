"""torch.save of torch before 1.6: magic, protocol, system info, object and storage keys as five pickles, then raw storages.

Layout: torch 2.13 `torch/serialization.py` `_legacy_save` and `_legacy_load`: after the fifth pickle each storage is
an int64 element count followed by its bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.checkpoint.pickles.interpreter import MalformedError, PickleInterpreter
from steptime.checkpoint.pickles.pickle_verdict import judge
from steptime.checkpoint.pickles.values import CallRecord, Pairs, mapping
from steptime.checkpoint.readers.torch_file import FIRST_READ, MAX_PICKLE, collect, note_dangers
from steptime.checkpoint.records import Contents, UnreadableError

if TYPE_CHECKING:
    from typing import Any

    from steptime.checkpoint.source import Source

MAGIC = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")


def read(source: Source) -> Contents:
    """A legacy file, stopping after its fifth pickle. Raises `UnreadableError` when the object pickle is damaged."""
    contents = Contents(source.name, "torch legacy", nbytes=source.size)
    machine, values = _streams(source)
    root, keys = values[3], values[4] if len(values) > 4 else None
    contents.pickle = judge(machine, "the object pickle")
    note_dangers(contents, contents.pickle)
    collect(contents, root)
    contents.facts["root"] = root
    info = values[2]
    if isinstance(info, (CallRecord, Pairs)) and mapping(info).get("little_endian") is False:
        contents.problem("BIG_ENDIAN", "written on a big-endian machine", severity="warning")
    storages = {t.storage: t.storage_nbytes for t in contents.tensors if t.storage is not None}
    expected = values[-1] if len(values) > 5 else 0
    need = expected + sum(8 + size for size in storages.values())
    if keys is None or source.size < need:
        message = f"truncated: {source.size:,} bytes present, {need:,} expected"
        contents.problem("TRUNCATED", message)
    elif type(keys) is list and not set(storages) <= {str(k) for k in keys}:
        contents.problem("STORAGE_MISSING", "a storage the object names is not in the file's list of storages")
    return contents


def _streams(source: Source) -> tuple[PickleInterpreter, list[Any]]:
    """The object's machine and the five values, with the byte after them last; fewer when the file ends earlier."""
    size = FIRST_READ
    while True:
        data = source.upto(0, size)
        values: list[Any] = []
        at = 0
        kept: PickleInterpreter | None = None
        try:
            for number in range(5):
                machine = PickleInterpreter(data, at)
                kept = machine if number == 3 else kept
                values.append(machine.run())
                at = machine.end
        except MalformedError as error:
            if len(data) == size < MAX_PICKLE:
                size *= 16
                continue
            if len(values) == 4 and kept is not None:
                return kept, values
            raise UnreadableError("MALFORMED_PICKLE", str(error), source.name) from None
        assert kept is not None
        return kept, [*values, at]
