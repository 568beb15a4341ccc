"""Kernels of a trainer's job: Liger's, those of torch.compile with a traced causal mask, and NeMo AutoModel's `model.backend`.

Sources: huggingface/transformers src/transformers/training_args.py (torch_compile, torch_compile_backend), trainer.py: the whole
model with its loss is compiled; huggingface/accelerate src/accelerate/accelerator.py, prepare_model and _prepare_deepspeed
(dynamo_backend); NVIDIA-NeMo/Automodel@36044ad3 nemo_automodel/components/models/common/utils.py, BackendConfig, and of
components/models deepseek_v3/layers.py and qwen3_moe/layers.py (compile_attn), deepseek_v3, gpt_oss and llama/rope_utils.py;
modelscope/ms-swift swift/sequence_parallel/sequence_parallel.py, _init_device_mesh (num_heads is num_key_value_heads).
"""

from __future__ import annotations

import re
from math import gcd
from typing import Any, get_args

from steptime.launch.deepspeed import TRACED_MASK
from steptime.launch.devices import told, told_whole
from steptime.launch.named_models import model_field
from steptime.launch.trainers.figures import Figures
from steptime.software.timing_settings import GraphModule

_BACKENDS: dict[str, dict[str, str]] = {
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
        section = _BACKENDS.get(str(said), {})
        performance |= section
        if section:
            keys.becomes(found.figures["@backend_attention"], f"performance.{next(iter(section))}")
        else:
            keys.approximate(found.figures["@backend_attention"], "flash attention is counted")
    put_library(found, performance.get("moe") or {})
    if config["model"]:
        latent, experts = kind_of_model(config["model"])
        # the profile's is that of models with experts
        if rotation := "complex" if latent else "" if experts else "eager":
            performance.setdefault("rope_impl", rotation)
        if found.get("@backend_rope") == "quack":
            put_quack(found, performance, honored=rotation == "eager")
        if found.on("@backend_compile"):
            put_compiled(found, performance, honored=latent or experts)
        # experts in MXFP8, whose weight gradients stay in bf16 (nemo_automodel/components/moe/mxfp8.py)
        if experts and keys.get("model.backend.experts") == "torch_mm_mxfp8":
            performance.setdefault("moe", {})["grouped_precision"] = "mxfp8_torchao_wgrad_hp"
            keys.becomes("model.backend.experts", "performance.moe.grouped_precision")
    if (listed := found.get("@backend_graphs")) is not None:
        put_graphs(found, performance, listed)


def kind_of_model(section: Any) -> tuple[bool, bool]:
    """Whether a model has latent attention, and whether it has experts."""
    return model_field(section, "attention.kind") == "mla", model_field(section, "moe") is not None


def put_library(found: Figures, moe: dict[str, Any]) -> None:
    """HybridEP where it is said, else DeepEP with its multiprocessors."""
    hybrid = found.keys.get("model.backend.dispatcher") == "hybridep" and moe.get("dispatcher") == "flex"
    moe |= {"flex_backend": "hybridep"} if hybrid else {}
    if hybrid or moe.get("dispatcher") != "flex":
        moe.pop("deepep_sms", None)
        found.keys.without_effect("model.backend.dispatcher_num_sms", "only DeepEP is limited by them")


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


LIGER = {"norm_impl": "fused", "rope_impl": "fused", "activation_impl": "fused"}
"""Kernels that Liger replaces (linkedin/Liger-Kernel@ead96b61 src/liger_kernel/transformers/monkey_patch.py)."""
_UNFUSED = {"eager", "aot_eager", "aot_ts_nvfuser"}
"""Backends that trace the model and leave its kernels as they are."""
_OFF = {"none", "", "false", "0", "0.0", "1"}
"""Values with which an option of the table's `own_loss` has no loss of its own; 1 rank of sequence_parallel_size."""
_ATTENTION = re.compile(r"flash_?att|attn_impl")
_FLASH = re.compile(r"fa\d|flash_?att|kernels-community")
"""Words of FlashAttention's own package, for which transformers makes no mask."""


def put_kernels(found: Figures, config: dict[str, Any]) -> None:
    """Put Liger's kernels and what a trainer compiles into the config; a mask unless a flash kernel is asked for.

    DeepSpeed's own passes gather parameters one by one where they are used (`Figures.deepcompile`).
    """
    keys = found.keys
    if found.on("@liger"):
        config["performance"] = LIGER | config["performance"]
    by = next((figure for figure in ("@compile", "@compile_backend", "@dynamo") if found.on(figure)), "")
    if not by:
        return
    backend = str(found.get("@compile_backend") or found.get("@dynamo") or "inductor").lower()
    section: dict[str, Any] = {} if backend in _UNFUSED else {"compile": "all"}
    said = {str(value).lower() for key, value in keys.values.items() if _ATTENTION.search(key)}
    if not any(value == "true" or _FLASH.match(value) for value in said):
        section |= TRACED_MASK
    if found.deepcompile and config["parallelism"].get("zero_level") == 3:
        section["overlap"] = {"dp": False}
    keys.becomes(found.figures[by], ", ".join(f"performance.{name}" for name in section))
    config["performance"] |= section


def _of_sequence_ranks(found: Figures, config: dict[str, Any]) -> None:
    """How ms-swift's ranks of a sequence exchange heads: all-to-all in groups that divide key/value heads, a ring of groups."""
    keys, by = found.keys, str(found.keys.table.raw.get("swaps_heads", ""))
    ranks = told_whole(keys.sets, "parallelism.cp") or config["parallelism"].get("cp", 1)
    if not by or not isinstance(ranks, int) or ranks == 1:
        return
    if not found.on("@deepspeed"):
        keys.approximate(by, "heads exchanged by all-to-all: the exchange of the profile is counted")
        return
    heads = model_field(told(keys.sets, "model") or config["model"] or {}, "n_kv_heads")
    group = gcd(heads, ranks) if isinstance(heads, int) else ranks
    if group < ranks:
        ring = f"{group} of its ranks exchange the model's {heads} key/value heads, and such groups form a ring"
        keys.problem(
            f"{by} {ranks}: {ring}; not modeled with DeepSpeed; to count one group alone, add --set parallelism.cp={group}"
        )


def put_model_kernels(found: Figures, config: dict[str, Any]) -> None:
    """Put the kernels that depend on the model: those of NeMo AutoModel, and Liger's loss; ms-swift's exchange of heads.

    Liger's head and loss are one function that takes a part of the tokens at a time. A trainer with a loss of its own, which an
    option of the table's `own_loss` switches on, takes the labels from the model.
    """
    put_backend(found, config)
    _of_sequence_ranks(found, config)
    if not found.on("@liger"):
        return
    own = found.keys.table.raw.get("own_loss", [])
    if named := next(
        (item for item in found.keys.given if item.key in own and str(item.value).lower() not in _OFF), None
    ):
        found.keys.becomes(named.key, "performance.loss_impl: a loss of all logits, not Liger's")
        return
    hidden, vocab = (model_field(config["model"] or {}, field) for field in ("hidden_sz", "vocab_sz"))
    if isinstance(hidden, int) and isinstance(vocab, int):
        config["performance"] |= {"loss_impl": "fused", "loss_chunks": liger_chunks(hidden, vocab)}
    else:
        found.keys.approximate(found.figures["@liger"], "head and loss in one kernel: those of the profile are counted")


def liger_chunks(hidden: int, vocab: int) -> int:
    """Parts of Liger's fused linear cross entropy: the power of two at or below vocab / hidden, rounded up.

    linkedin/Liger-Kernel@ead96b61 src/liger_kernel/ops/fused_linear_cross_entropy.py: next_power_of_2(T / ceil(V / h)) tokens
    each, of T, which is counted as a power of two: of 16,384 and 60 parts, 512 tokens each are the power above 273.1.

    >>> liger_chunks(4096, 128256), liger_chunks(4096, 32000), liger_chunks(2560, 151936)
    (32, 8, 32)
    """
    return 1 << ((-(-vocab // hidden)).bit_length() - 1)
