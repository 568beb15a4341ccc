"""Reads many files: one by one on fast storage, with a thread pool where opening a file mostly waits."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from steptime.checkpoint.detect import read_file
from steptime.checkpoint.layouts.single import facts_of
from steptime.checkpoint.source import Source, unreadable
from steptime.checkpoint.stored_records import Contents, Problem, Section, UnreadableError

T = TypeVar("T")
THREADS = 16
PROBE = 4  # files read in order before deciding
WAIT_S = 2e-3  # mean time a file may keep its reader waiting before threads pay
MAX_DEPTH = 4
MAX_JSON = 4 << 20  # bytes
MAX_ENTRIES = 1_000_000


@dataclass(slots=True)
class Folder:
    """One directory: names of its files and sub-directories (symlinks to files count, to directories do not).

    `rel` is its path below the root of the scan, "" for the root itself.
    """

    path: str
    rel: str
    files: list[str] = field(default_factory=list)
    dirs: list[str] = field(default_factory=list)
    depth: int = 0

    def named(self, file: str) -> str:
        """What `file` is called in reports."""
        return f"{self.rel}/{file}" if self.rel else file

    def inner(self, named: str) -> str:
        """The path below this directory of a file that reports call `named`."""
        return named[len(self.rel) + 1 :] if self.rel else named

    def json(self, file: str) -> Any:
        """The JSON in a file of at most 4 MiB, or None when there is none that can be read."""
        try:
            with Source(self.join(file), self.named(file)) as source:
                return json.loads(source.exactly(0, source.size)) if source.size <= MAX_JSON else None
        except (UnreadableError, ValueError, RecursionError):
            return None

    def mapping(self, file: str) -> dict[str, Any]:
        """The JSON object in a file; empty where there is none that can be read."""
        found = self.json(file)
        return found if isinstance(found, dict) else {}

    def has_name(self, name: str) -> bool:
        """Whether a name stated by a file of this directory is inside it; nothing else is read."""
        return name not in ("", ".", "..") and not any(char in name for char in "/\\\0")

    def join(self, file: str) -> str:
        """Where `file` is."""
        return os.path.join(self.path, file)  # noqa: PTH118 - thousands of joins


def natural(name: str) -> list[tuple[int, int | str]]:
    """Sort key in which file10 comes after file9."""
    parts = re.split(r"([0-9]+)", name)  # every other part is a number
    return [(0, int(part[:30])) if at % 2 else (1, part) for at, part in enumerate(parts)]


@dataclass(slots=True)
class FolderScan:
    """One run over a path: options, progress, counters."""

    everything: bool = False
    progress: Callable[[int, int], None] | None = None
    files_opened: int = 0
    bytes_read: int = 0

    def folder(self, path: str, rel: str = "", depth: int = 0) -> Folder:
        """The directory at `path`. Raises `UnreadableError`."""
        found = Folder(path, rel, depth=depth)
        try:
            with os.scandir(path) as entries:
                for number, entry in enumerate(entries):
                    if number >= MAX_ENTRIES:
                        raise UnreadableError("TOO_MANY", f"more than {MAX_ENTRIES} entries", rel or path)
                    (found.dirs if entry.is_dir(follow_symlinks=False) else found.files).append(entry.name)
        except OSError as error:
            raise unreadable(error, rel or path) from None
        found.files.sort(key=natural)
        found.dirs.sort(key=natural)
        return found

    def below(self, folder: Folder, name: str) -> Folder:
        """A sub-directory of `folder`. Raises `UnreadableError`."""
        return self.folder(folder.join(name), folder.named(name), folder.depth + 1)

    def inside(self, folder: Folder, names: Iterable[str], problems: list[Problem]) -> Iterator[Folder]:
        """Sub-directories of `folder`; those that cannot be read become `problems`."""
        for name in names:
            try:
                yield self.below(folder, name)
            except UnreadableError as error:
                problems.append(error.problem)

    def read(
        self, folder: Folder, files: Iterable[str], keep: Callable[[Contents], Any] | None = None
    ) -> Iterator[Contents | UnreadableError]:
        """What each of `files` holds, in order; an unreadable one comes as its error.

        The pickled object graph of a file is dropped after `keep` has seen it (its result is in facts["kept"]).
        """

        def one(file: str) -> Contents | UnreadableError:
            try:
                contents = read_file(folder.join(file), folder.named(file))
            except UnreadableError as error:
                return error
            if keep is not None:
                contents.facts["kept"] = keep(contents)
            return contents

        names = list(files)
        for done, result in enumerate(self._mapped(one, names), 1):
            self.files_opened += 1
            if isinstance(result, Contents):
                self.bytes_read += result.read
            if self.progress is not None:
                self.progress(done, len(names))
            yield result

    def _mapped(self, one: Callable[[str], T], names: list[str]) -> Iterator[T]:
        """Apply `one` to every name: with threads if the first few names spent more time waiting than working, else in order."""
        start, work = time.perf_counter(), time.thread_time()
        for name in names[:PROBE]:
            yield one(name)
        busy = time.thread_time() - work
        waited = time.perf_counter() - start - busy
        rest = names[PROBE:]
        if waited < max(WAIT_S * PROBE, busy) or len(rest) < PROBE:
            yield from map(one, rest)
            return
        with ThreadPoolExecutor(THREADS) as pool:
            yield from pool.map(one, rest)

    def absorb(
        self, section: Section, folder: Folder, files: Iterable[str], keep: Callable[[Contents], Any] = facts_of
    ) -> list[Contents]:
        """Read `files` into `section`, errors into its problems; what was read comes back.

        The facts that `keep` finds in a file become the section's, unless a file before had them.
        """
        found = []
        for result in self.read(folder, files, keep):
            if isinstance(result, UnreadableError):
                section.problems.append(result.problem)
                section.unread += 1
                continue
            section.absorb(result)
            result.facts.pop("root", None)
            for key, value in (result.facts["kept"] or {}).items():
                section.facts.setdefault(key, value)
            found.append(result)
        return found
