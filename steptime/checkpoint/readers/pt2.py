"""torch.export .pt2 archives: weights are described by JSON next to their raw bytes.

Layout: torch 2.13 `torch/export/pt2_archive/_package.py` and `constants.py` (data/weights/model_weights_config.json
maps a name to its path and a tensor_meta with sizes, dtype number and strides; `torch/_export/serde/schema.py` ScalarType).
"""

from __future__ import annotations

import json
from typing import Any

from steptime.checkpoint import zipdir
from steptime.checkpoint.dtypes import TORCH_EXPORT, nbytes
from steptime.checkpoint.source import Source
from steptime.checkpoint.stored_records import Contents, StoredTensor
from steptime.checkpoint.zipdir import ZipDirectory

MAX_CONFIG = 64 << 20


def read(source: Source, directory: ZipDirectory) -> Contents:
    """Read the weights and constants of an exported program. Raises `UnreadableError`."""
    contents = Contents(source.name, "torch.export pt2", nbytes=source.size)
    for entry in directory.entries.values():
        if not entry.name.endswith(("model_weights_config.json", "model_constants_config.json")):
            continue
        raw = zipdir.content(source, entry, MAX_CONFIG)
        try:
            config = json.loads(raw)["config"]
            for name, payload in config.items():
                _payload(contents, name, payload, entry.name.rsplit("/", 1)[0], directory)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            contents.problem("INVALID_HEADER", f"{entry.name} is not the JSON torch.export writes")
    return contents


def _payload(contents: Contents, name: str, payload: dict[str, Any], folder: str, directory: ZipDirectory) -> None:
    meta = payload.get("tensor_meta")
    if not isinstance(meta, dict):
        return
    shape = tuple(int(size["as_int"]) for size in meta["sizes"])
    dtype = TORCH_EXPORT.get(meta["dtype"], f"ScalarType {meta['dtype']}")
    entry = directory.entries.get(f"{folder}/{payload['path_name']}")
    size = nbytes(shape, dtype) or 0
    if entry is None:
        contents.problem("STORAGE_MISSING", f"tensor {name}: {payload['path_name']} is not in the archive", name)
    role = "model" if payload.get("is_param", True) else ""
    stored = entry.size if entry else size
    path = str(payload["path_name"])
    tensor = StoredTensor(name, shape, dtype, size, contents.file, role, path, storage_nbytes=stored, extent=size)
    contents.tensors.append(tensor)
