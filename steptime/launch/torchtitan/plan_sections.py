"""torchtitan's settings as a config: degrees, FSDP, dtypes, checkpointing.

Sources: pytorch/torchtitan@018740b7 torchtitan/models/llama3/infra/parallelize.py, @01db32e9 torchtitan/distributed/:
activation_checkpoint.py, utils.py (maybe_enable_amp), pipeline_parallel.py (generate_llm_fqn_per_model_part).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from steptime.launch.devices import data_parallel, states_devices, told
from steptime.launch.job_keys import JobKeys
from steptime.launch.named_models import model_field
from steptime.launch.torchtitan.batch import batch_of, passes_of
from steptime.launch.torchtitan.checkpointing import checkpointing_of
from steptime.launch.torchtitan.converters import fused_by_override, precision_of
from steptime.launch.torchtitan.expert_settings import balanced, experts_of, grouped_of
from steptime.launch.torchtitan.graph_trainer import by_parameter, captures, fuses, graph_of, is_traced, simple_of
from steptime.launch.torchtitan.own_flavors import own_resharding

_P = "parallelism."
ATTENTION_KERNELS = {
    "flex": {"attention_kernel": "flex"},
    "sdpa": {"attention_kernel": "sdpa-9.19"},
    "varlen": {"attention_kernel": "fa2"},
}
"""model.attn_backend -> its kernel; without it the release's own.

sdpa takes cuDNN's first (torchtitan/models/common/attention.py@b5bcd76c, ScaledDotProductAttention.sdpa_backends)."""

PRIMUS_TURBO = {"attention_kernel": "best", "repeat_kv": False}
"""Primus-Turbo's attention: AMD's assembly kernels (AITER), which take keys and values of fewer heads as they are.

AMD-AGI/Primus@fd1eeabb primus/backends/torchtitan/models/llama3/model/model.py, Attention.forward."""

_UNCOUNTED = frozenset({"pipelineschedulesingle", "pipelineschedulemulti", "flexibleinterleaved1f1b"})
"""Schedules that torch has or had besides those of the table (get_schedule_class, torch 2.5 and 2.13)."""


class Degrees(NamedTuple):
    """Parallel degrees; dp is replicate * shard."""

    tp: int
    pp: int
    cp: int
    dp: int
    replicate: int

    @property
    def fsdp(self) -> bool:
        """Whether parameters are sharded: over dp_shard and cp together (torchtitan/distributed/parallel_dims.py)."""
        return self.dp // self.replicate * self.cp > 1


def config_of(keys: JobKeys, model: Any, devices: int | None, release: str) -> dict[str, Any]:
    """The config of settings by their TOML names, with the model section and, where given, the number of devices.

    `release`: of the profile torchtitan, "" for today's; TOML files are of 0.2 and before.

    Raises:
        ConfigError: a value that torchtitan does not take, or degrees and batch sizes that contradict each other.
    """
    degrees = degrees_of(keys, devices, experts=model_field(model, "moe") is not None)
    n_layers = int(model_field(model, "n_layers"))
    dp_open = "parallelism.dp" in keys.left_open
    parallelism: dict[str, Any] = {"tp": degrees.tp, "pp": degrees.pp} | ({} if dp_open else {"dp": degrees.dp})
    if degrees.cp > 1:
        parallelism |= {"cp": degrees.cp, "cp_comm_type": keys.word(f"{_P}context_parallel_rotate_method")}
    if degrees.tp > 1:
        parallelism["sp"] = keys.on(f"{_P}enable_sequence_parallel", default=True)
    parallelism |= fsdp_of(keys, degrees)
    experts, traced = experts_of(keys, model), is_traced(keys)
    if experts and not degrees.fsdp and told(keys.sets, "performance.software") is None:
        fix = "give -1 and at least 2 devices, or at least 2"
        what = "mixtures of experts are modeled only with sharded parameters"
        keys.fail(f"{_P}data_parallel_shard_degree", f"{what}; {fix}")
    parallelism |= experts.get("parallelism", {})
    model = balanced(keys, model, parallelism.get("ep", 1), str(keys.get(f"{_P}expert_parallel_comm_backend")).lower())
    if degrees.pp > 1:
        parallelism |= pipeline_of(keys, degrees, n_layers)
    splits = degrees.dp > degrees.replicate or dp_open
    performance: dict[str, Any] = {"software": f"torchtitan{'' if degrees.fsdp else '-ddp'}{release}"}
    performance |= (
        dtypes_of(keys, degrees)
        | precision_of(keys, n_layers, fsdp=degrees.fsdp, splits_data=splits)
        | kernels_of(keys, degrees, release)
        | ({"cuda_graphs": True} if captures(keys, degrees.pp, fsdp=degrees.fsdp) else {})
        | rotary_of(keys, model, release)
        | (graph_of(keys, experts=bool(experts)) if traced else checkpointing_of(keys))
    )
    performance |= experts.get("performance", {})
    if grouped := grouped_of(keys, experts=bool(experts)):
        performance["moe"] = performance.get("moe", {}) | grouped
    if degrees.fsdp and keys.on("training.enable_cpu_offload"):
        performance["cpu_offload"] = {"params": True}
    batch = batch_of(keys, degrees.dp, degrees.pp)
    parallelism |= passes_of(keys, batch, degrees.pp, fsdp=degrees.fsdp)
    return {"model": model, "parallelism": parallelism, "performance": performance, "data": batch.section}


