"""Measured rows of hybrids: a source names the model, its preset has the shapes and the order of its layers."""

from __future__ import annotations

from typing import Any

from steptime.base.config import ConfigError
from steptime.model.model import Model
from steptime.model.presets import load_model
from steptime.validation.measurements import MeasuredRow, SkipRowError

AHEAD = {"nemotron-3-super-120b-a12b": 2}
"""Depths of multi-token prediction that Megatron-Bridge's recipes train (nemotron_h_provider.py, Nemotron3SuperProvider)."""


def is_hybrid(row: MeasuredRow) -> bool:
    """Whether a row's layers differ in kind by more than experts and windows, which columns cannot express."""
    kind = row.text("attention_kind").lower()
    return "hybrid" in kind or "mamba" in kind


def preset(row: MeasuredRow) -> Model:
    """The model of a hybrid's name.

    Raises:
        SkipRowError: there is no preset of that name.
    """
    try:
        return load_model(row.text("model_name").partition(" (text part)")[0])
    except ConfigError:
        raise SkipRowError(f"not modeled yet: hybrid layers of {row.text('model_name')}, not a preset") from None


def completed(row: MeasuredRow) -> MeasuredRow:
    """A hybrid's row with the numbers of layers and experts needed to read layout and dispatch; any other row unchanged."""
    if not is_hybrid(row):
        return row
    model = preset(row)
    found = {"n_layers": str(model.n_layers), "n_experts": str(model.moe.n_experts) if model.moe else ""}
    return row._replace(cells=row.cells | found)


def hybrid_model(row: MeasuredRow, assumed: list[str]) -> dict[str, Any]:
    """The `model` section: the preset, with the depths of multi-token prediction that its recipe has."""
    name = preset(row).name
    assumed.append(f"model: preset {name}")
    depths = AHEAD.get(name, 0) if "bridge" in row.text("framework").lower() else 0
    return {"preset": name} | ({"mtp": depths} if depths else {})
