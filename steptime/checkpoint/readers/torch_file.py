"""torch.save files: the zip container (torch 1.6 and later), the legacy stream, and bare pickles.

Container layout: torch 2.13 `torch/serialization.py` (_save, _legacy_save, _load) and `caffe2/serialize/inline_container.cc`.
Only the zip directory and `data.pkl` are read; storages are known by the sizes of their entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptime.checkpoint import roles, zipdir
from steptime.checkpoint.pickles import graph
from steptime.checkpoint.pickles.interpreter import MalformedError, PickleInterpreter
from steptime.checkpoint.pickles.pickle_verdict import judge
from steptime.checkpoint.records import Contents, UnreadableError

if TYPE_CHECKING:
    from steptime.checkpoint.pickles.pickle_verdict import PickleFacts
    from steptime.checkpoint.records import StoredTensor
    from steptime.checkpoint.source import Source, Window

MAX_PICKLE = 256 << 20  # bytes; a 31 MB stream already describes 217,600 chunks
FIRST_READ = 1 << 16


def read_zip(source: Source | Window, directory: zipdir.ZipDirectory) -> Contents:
    """A torch zip archive. Raises `UnreadableError` when it holds no readable pickle."""
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
    if entry.flags & zipdir.ENCRYPTED or entry.method != 0:
        how = "encrypted" if entry.flags & zipdir.ENCRYPTED else "compressed"
        raise UnreadableError("COMPRESSED", f"{name} is {how}; torch writes neither, it is not expanded", source.name)
    data = _pickle_bytes(source, zipdir.data_offset(source, entry), entry.size)
    root = _interpret(contents, data, "data.pkl")
    _check_storages(contents, directory, name[: -len("data.pkl")])
    archive = name[: -len("data.pkl")]
    if f"{archive}constants.pkl" in directory.entries:
        contents.format = "TorchScript"
    if any(entry_name.startswith(("/", "../")) or "/../" in entry_name for entry_name in directory.entries):
        contents.problem("PATH_ESCAPE", "a zip entry points outside the archive; nothing is extracted")
    contents.facts["root"] = root
    return contents


def _pickle_bytes(source: Source | Window, at: int, size: int) -> bytes:
    if size > MAX_PICKLE:
        raise UnreadableError("TOO_LARGE", f"pickle of {size} bytes; at most {MAX_PICKLE} are interpreted", source.name)
    return source.exactly(at, size)


def _interpret(contents: Contents, data: bytes, where: str) -> Any:
    machine = PickleInterpreter(data)
    try:
        root = machine.run()
    except MalformedError as error:
        contents.pickle = judge(machine, where)
        raise _with_danger(UnreadableError("MALFORMED_PICKLE", f"{where}: {error}", contents.file), contents) from None
    contents.pickle = judge(machine, where)
    note_dangers(contents, contents.pickle)
    collect(contents, root)
    return root


def _with_danger(error: UnreadableError, contents: Contents) -> UnreadableError:
    """A stream that breaks off after a call is still run up to there by a loader: say so in the same line."""
    assert contents.pickle is not None
    if contents.pickle.dangerous:
        error.problem.message += "; before that: " + contents.pickle.dangerous[0].text(contents.pickle.where)
    return error


def note_dangers(contents: Contents, facts: PickleFacts) -> None:
    """One problem for each global that runs code on a plain load."""
    for danger in facts.dangerous:
        contents.problem("DANGEROUS_PICKLE", danger.text(facts.where))


def collect(contents: Contents, root: Any) -> None:
    """Fill the tensors with names, roles and file; several findings of one name get a number."""
    found = list(graph.tensors(root))
    tops = {path[0] for path, _ in found if len(path) > 1}
    file_role = roles.of_file(contents.file)
    for keys, tensor in found:
        if tensor.note == "too deep":
            message = f"nesting beyond {graph.MAX_DEPTH} levels was left out"
            contents.problem("TOO_DEEP", message, severity="warning")
            continue
        tensor.file = contents.file
        path = keys or ["tensor"]  # the file is one bare tensor
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


def salvage(source: Source | Window) -> Contents:
    """A download that stopped has no zip directory, but `data.pkl` is its first member: list what it promises."""
    contents = Contents(source.name, "torch zip", nbytes=source.size)
    first = zipdir.first_member(source)
    if first is None or not first[0].endswith("data.pkl"):
        raise UnreadableError("TRUNCATED", "a zip archive cut short before its data.pkl", source.name)
    at = first[1]
    size = FIRST_READ
    while True:
        data = source.upto(at, size)
        machine = PickleInterpreter(data)
        try:
            root = machine.run()
            break
        except MalformedError as error:
            if len(data) == size < MAX_PICKLE:
                size *= 16
                continue
            root = machine.salvage()
            message = f"cut short inside data.pkl after {len(data)} bytes ({error})"
            contents.problem("TRUNCATED", message)
            break
    contents.pickle = judge(machine, "data.pkl")
    note_dangers(contents, contents.pickle)
    collect(contents, root)
    if not contents.tensors:
        raise UnreadableError("TRUNCATED", "a zip archive cut short before its first tensor record", source.name)
    expected = at + sum({t.storage: t.storage_nbytes for t in contents.tensors if t.storage}.values())
    contents.facts |= {"root": root, "expected_bytes": expected}
    if not contents.problems or contents.problems[-1].code != "TRUNCATED":
        message = f"truncated: {source.size:,} bytes present, at least {expected:,} expected (no zip directory)"
        contents.problem("TRUNCATED", message)
    return contents


def read_bare(source: Source | Window, where: str = "the pickle") -> Contents:
    """A plain pickle file (.pkl, training_args.bin of old, optimizer dumps). Raises `UnreadableError`."""
    contents = Contents(source.name, "pickle", nbytes=source.size)
    data = _pickle_bytes(source, 0, source.size)
    machine = PickleInterpreter(data)
    try:
        root = machine.run()
    except MalformedError as error:
        contents.pickle = judge(machine, where, torch_file=False)
        raise _with_danger(UnreadableError("MALFORMED_PICKLE", str(error), source.name), contents) from None
    contents.pickle = judge(machine, where, torch_file=False)
    note_dangers(contents, contents.pickle)
    if machine.end < len(data):
        message = f"{len(data) - machine.end} bytes follow the pickle's STOP at byte {machine.end}"
        contents.problem("TRAILING_BYTES", message)
    collect(contents, root)
    contents.facts["root"] = root
    return contents
