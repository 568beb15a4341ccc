"""Every key of a plan, and its three forms: terminal text, descriptions in a JSON Schema, a plan to start from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

import yaml

from steptime.report.table import Fact, FactList

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
    from steptime.base.json_schema import json_schema
    from steptime.job.job import Job

    document = json_schema(Job)
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


def page(keys: Iterable[Key]) -> list[FactList]:
    """Each key with its facts, for the terminal."""
    found = []
    for key in keys:
        facts = [
            Fact("takes", [key.kind]),
            Fact("unit", [key.unit]),
            Fact("default", [key.default]),
            Fact("means", [key.means]),
            Fact("example", [f"{key.path.rpartition('.')[2]}: {key.example}"]),
        ]
        found.append(FactList(key.path, [fact for fact in facts if fact.lines != [""]]))
    return found


def described(document: dict[str, Any]) -> dict[str, Any]:
    """A JSON Schema of a plan with each key's text as its description, and its example."""
    for path, node, _ in walk(document, document, ""):
        text = texts().get(path)
        if text:
            unit = f" [{text['unit']}]" if text.get("unit") else ""
            node["description"] = text["means"] + unit
            if "example" in text:
                node["examples"] = [text["example"]]
    return document


_WHERE_SET = tuple(
    f"parallelism.{key}" for key in ("layers_per_stage", "embedding_and_loss_count_as_layers", "ep", "etp")
)
_START = (
    "model",
    *(f"parallelism.{key}" for key in ("tp", "pp", "vpp")),
    *_WHERE_SET,
    *(f"parallelism.{key}" for key in ("cp", "sp", "zero_level")),
    *(f"performance.{key}" for key in ("software", "precision", "activation_checkpointing_type", "recompute")),
    *(f"data.{key}" for key in ("gbs", "seqlen", "microbatch_sz")),
    "hardware.node_type",
    *(f"run.{key}" for key in ("tokens", "price_per_device_hour", "mtbf_device_hours", "checkpoint_bytes_per_s")),
)
"""Keys in the order of a new plan; those of `_WHERE_SET`, and recomputation in detail, only where they are set."""


def starter(values: dict[str, Any], keys: Iterable[Key]) -> str:
    """A commented plan: the values given, and the other usual keys as comments with an example.

    `values` maps dotted keys to what they are set to.
    """
    known = {key.path: key for key in keys}
    out = ["# A training plan: 3dtrn FILE reads it. All keys: docs/config.md, or 3dtrn explain --key KEY."]
    section = None
    shown = [path for path in _START if path in values or path not in {*_WHERE_SET, "performance.recompute"}]
    for path in ("devices", *shown):
        top, _, name = path.partition(".")
        key = known[path]
        if top != section:
            section = top
            lead = "" if any(at.startswith(f"{top}.") or at == top for at in values) else "# "
            if name:
                out += ["", f"{lead}{top}:"]
            else:
                out.append("")
        value = values.get(path)
        mark = "" if value is not None else "# "
        said = value if value is not None else key.example
        unit = f" [{key.unit}]" if key.unit else ""
        default = "" if key.default == "required" else f" Default: {key.default}."
        indent = "  " if name else ""
        out += wrap(f"{key.means}{unit}{default}", 100, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        out.append(f"{indent}{mark}{name or top}: {said}")
    return "\n".join(out) + "\n"
