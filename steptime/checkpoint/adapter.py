"""Adapters (LoRA and similar) saved without their base model, from PEFT's adapter_config.json or from names and shapes.

Names: PEFT `tuners/lora/layer.py` (lora_A, lora_B), Diffusers `loaders/lora_conversion_utils.py` (lora.down), kohya-ss
`networks/lora.py` (lora_down, alpha).
"""

from __future__ import annotations

import re
from typing import Any

from steptime.checkpoint.stored_records import Section

_DOWN = re.compile(r"(?:lora_A|lora_down|lora\.down)(?:\.[\w-]+)?(?:\.weight)?$|lora_embedding_A(?:\.[\w-]+)?$")
_PART = re.compile(r"lora_|lora\.(?:down|up)|\.alpha$|\.dora_scale$|magnitude_vector")
_TARGET = re.compile(r"([\w-]+)\.lora[_.]")
MAX_TARGETS = 64


def describe(section: Section) -> dict[str, Any] | None:
    """{kind, rank, alpha, targets, base} of a section that is an adapter; None for every other."""
    config = section.facts.get("adapter")
    config = config if isinstance(config, dict) else {}
    names = [tensor.name for tensor in section.tensors if tensor.role in ("", "model")]
    of_peft = bool(config) and section.stem.startswith("adapter")
    if not names or not (of_peft or all(map(_PART.search, names))):
        return None
    down = [tensor for tensor in section.tensors if _DOWN.search(tensor.name) and len(tensor.shape) >= 2]
    ranks = sorted(
        {min(tensor.whole[0], tensor.whole[-1]) if "embedding" in tensor.name else tensor.whole[0] for tensor in down}
    )
    stated = config.get("r")  # AdaLoRA's is the one that it prunes to; 0 is none
    rank = ranks[0] if len(ranks) == 1 else stated if type(stated) is int and stated > 0 else None
    alpha = config.get("lora_alpha")
    base = config.get("base_model_name_or_path")
    return {
        "kind": str(config.get("peft_type", "LORA")),
        "rank": rank,
        "ranks": ranks,
        "alpha": alpha if type(alpha) in (int, float) else None,
        "targets": _targets(config, names),
        "base": base if isinstance(base, str) else None,
    }


def _targets(config: dict[str, Any], names: list[str]) -> list[str]:
    """The adapted modules: those that the config lists, else the name parts in front of lora_A."""
    stated = config.get("target_modules")
    if isinstance(stated, str):
        return [stated]
    if isinstance(stated, list):
        return sorted(str(name) for name in stated)[:MAX_TARGETS]
    return sorted({match[1] for name in names if (match := _TARGET.search(name))})[:MAX_TARGETS]
