"""zarr arrays (one directory each, as Megatron's zarr backend and Orbax write them) and Orbax trees over OCDBT.

Formats: zarr v2 specification (`.zarray`), zarr v3 (`zarr.json`); Orbax `orbax/checkpoint/_src/metadata/tree.py`
(`_METADATA`: tree_metadata with the shape of one written piece). With OCDBT the `.zarray` documents live inside a key-value
store, which tensorstore reads; without it neither shapes nor types are known.
"""

from __future__ import annotations

import importlib
import json
import os
import stat
from math import prod
from typing import Any

from steptime.base.words import counted
from steptime.checkpoint.dtypes import from_numpy, nbytes
from steptime.checkpoint.pickles.values import shape_of
from steptime.checkpoint.roles import STATE_NAMES, is_optimizer_key, optimizer_role
from steptime.checkpoint.scan import Folder, FolderScan
from steptime.checkpoint.stored_records import MAX_ELEMENTS, Section, StoredTensor, UnreadableError

ARRAY_FILES = (".zarray", "zarr.json")
EXTRA = "pip install 'steptime[checkpoint-formats]'"


def sections(scan: FolderScan, folder: Folder, files: list[str]) -> tuple[list[Section], set[str]]:
    """An Orbax tree or a set of zarr arrays in `folder`."""
    present = set(files)
    if "manifest.ocdbt" in present:
        section = Section("Orbax (OCDBT)", "key-value store", folder.rel, files=[folder.named("manifest.ocdbt")])
        try:
            _ocdbt(folder, section)
        except UnreadableError as error:
            section.problems.append(error.problem)
            section.files.clear()
        return [section], present
    section = Section("Orbax (zarr)" if "_METADATA" in present else "zarr", "directory", folder.rel)
    used: set[str] = set()
    for name in ("", *(d for d in files if d.endswith("/"))):
        if (name or present & set(ARRAY_FILES)) and _array(folder, name[:-1], section):
            used.add(name)
    if not section.tensors and "_METADATA" not in present:
        return [], set()
    scan.files_opened += len(section.tensors)
    if "_METADATA" in present:
        _compare(folder, section)
    _committed(folder, section)
    if folder.mapping("metadata.json").get("sharded_backend") == "zarr":
        section.format = "Megatron dist_checkpointing (zarr)"
    section.container = counted(len(section.tensors), "array")
    section.files += [folder.named(name) for name in sorted(used)]
    return [section], used | (present & {"_METADATA", "_sharding", "array_metadatas/", "d/", *ARRAY_FILES})


def _array(folder: Folder, name: str, section: Section) -> bool:
    """Record the array in sub-directory `name` ("" for the folder itself), if it is one."""
    for file in ARRAY_FILES:
        document = folder.mapping(f"{name}/{file}" if name else file)
        if "shape" in document:
            label = name or folder.rel.rpartition("/")[2] or "array"
            return _record(section, label, document, folder.named(name))
    return False


def _record(section: Section, name: str, document: dict[str, Any], file: str) -> bool:
    shape = shape_of(document.get("shape"))
    dtype = document.get("dtype", document.get("data_type"))
    if shape is None or prod(shape) >= MAX_ELEMENTS or not isinstance(dtype, str):
        section.problem("INVALID_HEADER", f"array {name}: shape or dtype is not valid", file, name)
        return False
    dtype = from_numpy(dtype)
    parts = name.split(".", 64)
    role = ""
    if any(map(is_optimizer_key, parts)) or not {"exp_avg", "exp_avg_sq", "mu", "nu"}.isdisjoint(parts):
        role = optimizer_role(parts)
    elif parts[0] in ("params", "model"):
        role, name = "model", ".".join(parts[1:]) or name
    elif (len(parts) == 1 and parts[0] in STATE_NAMES) or "rngs" in parts:  # Flax's modules keep their generators
        role = "other"
    section.tensors.append(StoredTensor(name, shape, dtype, nbytes(shape, dtype) or 0, file, role))
    return True


def _compare(folder: Folder, section: Section) -> None:
    """Every leaf of `_METADATA` must have its array."""
    known = {tensor.file.rpartition("/")[2] for tensor in section.tensors}
    for name in _leaves(folder):
        if name not in known:
            section.problem("MISSING_TENSOR", f"array {name} of _METADATA is missing", folder.named(name), name)


def _leaves(folder: Folder) -> dict[str, Any]:
    """{name: written shape or None} of the tree metadata."""
    tree = folder.mapping("_METADATA").get("tree_metadata")
    found: dict[str, Any] = {}
    for entry in tree.values() if isinstance(tree, dict) else ():
        try:
            name = ".".join(str(part["key"]) for part in entry["key_metadata"])
            value = entry["value_metadata"]
            if value.get("value_type") not in ("None", "Dict", "List", "Tuple"):
                found[name] = shape_of(value.get("write_shape"))
        except (KeyError, TypeError, AttributeError):
            continue
    return found


def _committed(folder: Folder, section: Section) -> None:
    times = folder.mapping("_CHECKPOINT_METADATA")
    if times.get("init_timestamp_nsecs") and not times.get("commit_timestamp_nsecs"):
        message = "no commit time in _CHECKPOINT_METADATA: the save did not finish"
        section.problem("UNCOMMITTED", message, folder.rel or None)


def _ocdbt(folder: Folder, section: Section) -> None:
    _committed(folder, section)
    try:
        tensorstore = importlib.import_module("tensorstore")
    except ImportError:
        message = f"{len(_leaves(folder))} arrays in an OCDBT store: their shapes and types need tensorstore, {EXTRA}"
        raise UnreadableError("MISSING_EXTRA", message, section.files[0]) from None
    odd = _no_files(folder)
    if odd:  # tensorstore opens whatever lies there, and waits forever at a FIFO
        raise UnreadableError(
            "NOT_A_FILE", "not a regular file in a store, which is read as a whole", folder.named(odd)
        )
    try:
        base = f"file://{os.path.abspath(folder.path)}/"  # noqa: PTH100 - a str path stays a str
        store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
        keys = [key.decode("utf-8", "replace") for key in store.list().result()]
        for key in keys:
            if key.endswith(ARRAY_FILES):
                document = json.loads(bytes(store.read(key).result().value))
                _record(section, key.rpartition("/")[0], document, folder.named("manifest.ocdbt"))
    except (ValueError, OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0][:120]
        raise UnreadableError("INVALID_HEADER", f"tensorstore cannot read it: {reason}", section.files[0]) from None
    stored, named = len(section.tensors), len(_leaves(folder))
    if named > stored:
        message = f"_METADATA names {named} arrays, the store has {stored}"
        section.problem("MISSING_TENSOR", message, folder.named("_METADATA"))


def _no_files(folder: Folder) -> str | None:
    """The first thing below a store that is neither file nor directory; links count as their target."""
    for path, _, names in os.walk(folder.path):
        for name in names:
            try:
                mode = os.stat(os.path.join(path, name)).st_mode  # noqa: PTH116, PTH118 - thousands of files
            except OSError:
                continue
            if not stat.S_ISREG(mode):
                return os.path.relpath(os.path.join(path, name), folder.path)  # noqa: PTH118
    return None
