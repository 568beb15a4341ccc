"""`summarize_checkpoint(path)`, the entry point for Python and for the command, and the `Summary` it returns."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from typing import Any, ClassVar

from steptime.base.collector import without_collector
from steptime.base.words import counted
from steptime.checkpoint import directory, jsonable
from steptime.checkpoint.inventory import IO, Inventory
from steptime.checkpoint.layouts import ranks, single
from steptime.checkpoint.scan import Folder, FolderScan
from steptime.checkpoint.source import unreadable
from steptime.checkpoint.stored_records import Contents, StoredTensor, UnreadableError


class Summary(Inventory):
    """What `summarize_checkpoint` returns: an `Inventory` with a JSON document and a notebook table."""

    draw: ClassVar[Callable[..., str] | None] = None
    """Draws the table; set by `steptime.report`."""

    def to_dict(self, tensors: list[StoredTensor] | None = None) -> dict[str, Any]:
        """The `--json` document (schema summarize-ckpt/1), with the listed `tensors`."""
        return jsonable.document(self, tensors)

    def __repr__(self) -> str:
        name = self.counted[0].format if self.counted else "nothing"
        counts = f"{counted(self.restored.params, 'parameter')}, {counted(len(self.all_problems), 'problem')}"
        return f"<Summary of {self.path!r}: {name}, {counts}>"

    def _repr_html_(self) -> str | None:
        draw = type(self).draw
        return draw(self) if draw else None


def summarize_checkpoint(
    path: str | os.PathLike[str],
    *,
    everything: bool = False,
    strict: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Summary:
    """Summarize a checkpoint from headers and metadata only. No tensor data is read and no code in it is run.

    `path` is a file or a directory; with `everything` all saves of a directory are read, not only the newest.
    `progress` is called with (files done, files in this set). Never raises for bad input: a path that cannot be summarized gives
    a `Summary` without sections, with `exit_code` 2 and the reason as a problem.
    """
    start = time.perf_counter()
    name = os.fspath(path)
    scan = FolderScan(everything, progress)
    with without_collector():
        try:
            summary = _summarize(scan, name)
        except UnreadableError as error:
            summary = Summary(name, [], [error.problem])
    summary.strict = strict
    summary.io = IO(scan.files_opened, scan.bytes_read, time.perf_counter() - start)
    return summary


def _summarize(scan: FolderScan, path: str) -> Summary:
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 - a str path stays a str
    except (OSError, ValueError) as error:
        raise unreadable(error, path) from None
    if stat.S_ISDIR(mode):
        return Summary(path, *directory.read(scan, path))
    head, tail = os.path.split(path)
    if tail == ".metadata" or tail.endswith((".index.json", ".distcp")):  # these speak for the directory they are in
        return Summary(path, *directory.read(scan, head or "."))
    folder = Folder(head or ".", "")
    (result,) = scan.read(folder, [tail])
    if not isinstance(result, Contents):
        raise result
    section = single.section(result)
    ranks.one_slice(scan, section, folder.path, tail)
    for file, fact in directory.CONFIGS.items():
        if config := folder.mapping(file):
            section.facts.setdefault(fact, config)
    return Summary(path, [section])
