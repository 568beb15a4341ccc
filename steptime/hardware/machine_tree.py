"""A machine's file as plain data: figures without their sources, changed by dotted key."""

from __future__ import annotations

from typing import Any

from steptime.base.config import ConfigError, ConfigProblem


def plain_tree(node: Any, path: str, provenance: dict[str, str]) -> Any:
    """`node` without its sources, which are moved to `provenance` under their dotted path.

    A shipped figure may also name the kind of its source in one word, `basis` (docs/machines.md); only tests read it.
    """
    if isinstance(node, list):
        return [plain_tree(item, f"{path}.{i}", provenance) for i, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    if node.keys() - {"basis"} == {"value", "source"}:
        provenance[path] = str(node["source"])
        return node["value"]
    plain = {}
    for key, value in node.items():
        if key in {"source", "provenance"} and isinstance(value, str):
            provenance[path] = value
        elif key == "provenance" and isinstance(value, dict):
            provenance.update((str(at), str(source)) for at, source in value.items())
        else:
            plain[key] = plain_tree(value, f"{path}.{key}" if path else str(key), provenance)
    return plain


def put_figure(plain: dict[str, Any], key: str, value: object) -> None:
    """Set `value` at a dotted key; the later validation reports unknown keys."""
    node: Any = plain
    parts, at = key.split("."), f"hardware.overrides.{key}"
    for depth, part in enumerate(parts):
        if isinstance(node, list) and not (part.isdecimal() and int(part) < len(node)):
            valid = ", ".join(map(str, range(len(node))))
            raise ConfigError(ConfigProblem(f"{at}: {part!r} is not a valid index; valid: {valid}", at))
        if not isinstance(node, dict | list):
            line = f"{at}: {'.'.join(parts[:depth])} is a single value and has no keys"
            raise ConfigError(ConfigProblem(line, at))
        step: Any = int(part) if isinstance(node, list) else part
        if depth == len(parts) - 1:
            node[step] = value
        else:
            node = node.setdefault(step, {}) if isinstance(node, dict) else node[step]
