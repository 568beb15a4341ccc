"""A measured row as the config of a Job, read like any config; what a config cannot express, and why."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from steptime.base.config import ConfigError, build
from steptime.hardware.machine import Machine
from steptime.job.job import Job
from steptime.validation.ci_jobs import is_ci, plan_of
from steptime.validation.exclusion import refuse_not_judged
from steptime.validation.measurements import MeasuredRow, SkipRowError
from steptime.validation.row_experts import expert_degrees, has_experts, kinds_of
from steptime.validation.row_hugging_face import offloaded_by_guide
from steptime.validation.row_layers import completed, depths_ahead, hybrid_model, is_hybrid, passes_of, stages
from steptime.validation.row_machine import hardware_of, machine
from steptime.validation.row_native import by_module, reduced_in, resharded
from steptime.validation.row_scripts import chunks_of_script, model_of_script
from steptime.validation.row_software import RowFramework, framework_of, performance_of
from steptime.validation.row_torchtitan import by_parameter, ends_of

CORES = 128
"""Of two EPYC 7742."""
DROPOUT = 0.1
"""Dropout of GPT on Megatron-LM of 2020-2022: its defaults (megatron/arguments.py, --hidden-dropout, --attention-dropout)."""


class Mapped(NamedTuple):
    """A row as a config: plain data that `3dtrn -` accepts."""

    config: dict[str, Any]
    assumed: list[str]
    framework: RowFramework
    job: Job | None = None
    """The job itself, where it is built once for many rows."""


def to_config(row: MeasuredRow, *, known_release: bool = True) -> Mapped:
    """The config of a row, and the assumptions made; without `known_release` the framework's default release applies.

    Raises:
        SkipRowError: the row lacks something needed, or has something that is not modeled.
    """
    if row.surplus:
        raise SkipRowError(f"{row.surplus} more cells than the header has columns; quote text with commas")
    if is_ci(row):
        return _of_ci(row)
    if row.text("config").startswith("{"):
        return _whole(row)
    _refuse_what_is_not_modeled(row)
    row = completed(row)
    framework = framework_of(row, known=known_release)
    assumed: list[str] = []
    performance = performance_of(row, framework, assumed)
    if states := offloaded_states(row.text("zero_or_fsdp").lower()) or offloaded_by_guide(row):
        threads = host_threads(row)
        performance["cpu_offload"] = states | ({"threads": threads} if threads > 1 else {})
        assumed.append(f"cpu_offload.threads: {threads}")
    parallelism = _parallelism(row, framework, assumed)
    data = {
        "gbs": row.needed("global_batch_size"),
        "seqlen": row.needed("seq_len"),
        "microbatch_sz": row.needed("micro_batch_size"),
    }
    model = (
        hybrid_model(row, assumed) if is_hybrid(row) else _model(row, framework, assumed) | depths_ahead(row, assumed)
    )
    hardware = hardware_of(row)
    if replicas := _replicas(row, parallelism["dp"] * parallelism.get("cp", 1)):
        parallelism["replicas"] = replicas
    config = {
        "model": model,
        "parallelism": parallelism,
        "performance": performance,
        "data": data,
        "hardware": hardware.section,
    }
    return Mapped(config, assumed + hardware.assumed, framework)


def _of_ci(row: MeasuredRow) -> Mapped:
    """A job of Megatron-LM's own tests: its launch command, read."""
    plan = plan_of(row)
    config = {key: value for key, value in plan.job.to_config().items() if key != "notes"}
    config["hardware"] = {"node_type": plan.job.machine.name}
    return Mapped(config, list(plan.assumed), framework_of(row), plan.job)


def _whole(row: MeasuredRow) -> Mapped:
    """A row with its whole plan as JSON in `config`, as written by `3dtrn validate --log --save-csv` and `3dtrn bench`.

    Raises:
        SkipRowError: it is no such plan, or its machine is unknown.
    """
    try:
        config: dict[str, Any] = json.loads(row.text("config"))
    except ValueError:
        config = {}
    hardware = config.get("hardware")
    if not isinstance(hardware, dict) or not isinstance(hardware.get("node_type"), str | dict):
        raise SkipRowError("config: expected a plan as JSON, with hardware.node_type")
    try:
        _machine(hardware)
    except (ConfigError, ValueError, TypeError, AttributeError) as error:
        raise SkipRowError(f"config.hardware: {' '.join(str(error).split())}") from None
    return Mapped(config, [], framework_of(row, known=False))


def to_job(mapped: Mapped) -> Job:
    """The Job of a mapped row; machines are built once for all rows that ran on them.

    Raises:
        SkipRowError: the layout cannot run, or a part of it is not modeled; all problems on one line.
    """
    if mapped.job is not None:
        return mapped.job
    try:
        return build(Job, mapped.config | {"hardware": {"node_type": _machine(mapped.config["hardware"])}})
    except ConfigError as error:
        raise SkipRowError("; ".join(error.problems)) from None


