"""A plan as torchtitan's job config, in TOML: its flavor, what is compiled and quantized, and all other keys.

Source: pytorch/torchtitan@v0.2.2 torchtitan/config/job_config.py, torchtitan/components/quantization/float8.py and mx.py,
torchtitan/distributed/tensor_parallel.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from itertools import product
from typing import Any

from steptime.base.config import build
from steptime.job.edit import read_model, value_at
from steptime.job.fsdp_rules import reduce_dtype
from steptime.job.job import Job
from steptime.job.stated import stated
from steptime.launch.keys import KeyTable, load_table, table_file
from steptime.launch.torchtitan.flavors import MODELS, NO_FAMILIES
from steptime.launch.torchtitan.plan_sections import dealt
from steptime.launch.write.plain_keys import plain_keys, unusual, word_for
from steptime.model.model import Model

NOT_IN_LAST = frozenset({"llama2"})
"""Models of the table that v0.2.2 does not have (torchtitan/models/__init__.py, _supported_models)."""
NONE = "give name and flavor: the plan's model is none of torchtitan's"
"""A name that no model has: get_train_spec stops at it (torchtitan/protocols/train_spec.py@v0.2.2)."""
_ROUTER = (
    "score_function", "pre_softmax", "expert_bias", "node_limit", "n_groups", "load_balancing", "z_loss",
    "pad_to_capacity", "capacity_factor", "imbalance_factor",
)  # fmt: skip
"""Fields of experts that choose among them: no size of a weight."""


def flavor(model: Model) -> dict[str, str]:
    """The keys of the flavor that is a model, else of one of the same sizes whose router differs; empty where there is none."""
    for kept in (_whole, _sizes):
        ours = kept(model)
        for (family, name), known in _flavors().items():
            if kept(known) == ours:
                return {"model.name": family, "model.flavor": name}
    return {}


def other_router(model: Model) -> dict[str, Any]:
    """Dotted key of the plan -> value of what a model's router has otherwise than that of its flavor."""
    named = flavor(model)
    if not named or model.moe is None:
        return {}
    ours, known = (one.model_dump()["moe"] for one in (model, _flavors()[named["model.name"], named["model.flavor"]]))
    return {f"model.moe.{key}": ours[key] for key in _ROUTER if ours[key] != known[key]}


@cache
def _flavors() -> dict[tuple[str, str], Model]:
    """All flavors that job configs in TOML can name."""
    table = table_file(MODELS)
    return {
        (family, name): build(Model, read_model(dict(section)))
        for family in table
        if family not in NO_FAMILIES
        for name, section in table[family].items()
        if name not in table["of_functions"].get(family, [])
    }


def _whole(model: Model) -> dict[str, Any]:
    return model.model_dump(exclude={"name", "source"})


def _sizes(model: Model) -> dict[str, Any]:
    found = _whole(model)
    if found.get("moe"):
        found["moe"] = {key: value for key, value in found["moe"].items() if key not in _ROUTER}
    return found


ASYNC_TP = "parallelism.enable_async_tensor_parallel"
_FLOAT8, _MX = "quantize.linear.float8", "quantize.linear.mx"
_GROUPED = {"mxfp8_torchao": "quantize.grouped_mm.mx", "fp8_rowwise": "quantize.grouped_mm.float8"}
"""Precision of experts -> its converter; of weight gradients in bf16 there is none in 0.2.2."""
_COMPONENTS = {"all": ["model", "loss"], "blocks": ["model"]}


def compiled(config: Mapping[str, Any]) -> list[str]:
    """The components that a resolved plan compiles."""
    if parts := _COMPONENTS.get(str(value_at(config, "performance.compile"))):
        return parts
    return ["loss"] if value_at(config, "performance.loss_impl") == "compiled" else []


def hides_tp(config: Mapping[str, Any]) -> bool:
    """Whether asynchronous tensor parallelism can be written: torchtitan stops at it unless the model is compiled."""
    return "model" in compiled(config)


def refuses_mx(job: Job) -> bool:
    """Whether the MX converter stops: "TP not yet supported with torch.compile for mxfp8" (quantization/mx.py@v0.2.2)."""
    config = job.to_config()
    return value_at(config, "performance.precision") == "mxfp8_torchao" and hides_tp(config) and job.parallelism.tp > 1


def converter_keys(job: Job, config: Mapping[str, Any], table: KeyTable) -> dict[str, Any]:
    """The converters of a plan's precision and of its experts', and their sections."""
    found, grouped = _of_projections(job, config, table), _GROUPED.get(job.software.moe.grouped_precision)
    if job.model.moe is None or grouped is None:
        return found
    return found | {"model.converters": [*found.get("model.converters", []), grouped], f"{grouped}.fqns": ["experts"]}


def _of_projections(job: Job, config: Mapping[str, Any], table: KeyTable) -> dict[str, Any]:
    """The converter of a plan's precision and its section; empty where it has none, or nothing is sharded.

    The head and the router stay in bf16, as they are counted. float8 asserts that no recipe is named where FSDP gathers in
    float8; without a name it scales by tensor.
    """
    precision = value_at(config, "performance.precision")
    kept = ["output", "router.gate"] if job.model.moe is not None else ["output"]
    if job.parallelism.fsdp is None:
        return {}
    if precision == "fp8_tensorwise":
        gathers = {f"{_FLOAT8}.enable_fsdp_float8_all_gather": True} if job.software.states.fp8_params else {}
        return {"model.converters": [_FLOAT8], f"{_FLOAT8}.filter_fqns": kept, **gathers}
    if (recipe := word_for(table, f"{_FLOAT8}.recipe_name", precision)) is not None:
        return {"model.converters": [_FLOAT8], f"{_FLOAT8}.recipe_name": recipe, f"{_FLOAT8}.filter_fqns": kept}
    if precision == "mxfp8_torchao":
        return {"model.converters": [_MX], f"{_MX}.recipe_name": "mxfp8_cublas", f"{_MX}.filter_fqns": kept}
    return {}


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
    # a graph recomputes what it needs
    if hides_tp(config) and stated(job, "performance.recompute_stops_early") is None:
        left_out = {*left_out, "activation_checkpoint.early_stop"}
    said = {key: value for key, value in said.items() if key not in left_out and not key.startswith("quantize.")}
    # said even where they are the defaults: which model is trained is not left to them
    said = (flavor(job.model) or {"model.name": NONE}) | said
    said |= {"compile.enable": True, "compile.components": parts} if (parts := compiled(config)) else {}
    said |= converter_keys(job, config, table)
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
