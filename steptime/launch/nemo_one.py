"""NeMo 1.x: a hydra config, its references filled in, in Megatron-Bridge's words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

from steptime.launch.devices import told
from steptime.launch.interpolate import resolve
from steptime.launch.keys import Table, Values, flatten, load_table, remark, sort_keys
from steptime.launch.mcore import Said, config_of
from steptime.launch.mcore_speed import Changes
from steptime.launch.pyconfig import Tree
from steptime.launch.reading import Reading
from steptime.software.profiles import profile_releases

_NORMS = {
    "rmsnorm": "RMSNorm",
    "layernorm": "LayerNorm",
    "layernorm1p": "LayerNorm",
    "low_precision_layernorm": "LayerNorm",
}
_ACTIVATIONS = {
    "gelu": ("gelu", False),
    "geglu": ("gelu", True),
    "fast-geglu": ("gelu", True),
    "swiglu": ("silu", True),
    "fast-swiglu": ("silu", True),
    "relu": ("relu", False),
    "squared-relu": ("squared_relu", False),
    "reglu": ("relu", True),
    "fast-reglu": ("relu", True),
}
"""Activation -> Megatron's function, and whether it is gated."""
_OPTIMIZERS = {"fused_adam": 0, "adam": 0, "adamw": 0, "distributed_fused_adam": 1, "mcore_distributed_optim": 1}
"""ZeRO level."""


def read_one(path: str, tree: Tree, devices: int | None, sets: Mapping[str, Any] | None, release: str) -> Reading:
    """A hydra config as a config.

    Raises:
        ConfigError: one line per problem.
    """
    table = load_table("nemo1")
    said = flatten(resolve(tree))
    apex = table.raw["distributed_fused_adam"] if said.get("model.optim.name") == "distributed_fused_adam" else {}
    values, flags = sort_keys(said, table, path, apex)
    changes: Changes = {}
    software = _in_bridge_words(values, changes, release)
    _vocabulary(values, table, sets)
    if told(sets, "parallelism.dp") is None and isinstance(values.get("trainer.devices"), int):
        devices = values.whole("trainer.devices") * values.whole("trainer.num_nodes")
    config, more = config_of(Said(values, software, devices, sets))
    config["performance"] |= _optimizer(values, changes, config["parallelism"])
    old = software == "nemo-2022"
    flash = values.yes("model.use_flash_attention") or (values.yes("model.transformer_engine") and not old)
    config["performance"]["attention_impl"] = "flash" if flash else "unfused"
    return Reading(path, table.framework, config, remark(flags, more | changes, table))


def _in_bridge_words(values: Values, changes: Changes, release: str) -> str:
    """Puts what NeMo 1 says in its own words under Megatron-Bridge's; the profile."""
    function, gated = values.word("model.activation", _ACTIVATIONS)
    precision = str(values.get("model.precision") or values.get("trainer.precision")).lower()
    put = {
        "model.normalization": values.word("model.normalization", _NORMS),
        "model.activation_func": function,
        "model.gated_linear_unit": gated,
        "model.bf16": "bf16" in precision,
        "model.fp16": precision.startswith(("16", "fp16")),
        "optimizer.optimizer": "adam",
        "ddp.use_distributed_optimizer": values.word("model.optim.name", _OPTIMIZERS) == 1,
        "ddp.grad_reduce_in_fp32": str(values.get("model.optim.grad_sync_dtype")) in {"fp32", "32", "torch.float32"},
    }
    recompute = values.get("model.recompute_granularity")
    if recompute is None and values.get("model.recompute_method") is not None:
        # before granularity was a key, a method alone meant whole layers (1.8, megatron_gpt_model.py)
        put["model.recompute_granularity"] = "full"
    fp8 = values.yes("model.fp8")
    values.values |= put | {"model.fp8": "hybrid" if fp8 else None, "model.fp8_recipe": "delayed"}
    # cross_entropy_loss_fusion is Megatron's native one
    values.values["model.cross_entropy_fusion_impl"] = "native"
    half = put["model.bf16"] or put["model.fp16"]
    if half and not values.yes("model.megatron_amp_O2"):
        changes["model.megatron_amp_O2"] = (
            "unmodelled",
            "autocast over fp32 parameters; taken as half-precision parameters",
        )
    if values.yes("model.mcore_gpt") or values.yes("model.transformer_engine"):
        return f"nemo@{release}" if release in profile_releases("nemo") else "nemo"
    return "nemo-2022"


def _optimizer(values: Values, changes: Changes, layout: dict[str, Any]) -> dict[str, Any]:
    """Buckets and master weights of Apex's distributed Adam, which keeps of them what bf16 drops."""
    name = str(values.get("model.optim.name"))
    if name != "distributed_fused_adam":
        changes["model.optim.bucket_cap_mb"] = ("irrelevant", "only with distributed_fused_adam")
        return {}
    if values.get("model.optim.bucket_cap_mb") is not None:
        layout["bucket_size_mb"] = values.whole("model.optim.bucket_cap_mb")
    # megatron_base_model.py, configure_optimizers: store_param_remainders for fp32 states over bf16 parameters
    return {"master_dtype": "remainder"} if values.get("model.bf16") else {}


def _vocabulary(values: Values, table: Table, sets: Mapping[str, Any] | None) -> None:
    """The vocabulary of a tokenizer that the table has."""
    if told(sets, "model.vocab_sz") is not None or values.get("model.vocab_size") is not None:
        return
    for key in ("model.tokenizer.type", "model.tokenizer.model"):
        name = re.sub(r"^.*(meta-llama/)", r"\1", str(values.get(key) or ""))
        for pattern, size in table.raw["tokenizers"].items():
            if fnmatch(name, pattern):
                values.values["model.vocab_size"] = size
                return