def _machine(hardware: dict[str, Any]) -> Machine:
    """The machine of a `hardware` section: by its name, with overrides, or a whole one as a benchmark writes it."""
    if isinstance(hardware["node_type"], dict):
        return build(Machine, hardware["node_type"])
    return machine(hardware["node_type"], tuple(hardware.get("overrides", {}).items()))


def _refuse_what_is_not_modeled(row: MeasuredRow) -> None:
    """Raise for architectures, tasks and features that no config can express yet."""
    refuse_not_judged(row)
    zero, precision = row.text("zero_or_fsdp").lower(), row.text("precision").lower()
    refusals = (
        (row.text("task").lower() == "lora", "LoRA"),
        ("offload" in zero and "activation cpu offload" not in zero and not offloaded_states(zero), "offloading"),
        # tiled loss and MLP, checkpoints on the host (deepspeedai/DeepSpeed docs/_tutorials/ulysses-alst-sequence-parallelism.md)
        ("(alst" in row.text("framework").lower(), "ALST's tiles"),
        ("not sharded" in precision, "BF16_Optimizer of DeepSpeed"),
        ("multimodal" in row.text("model_name").lower(), "multimodal models"),
    )
    for refused, what in refusals:
        if refused:
            raise SkipRowError(f"not modeled yet: {what}")


def host_threads(row: MeasuredRow) -> int:
    """Threads of a process on the host: torchrun's one; DeepSpeed's launcher gives each process its share of the node's cores.

    Bound with --bind_cores_to_rank, else as OpenMP takes them (deepspeedai/DeepSpeed@edaa7221 blogs/zenflow-corebinding).
    """
    launcher = "core" in row.text("overlap_notes") and "bind" in row.text("overlap_notes")
    return CORES // row.needed("n_gpus") if launcher and "2x EPYC 7742" in row.text("machine") else 1


def offloaded_states(said: str) -> dict[str, Any]:
    """States in host memory, from the text of `zero_or_fsdp`; empty where it names none that is modeled.

    >>> offloaded_states("zero3 + optimizer+param CPU offload".lower())
    {'optimizer': 1.0, 'params': True}
    """
    if found := re.fullmatch(
        r"zero[123] \+ (?:(cpu optimizer|optimizer cpu)|optimizer\+param cpu|full cpu) offload", said
    ):
        return {"optimizer": 1.0} | ({} if found[1] else {"params": True})
    return {"params": True} if re.match(r"fsdp2.*cpu offload of parameters, gradients, optimizer", said) else {}


def _parallelism(row: MeasuredRow, framework: RowFramework, assumed: list[str]) -> dict[str, Any]:
    """Degrees, states and the distribution of layers."""
    tp, pp, n_gpus = row.needed("tp"), row.needed("pp"), row.needed("n_gpus")
    cp = row.whole("cp") or 1
    dp, rest = divmod(n_gpus, tp * pp * cp)
    if rest or dp == 0 or dp != (row.whole("dp") or dp):
        raise SkipRowError("n_gpus: not the product of tp, pp, cp and dp")
    section: dict[str, Any] = {"tp": tp, "pp": pp, "dp": dp} | _context(row, framework, assumed, cp)
    vpp = row.whole("vpp") or chunks_of_script(row)
    assumed += [f"{column}: 1" for column, said in (("vpp", vpp), ("cp", row.whole("cp"))) if said is None]
    if (vpp or 1) > 1:
        section["vpp"] = vpp
    sp = row.flag("sp")
    if sp is not None:
        section["sp"] = sp and tp > 1
    elif tp > 1:
        assumed.append(f"sp: default of {framework.profile}")
    section |= expert_degrees(row, assumed)
    section |= _sharding(row, framework, assumed, dp)
    return section | passes_of(row, section) | stages(row, assumed)


def _context(row: MeasuredRow, framework: RowFramework, assumed: list[str], cp: int) -> dict[str, Any]:
    """Context parallelism, and its exchange where the notes state it ("CP a2a", "Ulysses")."""
    if cp == 1:
        return {}
    notes = row.text("overlap_notes").lower()
    found = re.search(r"\bcp[ :=]+(a2a|p2p|all_gather)\b", notes)
    said = "a2a" if "ulysses" in notes else found[1] if found else ""
    if not said:
        assumed.append(f"cp_comm_type: default of {framework.profile}")
    return {"cp": cp, "cp_comm_type": said} if said else {"cp": cp}


