"""Layers of each pipeline stage of a measured row, and its depths of multi-token prediction."""

from __future__ import annotations

from typing import Any

from steptime.validation.measurements import MeasuredRow

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


def stages(row: MeasuredRow, assumed: list[str]) -> dict[str, Any]:
    """How layers are distributed over the chunks where they cannot be evenly."""
    vpp = row.whole("vpp") or 1
    layers, chunks = row.needed("n_layers"), row.needed("pp") * vpp
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
