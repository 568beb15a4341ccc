"""Adapters over frozen weights in jobs of Megatron-Core: LoRA of ms-swift, NeMo, Megatron-Bridge and MindSpeed-LLM.

Source of the shapes: NVIDIA-NeMo/Megatron-Bridge src/megatron/bridge/peft/lora.py (one pair of matrices for each of linear_qkv,
linear_proj, linear_fc1, linear_fc2); of what tensor parallelism splits: model/lora_split.py.
"""

from __future__ import annotations

from typing import Any

from steptime.base.config import ConfigError, build
from steptime.job.edit import read_model
from steptime.launch.job_keys import JobKeys
from steptime.launch.trainers.adapters import lora_section
from steptime.launch.trainers.figures import WHOLE
from steptime.model.model import Model

_TRAINED = "adapters over frozen weights ({}): every weight is counted as trained"


def adapter_section(keys: JobKeys, model: Any, layout: dict[str, Any], precision: str) -> dict[str, Any] | None:
    """The `lora` of a plan's model; None where every weight is trained, or is counted so."""
    usual = keys.table.raw.get("adapters") or {}
    by = usual.get("by", "peft_method")
    method = "lora" if by != "peft_method" and keys.get(by) else str(keys.get("peft_method") or "none")
    method = method.lower().rpartition(".")[2]
    if method in WHOLE or method == "none":
        keys.put("peft_method", None)
        return None
    if method != "lora":
        keys.leave_out("peft_method", _TRAINED.format(method))
        return None
    if why := _not_modeled(model, precision):
        keys.leave_out(by, _TRAINED.format(f"LoRA {why}"))
        return None
    said = {name: keys.get(f"lora_{name}") for name in ("rank", "targets", "dropout")}
    section, unknown = lora_section(said, usual)
    if unknown:
        keys.leave_out("lora_targets", f"adapters of {', '.join(unknown)}")
    if not section["targets"]:
        return None
    section["rank"] = keys.whole("lora_rank") or section["rank"]
    return section | ({"split": usual["split"]} if "split" in usual and layout.get("tp", 1) != 1 else {})


def _not_modeled(model: Any, precision: str) -> str:
    """The setting with which adapters are not modeled yet (job/layer_rules.py); "" where they are."""
    if precision not in {"bf16", "fp16", "fp32"}:
        return f"in {precision}"
    try:
        found = build(Model, read_model(model))
    except ConfigError:  # told with the whole plan
        return ""
    others = found.moe or found.mtp or found.layers or found.hybrid_pattern or found.linear_attention
    return "with layers other than dense ones" if others or found.attention.kind != "gqa" else ""
