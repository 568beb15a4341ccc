"""Megatron-LM's --use-torch-fsdp2: Megatron-Core's layers under torch's fully_shard.

Source: megatron-core 0.16.1 distributed/torch_fully_sharded_data_parallel.py; NVIDIA/Megatron-LM@d98e8a64
megatron/training/arguments.py, validate_args, alike in core_v0.12.0.
"""

from __future__ import annotations

from typing import Any

from steptime.launch.job_keys import JobKeys

PROFILE = "megatron-core-fsdp2"
_REFUSED = {
    "use_distributed_optimizer": "the distributed optimizer",
    "gradient_accumulation_fusion": "gradient accumulation fusion; add --no-gradient-accumulation-fusion",
}


def by_torch_fsdp(keys: JobKeys) -> bool:
    """Whether fully_shard takes the place of Megatron's own data parallelism."""
    return keys.on("use_torch_fsdp2")


def fsdp_section(keys: JobKeys, dtype: str) -> dict[str, Any]:
    """Its options; `dtype` is that of the parameters, in which gradients are reduced, as no MixedPrecisionPolicy says otherwise.

    Settings that Megatron refuses with it are problems.
    """
    for key, what in _REFUSED.items():
        if keys.on(key):
            keys.fail("use_torch_fsdp2", f"Megatron-LM does not support it with {what}")
    section: dict[str, Any] = {"reduce_dtype": dtype}
    if not keys.on("torch_fsdp2_reshard_after_forward"):
        section["reshard_after_forward"] = False
    copies = keys.whole("data_parallel_replicate_degree") or 1  # of Primus
    return {"fsdp": section} | ({"replicas": copies} if copies > 1 else {})