def _sharding(row: MeasuredRow, framework: RowFramework, assumed: list[str], dp: int) -> dict[str, Any]:
    """ZeRO level or FSDP options."""
    said = row.text("zero_or_fsdp").lower()
    if not said:
        if dp > 1:
            assumed.append(f"zero_level: default of {framework.profile}")
        return {"fsdp": {}} if framework.sharded else {}
    if framework.sharded:
        fsdp: dict[str, Any] = {"reshard_after_forward": resharded(row)}
        if framework.profile == "automodel" and has_experts(
            row
        ):  # examples/llm_benchmark: moe.reshard_after_forward false
            fsdp["reshard_after_forward"] = False
            fsdp |= {"reshard_after_backward": False} if row.needed("pp") == 1 else {}
        fsdp |= {"wrap": "parameter"} if by_parameter(row) else ends_of(row)
        if said.startswith("fsdp1"):
            fsdp |= {"version": 1} | by_module(row, said)
        return {"fsdp": fsdp | reduced_in(row)}
    found = re.match(r"zero-?([0-3])|fsdp(3)\(mcore", said)
    if not found and not re.fullmatch(r"none( \(1 gpu\))?|ddp", said):
        raise SkipRowError(f"not modeled yet: {said[:40]!r} with {framework.profile}")
    return {"zero_level": int(found[1] or found[2]) if found else 0}


def _replicas(row: MeasuredRow, sharers: int) -> int:
    """Copies of the shards among dp*cp ranks, where a source says over how many the states are sharded (hsdp 2x4: 4)."""
    said = row.text("zero_or_fsdp").lower()
    found = re.search(r"over (\d+) (?:ranks|in slice)|group (\d+)|hsdp \d+x(\d+)", said)
    ranks = int(found[1] or found[2] or found[3]) if found else 0
    return sharers // ranks if ranks and sharers % ranks == 0 else 0


def _model(row: MeasuredRow, framework: RowFramework, assumed: list[str]) -> dict[str, Any]:
    """Dimensions, and the extra fields of a family of models."""
    hidden, inner, heads = row.needed("hidden"), row.needed("ffn_hidden"), row.needed("n_heads")
    glu, name = row.flag("glu"), row.text("model_name")
    if glu is None:
        glu = inner != 4 * hidden
        assumed.append(f"glu: {'yes' if glu else 'no'}, from the width of the MLP")
    model: dict[str, Any] = {
        "n_layers": row.needed("n_layers"),
        "hidden_sz": hidden,
        "inter_sz": inner,
        "n_q_heads": heads,
        "n_kv_heads": row.whole("n_kv_heads") or heads,
        "glu": glu,
    }
    model |= {"name": name} if name else {}
    if head_dim := row.whole("head_dim"):
        model["head_dim"] = head_dim
    else:
        assumed.append(f"head_dim: {hidden / heads:g}")
    if row.whole("n_kv_heads") is None:
        assumed.append(f"n_kv_heads: {heads}")
    vocab = row.whole("vocab")
    if vocab is None:
        vocab = _usual_vocabulary(name, glu=glu)
        assumed.append(f"vocab: {vocab}")
    if framework.base == "deepspeed" and "megatron" in row.text("framework").lower():
        vocab = -(-vocab // (128 * row.needed("tp"))) * 128 * row.needed("tp")
        assumed.append(f"vocab: padded to {vocab}, as in Megatron-LM")
    model |= {"vocab_sz": vocab} | _family(row, framework, glu=glu)
    model["tie_embeddings"] = not glu if (tied := row.flag("tied_embeddings")) is None else tied
    if tied is None:
        assumed.append(f"tied_embeddings: {'no' if glu else 'yes'}")
    return model | model_of_script(row, assumed) | kinds_of(row, assumed)


def _usual_vocabulary(name: str, *, glu: bool) -> int:
    """Vocabulary where the source does not say: GPT-2's as Megatron-LM pads it, Llama's of the third or first generation."""
    if not glu:
        return 51200
    return 128256 if re.search(r"llama-?3", name.lower()) else 32000


def _family(row: MeasuredRow, framework: RowFramework, *, glu: bool) -> dict[str, Any]:
    """Norm, biases, positions: gated models follow Llama; Nemotron has squared ReLU; the rest follows GPT."""
    name = row.text("model_name").lower()
    if glu:
        gelu = {"activation": "gelu"} if "gemma" in name else {}
        alibi = {"rotary_embeds": False} if "alibi" in row.text("overlap_notes").lower() else {}
        return {"norm": "rmsnorm", "bias": False} | gelu | alibi
    if "nemotron" in name:
        return {"norm": "layernorm", "bias": False, "norm_bias": True, "activation": "relu2"}
    family: dict[str, Any] = {"norm": "layernorm", "bias": True, "learned_positions": True}
    if "alibi" in row.text("attention_kind").lower() or "bloom" in name:
        family = {"norm": "layernorm", "bias": True, "rotary_embeds": False}
    if framework.base == "megatron-2021":
        family["dropout"] = DROPOUT
    return family
