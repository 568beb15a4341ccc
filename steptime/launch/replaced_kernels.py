"""Kernels in place of those of a model of transformers: Liger's, and those of torch.compile, with a traced causal mask.

Sources: huggingface/transformers src/transformers/training_args.py (torch_compile, torch_compile_backend), trainer.py: the whole
model with its loss is compiled; huggingface/accelerate src/accelerate/accelerator.py, prepare_model and _prepare_deepspeed
(dynamo_backend); deepspeedai/DeepSpeed@edaa7221 deepspeed/runtime/engine.py, compile.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from steptime.job.edit import read_model
from steptime.launch.automodel_backend import put_backend
from steptime.launch.figures import Figures
from steptime.launch.job_keys import JobKeys

LIGER = {"norm_impl": "fused", "rope_impl": "fused", "activation_impl": "fused"}
"""Kernels that Liger replaces (linkedin/Liger-Kernel@ead96b61 src/liger_kernel/transformers/monkey_patch.py)."""
TRACED_MASK = {"attention_kernel": "efficient", "repeat_kv": True}
"""Attention of transformers where Dynamo traces scaled_dot_product_attention, padded or not.

The causal mask becomes a tensor (huggingface/transformers@00c4411c src/transformers/masking_utils.py, _ignore_causal_mask_sdpa),
with which FlashAttention is no choice, and keys and values are repeated for each query head (integrations/sdpa_attention.py,
use_gqa_in_sdpa). The memory-efficient kernel then computes all scores of the square."""
_UNFUSED = {"eager", "aot_eager", "aot_ts_nvfuser"}
"""Backends that trace the model and leave its kernels as they are."""
_OFF = {"none", "", "false", "0", "0.0", "1"}
"""Values with which an option of the table's `own_loss` has no loss of its own; 1 rank of sequence_parallel_size."""
_ATTENTION = re.compile(r"flash_?att|attn_impl")
DEEPCOMPILE = "compile.deepcompile"


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
    if not names_flash(keys):
        section |= TRACED_MASK
    if found.deepcompile and config["parallelism"].get("zero_level") == 3:
        section["overlap"] = {"dp": False}
    keys.becomes(found.figures[by], ", ".join(f"performance.{name}" for name in section))
    config["performance"] |= section


def put_model_kernels(found: Figures, config: dict[str, Any]) -> None:
    """Put the kernels that depend on the model: Liger's loss, and those of NeMo AutoModel."""
    put_liger_loss(found, config)
    put_backend(found, config)


def put_liger_loss(found: Figures, config: dict[str, Any]) -> None:
    """Put Liger's head and loss, one function that takes a part of the tokens at a time, where the model is known.

    A trainer with a loss of its own, which an option of the table's `own_loss` switches on, takes the labels from the model.
    """
    if not found.on("@liger"):
        return
    own = found.keys.table.raw.get("own_loss", [])
    if named := next(
        (item for item in found.keys.given if item.key in own and str(item.value).lower() not in _OFF), None
    ):
        found.keys.becomes(named.key, "performance.loss_impl: a loss of all logits, not Liger's")
        return
    model = read_model(config["model"]) if config["model"] else {}
    said = model if isinstance(model, Mapping) else vars(model)
    hidden, vocab = said.get("hidden_sz"), said.get("vocab_sz")
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


def names_flash(keys: JobKeys) -> bool:
    """Whether a file asks for FlashAttention's own package, for which transformers makes no mask."""
    said = {str(value).lower() for key, value in keys.values.items() if _ATTENTION.search(key)}
    return any(value == "true" or re.match(r"fa\d|flash_?att|kernels-community", value) for value in said)


def of_ds_config(keys: JobKeys, level: int) -> dict[str, Any]:
    """What a ds_config alone compiles: DeepCompile, or all of the model by compile.enabled of DeepSpeed 0.14."""
    if keys.on(DEEPCOMPILE) and level == 3:
        return {"compile": "all", "overlap": {"dp": False}} | TRACED_MASK
    return {"compile": "all"} | TRACED_MASK if keys.on(DEEPCOMPILE) or keys.on("compile.enabled") else {}
