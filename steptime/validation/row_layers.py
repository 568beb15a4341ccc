"""Layers of a measured row: hybrids after a preset, layers of each pipeline stage, depths of multi-token prediction."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from steptime.base.config import ConfigError
from steptime.job.layer_counts import balanced_by_cost
from steptime.launch.torchtitan.plan_sections import dealt
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


BRIDGE_STAGES = {
    (4, 1): [16, 16, 16, 13],
    (8, 1): [8] * 7 + [5],
    (4, 2): [8] * 7 + [5],
    (16, 1): [4] * 15 + [1],
    (8, 2): [4] * 15 + [1],
    (4, 4): [4] * 15 + [1],
    (2, 8): [4] * 15 + [1],
}
"""Layers of each chunk of DeepSeek-V3 and Kimi-K2 in Megatron-Bridge by pp and vpp; the last has multi-token prediction and loss
(NVIDIA-NeMo/Megatron-Bridge v0.5.0 src/megatron/bridge/recipes: deepseek/deepseek_v3.py,
set_deepseek_v3_pipeline_model_parallel_layout, and kimi/kimi_k2.py, _get_kimi_k2_pipeline_layout)."""


def depths_ahead(row: MeasuredRow, assumed: list[str]) -> dict[str, Any]:
    """`model.mtp`: 1 where the source counts the FLOPs of multi-token prediction, or trains DeepSeek-V3's recipe as it is.

    Its recipe has one depth (deepseek_v3.py, mtp_num_layers = 1).
    """
    counted = "+ MTP layer" in row.text("flops_formula_note")
    if not counted and "MTP as in the recipe" not in row.text("note"):
        return {}
    assumed.append(f"mtp: 1, {'as its FLOPs per token count' if counted else 'as in the recipe'}")
    return {"mtp": 1}


def passes_of(row: MeasuredRow, section: Mapping[str, Any]) -> dict[str, Any]:
    """Local batches of a step, one after the other through the pipeline, where the notes state them: "local batch 8, GA 2".

    The runs with a pipeline among NeMo AutoModel's of October 2025 reduced gradients after each: they are older than its pull
    request 574 (2025-10-08), which waits for the last.
    """
    said = re.search(r"\blocal batch \d+, GA (\d+)", row.text("overlap_notes"))
    if said is None or int(said[1]) == 1 or section["pp"] == 1:
        return {}
    return {"pipeline_passes": int(said[1])} | (
        {"fsdp": section["fsdp"] | {"no_sync": False}} if "fsdp" in section else {}
    )


def stages(row: MeasuredRow, assumed: list[str]) -> dict[str, Any]:
    """How layers are distributed over the chunks where they cannot be evenly."""
    vpp = row.whole("vpp") or 1
    layers, chunks = row.needed("n_layers"), row.needed("pp") * vpp
    if row.published and "nanotron" in row.text("framework").lower() and chunks > 1:
        hidden, vocabulary = row.needed("hidden"), row.needed("vocab")
        weights = 4.0 * hidden**2 + 3.0 * hidden * row.needed("ffn_hidden")
        assumed.append("layers_per_stage: balanced by cost, as nanotron does")
        return {"layers_per_stage": balanced_by_cost(layers, weights, 1.0 * hidden * vocabulary, chunks)}
    if row.published and row.text("framework") == "torchtitan" and chunks > 1:
        assumed.append("layers_per_stage: the first and the last chunk with one less, as by default")
        return {"layers_per_stage": dealt(layers, chunks, 1, 1)}
    if said := re.search(r"PP layout Et\|\(tt\|\)\*(\d+)L(?![a-z0-9])", row.text("note")):
        return {"layers_per_stage": [1, *[2] * int(said[1]), 0]}
    if layers % chunks == 0:
        return {}
    known = BRIDGE_STAGES.get((row.needed("pp"), vpp), [])
    if sum(known) == layers and "megatron-bridge" in row.text("framework").lower():
        assumed.append("layers_per_stage: as in the recipe")
        return {"layers_per_stage": list(known)}
    if (layers + 2) % chunks == 0 and vpp > 1:
        assumed.append("embedding and loss counted as layers, which makes the stages even")
        return {"embedding_and_loss_count_as_layers": True}
    assumed.append("layers_per_stage: auto, since the number of layers is not a multiple of the stages")
    return {"layers_per_stage": "auto"}
