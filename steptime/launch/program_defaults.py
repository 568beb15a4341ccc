"""The file of a training program, and the literal defaults of its own arguments, read by ast."""

from __future__ import annotations

import ast
import re
from typing import Any

from steptime.launch.config_values import literal, options_in, syntax_of
from steptime.launch.nearby_files import NearbyFiles

_SWITCHES = {"store_true": False, "store_false": True}
"""Action of argparse -> its default."""


def file_of(program: str, nearby: NearbyFiles) -> str:
    """The file of a module (python -m finetune.train) in the repository or its src; else the program as it is."""
    stem = program.replace(".", "/")
    module = re.fullmatch(r"\w+(\.\w+)+", program) and not stem.endswith("/py")
    files = (f"{stem}.py", f"src/{stem}.py") if module else ()
    return next((file for file in files if nearby.text(file) is not None), program)


def defaults_in(code: str) -> dict[str, Any]:
    """Argument -> default, of `add_argument("--name", default=N)`, of switches and of the fields of dataclasses; only literals.

    A name with two defaults in one program counts as unknown. A TRL SFTConfig brings its own max_length.

    >>> defaults_in('p.add_argument("--max-seq-len", type=int, default=512)')
    {'max_seq_len': 512}
    """
    found: dict[str, list[Any]] = {}
    module = syntax_of(code)
    for node in ast.walk(module):
        for item in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                _add(found, item.target.id, _default(item.value))
    for name, said in options_in(module):
        usual = _SWITCHES.get(str(literal(said.get("action"))))
        _add(found, name, literal(said["default"]) if "default" in said else usual)
    return {name: values[0] for name, values in found.items() if len(set(map(str, values))) == 1}


def _add(found: dict[str, list[Any]], name: str, value: Any) -> None:
    if isinstance(value, str | int | float):
        found.setdefault(name, []).append(value)


def _default(value: ast.expr | None) -> Any:
    """A field's default: itself, or that of `field(default=...)`."""
    if isinstance(value, ast.Call):
        return next((literal(keyword.value) for keyword in value.keywords if keyword.arg == "default"), None)
    return literal(value)
