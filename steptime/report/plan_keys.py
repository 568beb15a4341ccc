"""Every key of a plan: type of value, default, meaning, example. One text for all uses."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_FILE = Path(__file__).parents[1] / "data" / "keys.yaml"


class Key(NamedTuple):
    """One key of a plan."""

    path: str
    kind: str
    """The type of its values, or the valid words."""
    default: str
    """"required", or the value that applies where it is not set."""
    unit: str
    means: str
    example: str


@cache
def texts() -> dict[str, dict[str, Any]]:
    """Entries of data/keys.yaml for each key: meaning, unit, example, and a default that is not a single value."""
    found: dict[str, dict[str, Any]] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return {path: text for path, text in found.items() if path != "source"}


def keys() -> list[Key]:
    """All keys, section by section, in the order of the classes."""
    from steptime.job.job import Job

    document = Job.model_json_schema()
    return [_key(path, node, document, required=required) for path, node, required in walk(document, document, "")]


def walk(node: Mapping[str, Any], document: Mapping[str, Any], at: str) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Dotted path, schema and whether it is required, of every key below a node; a list's items under `path[]`."""
    required = node.get("required", ())
    for name, item in node.get("properties", {}).items():
        path = f"{at}{name}"
        if path == "hardware.node_type" or path.startswith("performance.calibration."):
            yield path, item, name in required
            continue
        yield path, item, name in required
        for inner, lead in _inside(item, document):
            yield from walk(inner, document, f"{path}{lead}.")


def _inside(item: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The mappings among the valid values, with references and unions resolved."""
    for arm in [item, *item.get("anyOf", ()), *item.get("allOf", ())]:
        if "$ref" in arm:
            inner = document["$defs"][arm["$ref"].rpartition("/")[2]]
            if "properties" in inner:
                yield inner, ""
        elif arm.get("type") == "array" and "$ref" in arm.get("items", {}):
            yield document["$defs"][arm["items"]["$ref"].rpartition("/")[2]], "[]"


def _key(path: str, node: dict[str, Any], document: dict[str, Any], *, required: bool) -> Key:
    text = texts().get(path, {})
    default = "required" if required else _value(text.get("default", _default(node.get("default"))))
    kind = str(text.get("type", _kind(node, document)))
    return Key(path, kind, default, text.get("unit", ""), text.get("means", ""), _value(text.get("example", "")))


def _default(value: Any) -> str:
    if value is None:
        return "not set"
    return _value(value)


def _value(value: Any) -> str:
    """A value in a plan's syntax."""
    if isinstance(value, str):
        return value
    return str(yaml.safe_dump(value, default_flow_style=True, width=200)).removesuffix("\n...\n").strip()


_KINDS = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "object": "mapping",
}


_PLURALS = {"whole number": "whole numbers", "number": "numbers", "mapping": "mappings"}


def _kind(node: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    """A schema in words."""
    if "$ref" in node:
        return _kind(document["$defs"][node["$ref"].rpartition("/")[2]], document)
    if "anyOf" in node:
        arms = [_kind(arm, document) for arm in node["anyOf"] if arm.get("type") != "null"]
        return " or ".join(dict.fromkeys(arms))
    if "enum" in node:
        return ", ".join(map(str, node["enum"]))
    if "const" in node:
        return str(node["const"])
    if node.get("type") == "array":
        items = _kind(node.get("items", {}), document)
        return f"list of {_PLURALS.get(items, items)}"
    word = _KINDS.get(str(node.get("type")), "any value")
    bounds = [
        f"{said} {node[key]:g}"
        for key, said in (
            ("minimum", "at least"),
            ("exclusiveMinimum", "above"),
            ("maximum", "at most"),
            ("exclusiveMaximum", "below"),
        )
        if key in node
    ]
    return ", ".join([word, *bounds])
