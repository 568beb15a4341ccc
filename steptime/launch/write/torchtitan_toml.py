"""A plan as torchtitan's job config, in TOML."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

from steptime.job.fsdp_rules import reduce_dtype
from steptime.job.job import Job
from steptime.job.stated import stated
from steptime.launch.keys import KeyTable, load_table
from steptime.launch.torchtitan.plan_sections import dealt
from steptime.launch.write.plain_keys import plain_keys, unusual, word_for
from steptime.launch.write.torchtitan_compile import ASYNC_TP, compile_keys, converter_keys, hides_tp
from steptime.launch.write.torchtitan_model import NONE, flavor

_P = "parallelism."
_LEFT_OUT = {
    "optimizer.name",
    "compile.enable_passes",
    "compile.disable_passes",
    "override.imports",
    "parallelism.enable_sequence_parallel",
}
"""Recipes whose name is not a dtype, names of modules, and keys that job_config.py of v0.2.2 stops at: passes of GraphTrainer,
and tensor parallelism without its sequence."""


def toml(job: Job) -> str:
    """Section by section; defaults are left out."""
    table, config = load_table("torchtitan"), job.to_config()
    said = unusual(plain_keys(config, table) | _keys(job, table), table)
    left_out = _LEFT_OUT if hides_tp(config) else {*_LEFT_OUT, ASYNC_TP}
    if (
        hides_tp(config) and stated(job, "performance.recompute_stops_early") is None
    ):  # a graph recomputes what it needs
        left_out = {*left_out, "activation_checkpoint.early_stop"}
    said = {key: value for key, value in said.items() if key not in left_out and not key.startswith("quantize.")}
    # said even where they are the defaults: which model is trained is not left to them
    said = (flavor(job.model) or {"model.name": NONE}) | said
    said |= compile_keys(config) | converter_keys(job, config, table)
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
        "training.local_batch_size": local,
        "training.global_batch_size": data.gbs if data.gbs != local * p.dp else None,
        "training.dtype": word_for(table, "training.dtype", software.states.param_dtype),
        "training.mixed_precision_param": word_for(table, "training.mixed_precision_param", software.compute_dtype),
        f"{_P}tensor_parallel_degree": p.tp,
        f"{_P}pipeline_parallel_degree": p.pp,
        f"{_P}context_parallel_degree": p.cp,
        f"{_P}data_parallel_replicate_degree": copies,
        f"{_P}data_parallel_shard_degree": p.dp // copies,
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


def _pipeline(job: Job, table: KeyTable) -> dict[str, Any]:
    p, key = job.parallelism, f"{_P}pipeline_parallel_schedule"
    found: dict[str, Any] = {f"{_P}pipeline_parallel_microbatch_size": job.data.microbatch_sz}
    word = next((word for word, (name, _) in table.rules[key].words.items() if name == job.schedule), None)
    counts = job.layers_per_chunk
    found[key] = word
    first, last = _fewer(counts, job.model.n_layers)
    found[f"{_P}pipeline_parallel_first_stage_less_layers"] = first
    found[f"{_P}pipeline_parallel_last_stage_less_layers"] = last
    units = job.model.n_layers + first + last
    most = -(-units // len(counts))
    if p.vpp > 1 and -(-units // most) == len(counts):
        found[f"{_P}pipeline_parallel_layers_per_stage"] = most
    return found


def _fewer(counts: list[int], n_layers: int) -> tuple[int, int]:
    """How many layers the first and the last stage have less, so that torchtitan deals `counts`; 0 and 0 where none does.

    torchtitan stops where an end has more than a stage's layers (pipeline_parallel.py, generate_llm_fqn_per_model_part).
    """
    stages, sizes = len(counts), range(max(counts) + 1)
    pairs = sorted(product(sizes, sizes), key=lambda ends: (ends != (1, 1), sum(ends)))
    fitting = (ends for ends in pairs if max(ends) <= (n_layers + sum(ends)) // stages)
    return next((ends for ends in fitting if dealt(n_layers, stages, *ends) == list(counts)), (0, 0))


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
