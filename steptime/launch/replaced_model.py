"""The model of a launch file where the user's settings name another: what the file says of it, and the plan does not have."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from steptime.base.config import ConfigError, build
from steptime.job.edit import put, read_model
from steptime.model.model import Model

MODEL_SET = "model set to "
"""Start of the note; the report shows it below its first lines."""
SIZES = ("n_layers", "inter_sz", "n_q_heads", "n_kv_heads", "head_dim", "vocab_sz", "tie_embeddings", "mtp")
"""What a file may change of a model that stays the same in its hidden size."""


def without_model(sets: Mapping[str, Any]) -> dict[str, Any]:
    """The settings but for those of the model."""
    return {path: value for path, value in sets.items() if path.partition(".")[0] != "model"}


def note(of_file: Any, sets: Mapping[str, Any]) -> list[str]:
    """A line where the settings' model differs from what a file, read without them, says: its name, or its sizes.

    >>> note({"preset": "llama3-8b", "n_layers": 16}, {"model": "llama3-8b"})
    ["model set to llama3-8b, without the file's n_layers 16; to keep: --set model.n_layers=16"]
    >>> note({"preset": "llama3-8b"}, {"model": "llama3-70b"}), note({"n_layers": 32}, {"model": "llama3-8b"})
    (["model set to llama3-70b in place of the file's llama3-8b"], [])
    """
    data: dict[str, Any] = {}
    with suppress(ConfigError):
        for path, value in sets.items():
            if path.partition(".")[0] == "model":
                put(data, path, value)
        ours = build(Model, read_model(data["model"]))
        theirs = _stated(of_file)
        if theirs.get("hidden_sz", ours.hidden_sz) != ours.hidden_sz:
            name = theirs.get("name") or f"one of hidden_sz {theirs['hidden_sz']}"
            return [f"{MODEL_SET}{ours.name or 'other fields'} in place of the file's {name}"]
        other = {key: theirs[key] for key in SIZES if theirs.get(key, value := getattr(ours, key)) not in {None, value}}
        if other:
            said = ", ".join(f"{key} {value}" for key, value in other.items())
            keep = " ".join(f"--set model.{key}={value}" for key, value in other.items())
            return [f"{MODEL_SET}{ours.name or 'other fields'}, without the file's {said}; to keep: {keep}"]
    return []


def _stated(model: Any) -> dict[str, Any]:
    """The fields of a file's model, those of its preset or HF config with them, as far as they are known."""
    fields = dict(model) if isinstance(model, Mapping) else {}
    with suppress(ConfigError):
        whole = build(Model, read_model(model))
        return {"name": whole.name} | {key: getattr(whole, key) for key in ("hidden_sz", *SIZES)}
    return fields