def degrees_of(keys: JobKeys, devices: int | None, *, experts: bool = False) -> Degrees:
    """The degrees; dp_shard -1 takes the remaining devices; the user's settings override both.

    A launcher's default number of devices is asked for where `experts` would not be sharded by it.

    Raises:
        ConfigError: they do not multiply to the devices, or their number is unknown.
    """
    axes = ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel_replicate")
    tp, pp, cp, replicate = (keys.count(f"{_P}{name}_degree") for name in axes)
    shard = keys.count(f"{_P}data_parallel_shard_degree", least=-1)
    if shard == 0:
        raise keys.error(f"{_P}data_parallel_shard_degree", "must be -1, or at least 1 (got 0)")
    rest, copies = {"tp": tp, "pp": pp, "cp": cp}, f"{_P}data_parallel_replicate_degree"
    by_file = replicate * shard * tp * pp * cp
    if shard > 0 and devices not in (None, by_file) and told(keys.sets, "parallelism.dp") is None:
        keys.problem(f"the product of the degrees is {by_file} devices, not {devices}")
    if shard < 0 or states_devices(keys.sets):
        shared = (replicate > 1 and tp * pp * cp > 1) or keys.words("model.converters") or (experts and cp == 1)
        copies_of = 2 if shared else 1  # FSDP under the copies, not DDP; projections that FSDP gathers are converted
        dp = data_parallel(keys, rest, devices if shard < 0 else by_file, replicas=replicate * copies_of)
        if dp is None:
            fix = f"add --set parallelism.dp=N (devices / {tp * pp * cp}), or set WORLD_SIZE"
            keys.left_open["parallelism.dp"] = f"number of devices unknown; {fix}"
            dp = 2 * replicate  # any number that shards
        if dp % replicate:
            keys.fail(copies, f"must divide the {dp} data-parallel ranks (got {replicate})")
    else:
        dp = replicate * shard
    found = Degrees(tp, pp, cp, dp, replicate)
    if replicate > 1 and not found.fsdp and tp * pp * cp > 1:
        keys.fail(copies, "DDP cannot be combined with other parallelism; set data_parallel_shard_degree")
    return found


def fsdp_of(keys: JobKeys, degrees: Degrees) -> dict[str, Any]:
    """FSDP2's options; none under DDP or on a single device."""
    if not degrees.fsdp:
        for key in (f"{_P}fsdp_reshard_after_forward", f"{_P}prefetch_distance", "training.mixed_precision_reduce"):
            keys.without_effect(key, "only with FSDP")
        return {"zero_level": 0}
    # apply_fsdp: by default pipelines keep their parameters gathered between micro-batches
    policies = {"default": degrees.pp == 1, "always": True, "never": False}
    by_option = keys.word(f"{_P}fsdp_reshard_after_forward", policies)
    by_code = own_resharding(keys)
    fsdp = {
        "reshard_after_forward": by_option if by_code is None else by_code,
        "reduce_dtype": keys.word("training.mixed_precision_reduce"),
        # a traced graph gathers each parameter for itself; its pipelines gather as FSDP2
        "wrap": "parameter" if by_parameter(keys) and degrees.pp == 1 else "block",
    }
    if captures(keys, degrees.pp):
        fsdp["gradients_stay"] = True
    if (ahead := keys.whole(f"{_P}prefetch_distance", least=0) or 1) > 1:  # FSDP2 gathers one group ahead by itself
        fsdp["prefetch"] = ahead
    return {"fsdp": fsdp} | ({"replicas": degrees.replicate} if degrees.replicate > 1 else {})


def dtypes_of(keys: JobKeys, degrees: Degrees) -> dict[str, Any]:
    """Precision, and the dtypes of parameters, gradients and moments."""
    precision = keys.word("training.mixed_precision_param")
    stored = keys.word("training.dtype")
    states = {"param_dtype": stored, "main_grad_dtype": stored, "moment_dtype": stored}
    if degrees.fsdp:
        return {"precision": precision} | (states if stored == "bf16" else {})
    if stored == "bf16":
        return {"precision": "bf16"} | states
    if degrees.tp * degrees.pp > 1:
        # maybe_enable_amp: "Mixed precision training is disabled"
        note = "performance.precision fp32: no mixed precision with TP or PP without FSDP"
        keys.becomes("training.mixed_precision_param", note)
        return {"precision": "fp32"}
    return {"precision": precision} | states


