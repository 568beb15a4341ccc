"""torch.save files: the zip container (torch 1.6 and later), the legacy stream, and bare pickles.

Container layout: torch 2.13 `torch/serialization.py` (_save, _legacy_save, _load) and `caffe2/serialize/inline_container.cc`.
Only the zip directory and `data.pkl` are read; storages are known by the sizes of their entries. The legacy stream has magic,
protocol, system info, object and storage keys as five pickles; each storage after them is an int64 element count and its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from steptime.checkpoint import roles, zipdir
from steptime.checkpoint.pickles import object_graph, pickle_streams
from steptime.checkpoint.pickles.interpreter import MalformedError, PickleInterpreter
from steptime.checkpoint.pickles.pickle_streams import Streams
from steptime.checkpoint.pickles.pickle_verdict import PickleFacts, judge
from steptime.checkpoint.pickles.values import CallRecord, Pairs, mapping
from steptime.checkpoint.source import Source
from steptime.checkpoint.stored_records import Contents, StoredTensor, UnreadableError

MAX_PICKLE = 256 << 20  # bytes; a 31 MB stream already describes 217,600 chunks
FIRST_READ = 1 << 16
MAX_NAMES = 8  # of globals in one line


def read_zip(source: Source, directory: zipdir.ZipDirectory) -> Contents:
    """Read a torch zip archive. Raises `UnreadableError` if it holds no readable pickle."""
    contents = Contents(source.name, "torch zip", nbytes=source.size)
    names = [name for name in directory.entries if name == "data.pkl" or name.endswith("/data.pkl")]
    if not names:
        raise UnreadableError("NOT_TORCH", "a zip archive without data.pkl", source.name)
    name = min(names, key=lambda n: directory.entries[n].header)
    if len(names) > 1 or any(n.endswith("data.pkl") for n in directory.duplicates):
        contents.problem("TWO_PICKLES", f"two data.pkl entries: a loader may read another than {name}")
    elif directory.duplicates:
        contents.problem("DUPLICATE_ENTRY", f"{len(directory.duplicates)} zip entries occur twice")
    if directory.shift:
        contents.problem("PREFIX_BYTES", f"{directory.shift} bytes precede the archive", severity="warning")
    entry = directory.entries[name]
    data = zipdir.content(source, entry, MAX_PICKLE)
    interpret(contents, pickle_streams.read(data, "data.pkl"), *_other_pickles(contents, source, directory, name))
    archive = name.removesuffix("data.pkl")
    _check_storages(contents, directory, archive)
    if f"{archive}constants.pkl" in directory.entries:
        contents.format = "TorchScript"
    if any(entry_name.startswith(("/", "../")) or "/../" in entry_name for entry_name in directory.entries):
        contents.problem("PATH_ESCAPE", "a zip entry points outside the archive; nothing is extracted")
    return contents


def _other_pickles(contents: Contents, source: Source, directory: zipdir.ZipDirectory, name: str) -> Iterator[Streams]:
    """Other pickles of an archive: constants, bytecode, debug symbols, or anything added to it."""
    left = MAX_PICKLE
    for entry in directory.entries.values():
        if entry.name == name or not entry.name.endswith((".pkl", ".debug_pkl", ".pickle")):
            continue
        base = entry.name.rpartition("/")[2]
        try:
            data = zipdir.content(source, entry, left)
        except UnreadableError as error:
            contents.problems.append(error.problem)
            continue
        left -= entry.size
        yield pickle_streams.read(data, base)


def interpret(contents: Contents, found: Streams, *others: Streams, torch_file: bool = True) -> Any:
    """Judge all streams, collect the tensors of `found` and return its first value. Raises `UnreadableError`."""
    note_dangers(contents, judge(found, *others, torch_file=torch_file), found)
    for number, root in enumerate(found.roots):
        collect(contents, root, [str(number)] if number else [])
    contents.facts["root"] = found.root
    return found.root


def note_dangers(contents: Contents, facts: PickleFacts, found: Streams | None = None) -> None:
    """Add a problem for each global that would run code in a plain load, and one for all globals of unknown code.

    Raises `UnreadableError` if the first pickle of `found` is incomplete.
    """
    contents.pickle = facts
    if found is not None and not found.roots:
        message = f"{found.where}: {found.error}"
        if facts.dangerous:  # a stream that breaks off after a call is still run up to there by a loader
            message += "; earlier: " + facts.dangerous[0].text()
        raise UnreadableError("MALFORMED_PICKLE", message, contents.file)
    for danger in facts.dangerous:
        contents.problem("DANGEROUS_PICKLE", danger.text())
    if facts.unknown:
        more = f" and {len(facts.unknown) - MAX_NAMES} more" if len(facts.unknown) > MAX_NAMES else ""
        message = f"a plain load imports code of other projects: {', '.join(facts.unknown[:MAX_NAMES])}{more}"
        contents.problem("UNKNOWN_GLOBAL", message, severity="warning")


def collect(contents: Contents, root: Any, below: list[str]) -> None:
    """Collect the tensors below `root` with names, roles and file; every path starts with `below`."""
    found = list(object_graph.tensors(root))
    paths = roles.below_wrapper([[*below, *keys] or ["tensor"] for keys, _ in found])  # the file may be one bare tensor
    tops = {path[0] for path in paths if len(path) > 1}
    file_role = roles.of_file(contents.file)
    for path, (_, tensor) in zip(paths, found, strict=True):
        if tensor.note == "too deep":
            message = f"nesting beyond {object_graph.MAX_DEPTH} levels was skipped"
            contents.problem("TOO_DEEP", message, severity="warning")
            continue
        tensor.file = contents.file
        tensor.role, tensor.name = roles.role_and_name(path, tops, file_role)
        if path[0][5:].isdecimal() and path[0].startswith("model"):  # Megatron: model0, model1, ... per virtual chunk
            tensor.rank = {"chunk": int(path[0][5:][:9])}
        if tensor.note == "numpy" and not tensor.role and tops:
            tensor.role = "other"
        contents.tensors.append(tensor)


def _check_storages(contents: Contents, directory: zipdir.ZipDirectory, root: str) -> None:
    """Each storage a tensor names must be in the archive, large enough for what it claims and for the tensor's extent."""
    told: set[str] = set()
    for tensor in contents.tensors:
        if tensor.storage is None:
            continue
        entry = directory.entries.get(f"{root}data/{tensor.storage}")
        problem = _storage_problem(tensor, entry)
        if problem and tensor.storage not in told:
            told.add(tensor.storage)
            contents.problem(*problem, tensor=tensor.name)
        if entry is not None:
            tensor.storage_nbytes = entry.size
            tensor.checksum = entry.crc or None  # 0 where the writer was told to leave it out


