"""Files given in place of a plan: a launch script, a log, the output of --json, a Hugging Face config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steptime.base.config import ConfigError
from steptime.base.document import parse_mapping

_LAUNCH = {
    **dict.fromkeys((".sh", ".bash", ".slurm", ".sbatch"), "a shell script"),
    ".toml": "a TOML file",
    **dict.fromkeys((".log", ".out"), "a log"),
}
"""Suffixes of files that --from reads, which are never plans."""


def plan_mapping(text: str, name: str) -> dict[str, Any]:
    """The mapping of a plan's text; `name` is its file's, for messages.

    Raises:
        ConfigError: it is not valid YAML or JSON, or is another kind of file, in one line that says how to use it.
    """
    kind = "a shell script" if text.startswith("#!") else _LAUNCH.get(Path(name).suffix.lower())
    try:
        data = parse_mapping(text, name)
    except ConfigError:
        if kind is None or not text.strip():
            raise
        raise ConfigError(f"{name}: {kind}, not a plan; to read it: 3dtrn --from auto {name}") from None
    if str(data.get("schema", "")).startswith("3dtrn/") and "model" not in data:
        raise ConfigError(f"{name}: the output of --json, not a plan; its plan is under config")
    if "model_type" in data and data.keys().isdisjoint({"model", "data", "hardware"}):
        raise ConfigError(f"{name}: a Hugging Face config, not a plan; name it in a plan as model: {{hf: {name}}}")
    return data
