"""A plan as the configs of Megatron-Bridge (a ConfigContainer) and NeMo 2.0 (a recipe of nemo-run), in YAML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from steptime.job.job import Job
from steptime.launch.keys import load_table
from steptime.launch.plan_yaml import mapping_yaml
from steptime.launch.write.megatron_arguments import arguments
from steptime.launch.write.megatron_script import spread
from steptime.launch.write.plain_keys import unusual

_DDP = (
    "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "ddp_bucket_size",
    "num_distributed_optimizer_instances", "use_megatron_fsdp", "data_parallel_sharding_strategy",
)  # fmt: skip
"""DistributedDataParallelConfig (megatron-core 0.16.1 distributed/distributed_data_parallel_config.py)."""
_OPTIMIZER = (
    "use_precision_aware_optimizer", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype",
    "store_param_remainders", "optimizer", "muon_tp_mode", "optimizer_cpu_offload", "optimizer_offload_fraction",
    "overlap_cpu_optimizer_d2h_h2d",
)  # fmt: skip
"""OptimizerConfig (optimizer/optimizer_config.py)."""
_PRECISION = (
    "bf16", "fp16", "fp8", "fp8_recipe", "fp8_param_gather", "fp4", "fp4_recipe", "fp4_param",
    "accumulate_allreduce_grads_in_fp32",
)  # fmt: skip
"""MixedPrecisionConfig (Megatron-Bridge training/mixed_precision.py)."""
_RENAMED = {"ddp_bucket_size": "bucket_size", "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32"}
"""Argument -> field, where it has another name."""
_OVERLAP = ("tp_comm_overlap", "overlap_p2p_comm", "defer_embedding_wgrad_compute", "wgrad_deferral_limit")
"""CommOverlapConfig (training/comm_overlap.py)."""
_STRATEGY = {"sequence_parallel", "cp_comm_type"}
"""MegatronStrategy, besides the degrees (NeMo nemo/lightning/pytorch/strategies/megatron_strategy.py)."""
_TRAIN = ("micro_batch_size", "global_batch_size")
_OF_PARSER = {"grad_reduce_in_bf16", "create_attention_mask_in_dataloader", "transformer_impl", "use_flash_attn"}
"""Flags that no field has; precisions, which the sections always contain, are written in full."""


def bridge(job: Job) -> str:
    """A ConfigContainer, as Megatron-Bridge prints and saves it (run_config.yaml)."""
    said = _fields(job, "megatron_bridge")
    mask = {"skip_getting_attention_mask_from_dataset": False} if job.software.buffers.attention_mask else {}
    tree = {
        "_target_": "megatron.bridge.training.config.ConfigContainer",
        "model": _rest(said),
        "ddp": _section(said, _DDP),
        "optimizer": {"optimizer": "adam"} | _section(said, _OPTIMIZER),
        "train": {key: said[key] for key in _TRAIN},
        "dataset": {"seq_length": said["seq_length"]} | mask,
        "mixed_precision": _section(said, _PRECISION),
        "comm_overlap": _section(said, _OVERLAP),
    }
    return mapping_yaml(tree)


def nemo(job: Job) -> str:
    """A recipe of NeMo 2.0, as nemo-run writes it."""
    said, (nodes, processes) = _fields(job, "nemo2"), spread(job)
    ours = _section(said, _PRECISION)
    half = "bf16-mixed" if ours.pop("bf16", False) else "16-mixed" if ours.pop("fp16", False) else "32"
    ours.pop("fp16", None)
    strategy = [key for key in said if key.endswith(("_parallel_size", "_parallel_sizes")) or key in _STRATEGY]
    every = _rest(said)
    model = {key: value for key, value in every.items() if key not in strategy}
    model |= {key: said[key] for key in _OVERLAP if key in said}
    ddp = {"_target_": "megatron.core.distributed.DistributedDataParallelConfig"} | _section(said, _DDP)
    tree = {
        "_target_": "nemo.collections.llm.api.pretrain",
        "model": {"config": {"_target_": "nemo.collections.llm.gpt.model.base.GPTConfig"} | model},
        "trainer": {
            "_target_": "nemo.lightning.Trainer",
            "num_nodes": nodes,
            "devices": processes,
            "strategy": {"_target_": "nemo.lightning.MegatronStrategy", "ddp": ddp} | {k: every[k] for k in strategy},
            "plugins": {"_target_": "nemo.lightning.MegatronMixedPrecision", "precision": half} | ours,
        },
        "data": {"seq_length": said["seq_length"]} | {key: said[key] for key in _TRAIN},
        "optim": {"config": {"optimizer": "adam"} | _section(said, _OPTIMIZER)},
    }
    return mapping_yaml(tree)


def _fields(job: Job, name: str) -> dict[str, Any]:
    """Fields with their values, without defaults, except for what the sections always contain."""
    table = load_table(name)
    every = arguments(job, table, objects=True)
    always = {*_PRECISION, *_DDP, *_OVERLAP[:2], *_TRAIN, "seq_length"}
    found = unusual(every, table)
    found |= {key: every[key] for key in always if every.get(key) is not None}
    return {key: value for key, value in found.items() if key not in _OF_PARSER}


def _section(said: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {_RENAMED.get(key, key): said[key] for key in names if key in said}


def _rest(said: Mapping[str, Any]) -> dict[str, Any]:
    """The model's own fields: all that no other section has."""
    elsewhere = {*_DDP, *_OPTIMIZER, *_PRECISION, *_OVERLAP, *_TRAIN, "seq_length"}
    found = {key: value for key, value in said.items() if key not in elsewhere}
    for words in found.keys() & {"recompute_modules", "offload_modules"}:
        found[words] = str(found[words]).split()
    if (sizes := found.get("hierarchical_context_parallel_sizes")) is not None:
        found["hierarchical_context_parallel_sizes"] = [int(size) for size in sizes.split()]
    return found | ({"seq_length": said["seq_length"]} if "seq_length" in said else {})