def _storage_problem(tensor: StoredTensor, entry: zipdir.ZipEntry | None) -> tuple[str, str] | None:
    if entry is None:
        return "STORAGE_MISSING", f"tensor {tensor.name}: storage {tensor.storage} is not in the archive"
    need = max(tensor.storage_nbytes, tensor.start + tensor.extent)
    if entry.size < need or tensor.start < 0 or tensor.extent < 0:
        message = f"tensor {tensor.name} needs {need} bytes, storage {tensor.storage} has {entry.size}"
        return "STORAGE_SMALL", message
    if tensor.start + tensor.extent > tensor.storage_nbytes:
        message = f"tensor {tensor.name} reaches byte {need} of a storage declared with {tensor.storage_nbytes}"
        return "EXTENT", message
    return None


def first_streams(source: Source, at: int, most: int, where: str) -> Streams:
    """The first `most` pickles from byte `at`, or as many as there are; the read size grows until they fit."""
    size = FIRST_READ
    while True:
        data = source.upto(at, size)
        found = pickle_streams.read(data, where, most=most)
        if len(found.roots) == most or len(data) < size or size >= MAX_PICKLE:
            return found
        size *= 16


def salvage(source: Source) -> Contents:
    """List the tensors of a truncated download: the zip directory is missing, but `data.pkl` is the first member."""
    contents = Contents(source.name, "torch zip", nbytes=source.size)
    first = zipdir.first_member(source)
    if first is None or not first[0].endswith("data.pkl"):
        raise UnreadableError("TRUNCATED", "a zip archive truncated before its data.pkl", source.name)
    at = first[1]
    found = first_streams(source, at, 1, "data.pkl")
    root = found.root
    if found.error is not None:
        root = found.states[0].salvage() if found.states else None
        contents.problem("TRUNCATED", f"truncated inside data.pkl after {source.size - at} bytes ({found.error})")
    note_dangers(contents, judge(found))
    collect(contents, root, [])
    if not contents.tensors:
        raise UnreadableError("TRUNCATED", "a zip archive truncated before its first tensor record", source.name)
    expected = at + sum({t.storage: t.storage_nbytes for t in contents.tensors if t.storage}.values())
    contents.facts |= {"root": root, "expected_bytes": expected}
    if not contents.problems or contents.problems[-1].code != "TRUNCATED":
        message = f"truncated: {source.size:,} bytes present, at least {expected:,} expected (no zip directory)"
        contents.problem("TRUNCATED", message)
    return contents


def whole_file(source: Source) -> bytes:
    """The bytes of a file that is one or several pickles and nothing else. Raises `UnreadableError` (TOO_LARGE)."""
    if source.size > MAX_PICKLE:
        raise UnreadableError("TOO_LARGE", f"{source.size} bytes; at most {MAX_PICKLE} are interpreted", source.name)
    return source.exactly(0, source.size)


def read_bare(source: Source) -> Contents:
    """Read a plain pickle file (.pkl, old training_args.bin, optimizer dumps). Raises `UnreadableError`."""
    contents = Contents(source.name, "pickle", nbytes=source.size)
    found = pickle_streams.read(whole_file(source), "the pickle")
    interpret(contents, found, torch_file=False)
    if found.end < source.size:
        message = f"{source.size - found.end} bytes follow the pickle's STOP at byte {found.end}"
        contents.problem("TRAILING_BYTES", message)
    if len(found.roots) > 1:
        message = f"{len(found.roots)} pickles in sequence: one pickle.load reads only the first"
        contents.problem("SEVERAL_PICKLES", message, severity="warning")
    return contents


MAGIC = 0x1950A86A20F9469CFC6C  # torch.serialization.MAGIC_NUMBER, pickled by itself in front of the file


def is_legacy(head: bytes) -> bool:
    """Whether a file with these first bytes is a legacy torch file, of any pickle protocol."""
    if head[:1] not in (b"\x80", b"L"):
        return False
    try:
        return bool(PickleInterpreter(head).run() == MAGIC)
    except MalformedError:
        return False


def read_legacy(source: Source) -> Contents:
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
