"""The JSON document of a summary: schema summarize-ckpt/1, keys stable, integers exact, no NaN."""

from __future__ import annotations

from math import isfinite
from typing import Any

from steptime.checkpoint.inventory import Inventory
from steptime.checkpoint.stored_records import Problem, Section, StoredTensor
from steptime.checkpoint.tree import Node

SCHEMA = "summarize-ckpt/1"
PARALLEL_KEYS = ("tp", "pp", "ep", "vpp", "dp", "source", "agrees_with_args")


def document(summary: Inventory, tensors: list[StoredTensor] | None) -> dict[str, Any]:
    """Everything in the summary as plain values; `tensors` is listed only when asked for."""
    main = summary.counted[0] if summary.counted else None
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "path": summary.path,
        "format": main.format if main else None,
        "container": main.container if main else None,
        "complete": summary.complete,
        "step": summary.step,
        "id": summary.id if main else None,
        "totals": summary.totals,
        "by_dtype": summary.by_dtype,
        "by_role": summary.by_role,
        "quantization": _quantization(summary),
        "adapter": summary.adapter,
        "tree": [_node(child) for child in summary.tree.children.values()],
        "parallelism": parallelism(main),
        "ranks": main.ranks if main else [],
        "architecture": summary.architecture,
        "models": [model._asdict() for model in summary.models],
        "pickle": pickles(summary),
        "sections": [_section(section) for section in summary.sections],
        "other_iterations": summary.others,
        "problems": [problem(item) for item in summary.all_problems],
        "io": {
            "files_opened": summary.io.files_opened,
            "bytes_read": summary.io.bytes_read,
            "seconds": round(summary.io.seconds, 6),
        },
        "exit_code": summary.exit_code,
    }
    if tensors is not None:
        found["tensors"] = [tensor(item) for item in tensors]
    return found


def _quantization(summary: Inventory) -> dict[str, Any] | None:
    """Parameters before quantization and what was quantized how; null where nothing was."""
    rows = summary.restored.rows
    if not rows:
        return None
    return {"params": summary.restored.params, "weights": [row._asdict() for row in rows]}


def _node(node: Node) -> dict[str, Any]:
    found: dict[str, Any] = {"name": node.name, "repeat": node.repeat, "params": node.params, "bytes": node.nbytes}
    if node.shape is not None:
        found |= {"shape": list(node.shape), "dtype": node.dtype}
    return found | {"children": [_node(child) for child in node.children.values()]}


def tensor(item: StoredTensor) -> dict[str, Any]:
    """One stored piece."""
    rank = item.rank or {}
    return {
        "name": item.name, "role": item.role or None, "shape": item.shape, "dtype": item.dtype, "bytes": item.nbytes,
        "stored_in": item.file, "storage": item.storage, "alias_of": item.alias_of, "global_shape": item.global_shape,
        "shard": {"offsets": item.offsets, "tp": rank.get("tp"), "pp": rank.get("pp"), "dp": rank.get("dp")},
        "note": item.note or None,
    }  # fmt: skip


def parallelism(section: Section | None) -> dict[str, Any]:
    """The degrees, null where the files do not state them."""
    known = section.parallelism if section else {}
    return {key: known.get(key) for key in PARALLEL_KEYS}


def pickles(summary: Inventory) -> dict[str, Any]:
    """Globals of all streams together. `weights_only_loadable` is null when torch.load reads none of the files."""
    facts = [item for section in summary.sections for item in section.pickles]
    torch_files = [item for item in facts if item.torch_file]
    dangers = [danger for item in facts for danger in item.dangerous]
    return {
        "globals": sorted({ref for item in facts for ref in item.refs}),
        "dangerous": [
            {"global": danger.path, "in": danger.where, "byte": danger.at, "arguments": danger.argc}
            for danger in dangers
        ],
        "needs": sorted({need for item in facts for need in item.needs}),
        "weights_only_loadable": not any(item.refused for item in torch_files) if torch_files else None,
        "refused_because": sorted({reason for item in torch_files for reason in item.refused}),
        "executed": False,
    }


def plain(value: Any) -> Any:
    """Metadata of a file, with infinities and NaN as text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    known = type(value) in (str, int, bool, type(None)) or (type(value) is float and isfinite(value))
    return value if known else str(value)


def _section(section: Section) -> dict[str, Any]:
    return {
        "format": section.format,
        "container": section.container,
        "path": section.path,
        "files": len(section.files),
        "tensors": len(section.tensors),
        "file_bytes": section.nbytes,
        "step": section.facts.get("step"),
        "same_as": section.same_as,
        "notes": section.notes,
        "args": plain(section.facts.get("args")),
        "metadata": plain(section.facts.get("metadata") or section.facts.get("gguf")),
    }


def problem(item: Problem) -> dict[str, Any]:
    """One problem."""
    return {key: getattr(item, key) for key in ("code", "severity", "file", "tensor", "message")}
