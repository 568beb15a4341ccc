"""Kernels that NeMo AutoModel's `model.backend` chooses, and its rotary embedding, which depends on the model.

Source: NVIDIA-NeMo/Automodel@36044ad3 nemo_automodel/components/models/common/utils.py, BackendConfig, and of components/models
deepseek_v3/layers.py and qwen3_moe/layers.py (compile_attn), deepseek_v3, gpt_oss and llama/rope_utils.py.
"""

from __future__ import annotations

import re
from typing import Any, get_args

from steptime.launch.figures import Figures
from steptime.launch.named_models import model_field
from steptime.software.timing_settings import GraphModule

ATTENTION: dict[str, dict[str, str]] = {
    "te": {"attention_kernel": "cudnn-9.19"},
    "sdpa": {"attention_kernel": "sdpa-9.19"},
    "flex": {"attention_kernel": "flex"},
    "eager": {"attention_impl": "unfused"},
}
"""What `backend.attn` becomes: TransformerEngine's DotProductAttention, torch's own kernels, or op by op."""


def put_backend(found: Figures, config: dict[str, Any]) -> None:
    """Put the kernels of a NeMo AutoModel job into the config, and note those that are counted as others."""
    keys, performance = found.keys, config["performance"]
    if keys.table.framework != "NeMo AutoModel":
        return
    if (said := found.get("@backend_attention")) is not None:
        section = ATTENTION.get(str(said), {})
        performance |= section
        if section:
            keys.becomes(found.figures["@backend_attention"], f"performance.{next(iter(section))}")
        else:
            keys.approximate(found.figures["@backend_attention"], "flash attention is counted")
    if config["model"]:
        latent, experts = kind_of_model(config["model"])
        if rotation := rotation_of(latent=latent, experts=experts):
            performance.setdefault("rope_impl", rotation)
        if found.get("@backend_rope") == "quack":
            put_quack(found, performance, honored=rotation == "eager")
        if found.on("@backend_compile"):
            put_compiled(found, performance, honored=latent or experts)
    if (listed := found.get("@backend_graphs")) is not None:
        put_graphs(found, performance, listed)
    put_library(found, performance.get("moe") or {})
    put_experts(found, config)


def put_library(found: Figures, moe: dict[str, Any]) -> None:
    """HybridEP where it is said, else DeepEP with its multiprocessors."""
    hybrid = found.keys.get("model.backend.dispatcher") == "hybridep" and moe.get("dispatcher") == "flex"
    moe |= {"flex_backend": "hybridep"} if hybrid else {}
    if hybrid or moe.get("dispatcher") != "flex":
        moe.pop("deepep_sms", None)
        found.keys.without_effect("model.backend.dispatcher_num_sms", "only DeepEP is limited by them")


def put_experts(found: Figures, config: dict[str, Any]) -> None:
    """Experts in MXFP8, whose weight gradients stay in bf16 (nemo_automodel/components/moe/mxfp8.py)."""
    experts = found.keys.get("model.backend.experts")
    if experts == "torch_mm_mxfp8" and config["model"] and kind_of_model(config["model"])[1]:
        config["performance"].setdefault("moe", {})["grouped_precision"] = "mxfp8_torchao_wgrad_hp"
        found.keys.becomes("model.backend.experts", "performance.moe.grouped_precision")


def kind_of_model(section: Any) -> tuple[bool, bool]:
    """Whether a model has latent attention, and whether it has experts."""
    return model_field(section, "attention.kind") == "mla", model_field(section, "moe") is not None


def rotation_of(*, latent: bool, experts: bool) -> str:
    """The unfused rotary embedding where it is not the profile's, which models with experts have: "" there.

    >>> rotation_of(latent=True, experts=True), rotation_of(latent=False, experts=True), rotation_of(latent=False, experts=False)
    ('complex', '', 'eager')
    """
    return "complex" if latent else "" if experts else "eager"


def put_quack(found: Figures, performance: dict[str, Any], *, honored: bool) -> None:
    """QuACK's rotary kernel, one for queries and one for keys, of models of Llama's family (llama/rope_utils.py)."""
    keys, by = found.keys, found.figures["@backend_rope"]
    if honored:
        performance["rope_impl"] = "fused"
        keys.becomes(by, "performance.rope_impl")
    else:
        keys.without_effect(by, "QuACK rotates in models of Llama's family only")


def put_compiled(found: Figures, performance: dict[str, Any], *, honored: bool) -> None:
    """What compile_attn compiles: the attention module of models with latent attention or experts, with attn sdpa only."""
    keys, by = found.keys, found.figures["@backend_compile"]
    if not honored or found.get("@backend_attention") != "sdpa":
        keys.without_effect(by, "only with attn sdpa, in models with latent attention or experts")
        return
    performance["compile"] = "blocks"
    performance.pop("rope_impl", None)
    keys.approximate(by, "attention compiled with its projections: whole blocks are counted as compiled")


def put_graphs(found: Figures, performance: dict[str, Any], listed: Any) -> None:
    """CUDA graphs of modules, by Megatron-Core's names; te_dpa, attention without its projections, has none there."""
    keys, by = found.keys, found.figures["@backend_graphs"]
    modules = re.findall(r"\w+", str(listed))
    known = [name for name in modules if name in get_args(GraphModule)]
    if known:
        performance["cuda_graphs"] = known
    if known == modules:
        keys.becomes(by, "performance.cuda_graphs")
    else:
        other = ", ".join(name for name in modules if name not in known)
        keys.approximate(by, f"CUDA graphs of {other}: launched kernel by kernel")
