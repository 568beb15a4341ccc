"""Low-precision recipes of measured rows, from their words."""

from __future__ import annotations

import re
from typing import Any

_WORDS = (
    (r"mxfp8", "mxfp8"),
    (r"nvfp4", "nvfp4"),
    (r"^fp8.*block", "fp8_blockwise"),
    (r"^fp8.*(-cs\b|per-tensor|tensorwise|current)", "fp8_current"),
    (r"^fp8.*delayed", "fp8_delayed"),
)
"""First match wins."""


def recipe_of(said: str, framework: str, model: str, assumed: list[str]) -> dict[str, Any]:
    """`precision` and `fp8_params` of a row with the precision text `said`; empty where it names no recipe.

    Megatron-LM's test jobs (`model`) say native_fp8 of fp8 parameters.

    NeMo has a choice of recipe since 2.3.0 (25.04) and takes current scaling since; before, delayed scaling only.
    Parameters are stored in fp8 where the source says so, and in NeMo 2.0's and Megatron-Bridge's recipes (their
    mixed_precision.py: fp8_param_gather True for delayed and current scaling and for MXFP8, of which Megatron-Bridge 25.09 says
    False; not for NVFP4). Their layers are all quantized: performance configs turn first_last_layers_bf16 off.
    """
    said, framework = said.lower(), framework.lower()
    found = next((recipe for words, recipe in _WORDS if re.search(words, said)), "")
    if not found and re.split(r"[^a-z0-9_]", said)[0] != "fp8":
        return {}
    if not found:
        found = "fp8_current" if re.search(r"nemo.* 25\.(0[4-9]|1)", framework) else "fp8_delayed"
        assumed.append(f"precision: {found} for {said!r}")
    if "fp8_params" in said or "native_fp8" in model.lower():
        return {"precision": found, "fp8_params": True}
    stored = bool(re.search(r"megatron-bridge|nemo.*\b2[5-9]\.\d\d", framework)) and found != "nvfp4"
    if found == "mxfp8" and "megatron-bridge nemo 25.09" in framework:
        stored = False
    assumed.append(f"fp8_params: {'yes' if stored else 'no'}")
    return {"precision": found, "fp8_params": stored}


def quantized_head(precision: str, model: str, words: str) -> dict[str, Any]:
    """`quantized_head` of a row of Megatron-Bridge: the MXFP8 recipes with whole-step CUDA graphs of two models set it.

    fp8_output_proj in NVIDIA-NeMo/Megatron-Bridge v0.5.0 and v0.5.1 scripts/performance/configs/deepseek/deepseek_llm_pretrain.py
    and gpt_oss/gpt_oss_llm_pretrain.py, v0.6.0 src/megatron/bridge/perf_recipes/deepseek/common.py and gpt_oss/common.py.
    """
    found = re.search("deepseek-v3|gpt-oss", model.lower()) and "full_iteration" in words and precision == "mxfp8"
    return {"quantized_head": True} if found else {}