def kernels_of(keys: JobKeys, degrees: Degrees, release: str) -> dict[str, Any]:
    """Loss parallelism, asynchronous tensor parallelism, the optimizer."""
    if str(keys.get("optimizer.name")) not in {"Adam", "AdamW"}:
        keys.leave_out("optimizer.name", "states of an optimizer other than Adam; counted as Adam's")
    switches = (("disable_loss_parallel", True), ("enable_loss_parallel", False))
    gathers = any(keys.on(f"{_P}{key}", default=not value) == value for key, value in switches)
    found: dict[str, Any] = {"gathered_logits": True} if degrees.tp > 1 and gathers else {}
    if (how := "optimizer.implementation") in keys.values and keys.word(how) != "fused":
        found["optimizer_impl"] = keys.word(how)
    hidden = keys.on(f"{_P}enable_async_tensor_parallel") and keys.on("compile.enable") and degrees.tp > 1
    if not hidden:
        keys.without_effect(f"{_P}enable_async_tensor_parallel", "only with compile.enable and tensor parallelism")
    loss = {"loss_chunks": 1} if keys.get("loss.class") == "CrossEntropyLoss" else {}
    attention: dict[str, Any] = {**ATTENTION_KERNELS.get(str(keys.get("model.attn_backend")), {})}
    if keys.on("primus_turbo.enable_primus_turbo") and keys.on("primus_turbo.use_turbo_attention"):
        attention |= PRIMUS_TURBO
    attention |= fused_by_override(keys)
    return found | loss | attention | compiled_of(keys, release) | ({"overlap": {"tp": True}} if hidden else {})


def rotary_of(keys: JobKeys, model: Any, release: str) -> dict[str, Any]:
    """Cosines and sines of Qwen3 and gpt-oss, where other models have complex numbers (the profile's).

    fp32 since 2026-03-14 (torchtitan pull request 2575), the compute dtype before, in TOML's time.
    """
    if not (model_field(model, "qk_norm") or model_field(model, "attention.sinks")) or fuses(keys):
        return {}
    return {"rope_impl": "composite" if release else "upcast"}


def compiled_of(keys: JobKeys, release: str) -> dict[str, Any]:
    """What torch.compile compiles: blocks, the loss, or both.

    Releases up to 0.1 compile the loss too (torchtitan v0.1.0, components/loss.py), but reserve what a loss op by op needs: runs
    on 8 H100 (pull requests 808 to 833, rows marked fit) are met within 7 %; with a compiled loss they would be 26 % too small.
    """
    if is_traced(keys) or not fuses(keys):
        return simple_of(keys)
    parts = keys.words("compile.components")
    if "model" in parts:
        return {"compile": "all" if "loss" in parts and release != "@0.1" else "blocks"} | simple_of(keys)
    return {"loss_impl": "compiled"} if "loss" in parts else {}


def pipeline_of(keys: JobKeys, degrees: Degrees, n_layers: int) -> dict[str, Any]:
    """Schedule, virtual stages and layers per stage."""
    key = f"{_P}pipeline_parallel_schedule"
    if keys.get(f"{_P}pipeline_parallel_schedule_csv") or str(keys.get(key)).lower() in _UNCOUNTED:
        keys.leave_out(key, "another schedule; counted as 1F1B")
        schedule, per_rank = "1f1b", 1
    else:
        schedule, per_rank = keys.word(key)
    first = keys.count(f"{_P}pipeline_parallel_first_stage_less_layers", least=0)
    last = keys.count(f"{_P}pipeline_parallel_last_stage_less_layers", least=0)
    units = n_layers + first + last
    per_stage = f"{_P}pipeline_parallel_layers_per_stage"
    if (layers := keys.whole(per_stage)) is not None:
        stages = -(-units // layers)
        if stages % degrees.pp:
            keys.fail(per_stage, f"makes {stages} stages, not a multiple of {degrees.pp} ranks")
        per_rank = max(stages // degrees.pp, 1)
    stages = per_rank * degrees.pp
    if stages > units:
        raise keys.error(f"{_P}pipeline_parallel_degree", f"makes {stages} stages of {n_layers} layers")
    found: dict[str, Any] = {"schedule": schedule, "layers_per_stage": dealt(n_layers, stages, first, last)}
    return found | ({"vpp": per_rank} if per_rank > 1 else {})


def dealt(n_layers: int, stages: int, first: int, last: int) -> list[int]:
    """Layers of each stage, where the first and the last have so many less (generate_llm_fqn_per_model_part).

    >>> dealt(61, 8, 1, 0)
    [7, 8, 8, 8, 8, 8, 7, 7]
    """
    units = n_layers + first + last
    counts = [units // stages + (stage < units % stages) for stage in range(stages)]
    counts[0] -= first
    counts[-1] -= last
    return counts
