"""Megatron-LM's --use-torch-fsdp2: Megatron-Core's layers under torch's fully_shard.

Source: megatron-core 0.16.1 distributed/torch_fully_sharded_data_parallel.py; NVIDIA/Megatron-LM@d98e8a64
megatron/training/arguments.py, validate_args, alike in core_v0.12.0.
"""

from __future__ import annotations

from typing import Any

from steptime.launch.job_keys import JobKeys

PROFILE = "megatron-core-fsdp2"
_OF_CORE = {"megatron-core", "nemo", "megatron-bridge"}
"""Profiles of what runs Megatron-Core's layers under it."""
_REFUSED = {
    "use_distributed_optimizer": "the distributed optimizer",
    "gradient_accumulation_fusion": "gradient accumulation fusion; add --no-gradient-accumulation-fusion",
}


def by_torch_fsdp(keys: JobKeys) -> bool:
    """Whether fully_shard takes the place of Megatron's own data parallelism."""
    return keys.on("use_torch_fsdp2")


def profile_of(keys: JobKeys, software: str) -> str:
    """The profile of a job that has this one without it (Megatron-Bridge src/megatron/bridge/training/setup.py passes it on)."""
    return PROFILE if by_torch_fsdp(keys) and software.partition("@")[0] in _OF_CORE else software


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
