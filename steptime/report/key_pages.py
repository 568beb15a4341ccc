"""The keys of a plan in three forms: terminal text, descriptions in a JSON Schema, a plan to start from."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING, Any

from steptime.report.plan_keys import texts
from steptime.report.table import Fact, FactList

if TYPE_CHECKING:
    from collections.abc import Iterable

    from steptime.report.plan_keys import Key


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
    from steptime.report.plan_keys import walk

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
