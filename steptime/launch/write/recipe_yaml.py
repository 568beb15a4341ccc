"""A plan as the configs of Megatron-Bridge (a ConfigContainer) and NeMo 2.0 (a recipe of nemo-run), in YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steptime.job.job import Job
from steptime.launch.keys import load_table
from steptime.launch.plan_yaml import mapping_yaml
from steptime.launch.write.megatron_arguments import arguments
from steptime.launch.write.megatron_script import spread
from steptime.launch.write.plain_keys import unusual

_STRATEGY = {"sequence_parallel", "cp_comm_type"}
"""MegatronStrategy, besides the degrees (NeMo nemo/lightning/pytorch/strategies/megatron_strategy.py)."""
_OF_PARSER = {"grad_reduce_in_bf16", "create_attention_mask_in_dataloader", "transformer_impl", "use_flash_attn"}
"""Flags that no field has; precisions, which the sections always contain, are written in full."""


def bridge(job: Job) -> str:
    """A ConfigContainer, as Megatron-Bridge prints and saves it (run_config.yaml)."""
    said = _fields(job, "megatron_bridge")
    mask = {"skip_getting_attention_mask_from_dataset": False} if job.software.buffers.attention_mask else {}
    tree = {
        "_target_": "megatron.bridge.training.config.ConfigContainer",
        "model": _rest(said),
        "ddp": _section(said, "ddp"),
        "optimizer": {"optimizer": "adam"} | _section(said, "optimizer"),
        "train": _section(said, "train"),
        "dataset": {"seq_length": said["seq_length"]} | mask,
        "mixed_precision": _section(said, "precision"),
        "comm_overlap": _section(said, "overlap"),
    }
    return mapping_yaml(tree)


def nemo(job: Job) -> str:
    """A recipe of NeMo 2.0, as nemo-run writes it."""
    said, (nodes, processes) = _fields(job, "nemo2"), spread(job)
    ours = _section(said, "precision")
    half = "bf16-mixed" if ours.pop("bf16", False) else "16-mixed" if ours.pop("fp16", False) else "32"
    ours.pop("fp16", None)
    strategy = [key for key in said if key.endswith(("_parallel_size", "_parallel_sizes")) or key in _STRATEGY]
    every = _rest(said)
    model = {key: value for key, value in every.items() if key not in strategy}
    model |= _section(said, "overlap")
    ddp = {"_target_": "megatron.core.distributed.DistributedDataParallelConfig"} | _section(said, "ddp")
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
        "data": {"seq_length": said["seq_length"]} | _section(said, "train"),
        "optim": {"config": {"optimizer": "adam"} | _section(said, "optimizer")},
    }
    return mapping_yaml(tree)


def _fields(job: Job, name: str) -> dict[str, Any]:
    """Fields with their values, without defaults, except for what the sections always contain."""
    table = load_table(name)
    every = arguments(job, table, objects=True)
    parts = load_table("megatron").raw["sections"]
    always = {*parts["precision"], *parts["ddp"], *parts["overlap"][:2], *parts["train"], "seq_length"}
    found = unusual(every, table)
    found |= {key: every[key] for key in always if every.get(key) is not None}
    return {key: value for key, value in found.items() if key not in _OF_PARSER}


def _section(said: Mapping[str, Any], name: str) -> dict[str, Any]:
    raw = load_table("megatron").raw
    return {raw["renamed_in_sections"].get(key, key): said[key] for key in raw["sections"][name] if key in said}


def _rest(said: Mapping[str, Any]) -> dict[str, Any]:
    """The model's own fields: all that no other section has."""
    elsewhere = {"seq_length", *(key for keys in load_table("megatron").raw["sections"].values() for key in keys)}
    found = {key: value for key, value in said.items() if key not in elsewhere}
    for words in found.keys() & {"recompute_modules", "offload_modules"}:
        found[words] = str(found[words]).split()
    if (sizes := found.get("hierarchical_context_parallel_sizes")) is not None:
        found["hierarchical_context_parallel_sizes"] = [int(size) for size in sizes.split()]
    return found | ({"seq_length": said["seq_length"]} if "seq_length" in said else {})
