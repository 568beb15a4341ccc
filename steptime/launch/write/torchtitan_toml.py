"""A plan as torchtitan's job config, in TOML."""

from __future__ import annotations

import json
from typing import Any

from steptime.base.config import build
from steptime.job.edit import read_model
from steptime.job.fsdp_rules import reduce_dtype
from steptime.job.job import Job
from steptime.launch.keys import KeyTable, load_table
from steptime.launch.torchtitan.flavors import models
from steptime.launch.write.plain_keys import plain_keys, unusual, word_for
from steptime.model.model import Model

_P = "parallelism."
_LEFT_OUT = {"optimizer.name", "compile.enable_passes", "compile.disable_passes", "override.imports"}
"""Recipes whose name is not a dtype, passes of GraphTrainer, which a job config in TOML does not have, and names of modules."""


def toml(job: Job) -> str:
    """Section by section; defaults are left out."""
    table = load_table("torchtitan")
    said = unusual(plain_keys(job.to_config(), table) | _keys(job, table), table)
    said = {key: value for key, value in said.items() if key not in _LEFT_OUT}
    sections: dict[str, dict[str, Any]] = {}
    for key, value in said.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = value
    sections.setdefault("training", {})
    blocks = []
    for section in sorted(sections, key=("model", "training", "parallelism").__contains__, reverse=True):
        lines = [f"{name} = {json.dumps(value)}" for name, value in sections[section].items()]
        blocks.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(blocks) + "\n"


def _keys(job: Job, table: KeyTable) -> dict[str, Any]:
    """Settings that take several keys."""
    p, data, software = job.parallelism, job.data, job.software
    local = job.schedule_microbatches * data.microbatch_sz if p.pp > 1 else data.microbatch_sz
    alone = p.tp * p.pp * p.cp == 1  # as DDP alone runs
    copies = p.dp if alone and job.zero_level < 2 else p.replicas
    if copies == p.dp and not alone:  # it runs no DDP beside other degrees
        copies = 1
    found: dict[str, Any] = {
        **flavor(job.model),
        "training.local_batch_size": local,
        "training.global_batch_size": data.gbs if data.gbs != local * p.dp else None,
        "training.dtype": word_for(table, "training.dtype", software.states.param_dtype),
        "training.mixed_precision_param": word_for(table, "training.mixed_precision_param", software.compute_dtype),
        f"{_P}tensor_parallel_degree": p.tp,
        f"{_P}pipeline_parallel_degree": p.pp,
        f"{_P}context_parallel_degree": p.cp,
        f"{_P}data_parallel_replicate_degree": copies,
        f"{_P}data_parallel_shard_degree": p.dp // copies,
        f"{_P}enable_sequence_parallel": job.sp if p.tp > 1 else None,
    }
    if p.cp > 1:
        rotate = f"{_P}context_parallel_rotate_method"
        found[rotate] = word_for(table, rotate, job.cp_comm_type)
    if p.fsdp is not None:
        reduce = "training.mixed_precision_reduce"
        found[reduce] = word_for(table, reduce, reduce_dtype(p.fsdp, software))
        reshards = bool(p.fsdp.reshard_after_forward)  # a number of ranks is not one of its words
        said = "default" if reshards == (p.pp == 1) else "always" if reshards else "never"
        found[f"{_P}fsdp_reshard_after_forward"] = said
    if p.pp > 1:
        found |= _pipeline(job, table)
    return found | _checkpointing(job)


def flavor(model: Model) -> dict[str, Any]:
    """The name and flavor of a model that torchtitan has."""
    shape = {"source": "", "name": ""}
    for family in ("llama3", "llama2", "qwen3"):
        for flavor, section in models()[family].items():
            known = build(Model, read_model(dict(section)))
            if known.model_copy(update=shape) == model.model_copy(update=shape):
                return {"model.name": family, "model.flavor": flavor}
    return {}


def _pipeline(job: Job, table: KeyTable) -> dict[str, Any]:
    p, key = job.parallelism, f"{_P}pipeline_parallel_schedule"
    found: dict[str, Any] = {f"{_P}pipeline_parallel_microbatch_size": job.data.microbatch_sz}
    word = next((word for word, (name, _) in table.rules[key].words.items() if name == job.schedule), None)
    counts = job.layers_per_chunk
    found[key] = word
    units = -(-job.model.n_layers // len(counts)) * len(counts)  # the ends count as layers where they have fewer
    fewer = (sum(counts) < units and counts[0] < max(counts)) or counts[-1] < max(counts)
    ends = (max(counts) - counts[0], max(counts) - counts[-1]) if fewer else (0, 0)
    found[f"{_P}pipeline_parallel_first_stage_less_layers"], found[f"{_P}pipeline_parallel_last_stage_less_layers"] = (
        ends
    )
    if p.vpp > 1 and -(-(job.model.n_layers + sum(ends)) // max(counts)) == len(counts):
        found[f"{_P}pipeline_parallel_layers_per_stage"] = max(counts)
    return found


def _checkpointing(job: Job) -> dict[str, Any]:
    """Activation checkpointing: none, all blocks, every n-th, by op, or a memory budget."""
    said, mode, option = job.recompute, "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
    if said.granularity == "full" and said.method == "uniform":
        return {mode: "full"}
    if said.granularity == "full" and said.method == "every" and len(set(said.n_layers)) == 1:
        return {mode: "selective", option: str(said.n_layers[0])}
    if said.modules == {"per_op"}:
        return {mode: "selective", option: "op"}
    if budgets := [one for one in said.modules if isinstance(one, float)]:
        return {mode: "memory_budget", "activation_checkpoint.memory_budget": budgets[0]}
    return {mode: "none"}
