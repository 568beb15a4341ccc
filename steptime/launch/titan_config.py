"""torchtitan's settings as a config: degrees, batch, FSDP, dtypes, checkpointing.

Sources: pytorch/torchtitan@018740b7 torchtitan/models/llama3/infra/parallelize.py, @01db32e9 torchtitan/distributed/:
activation_checkpoint.py, utils.py (maybe_enable_amp), pipeline_parallel.py (generate_llm_fqn_per_model_part).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from steptime.base.config import ConfigError
from steptime.job.edit import read_model
from steptime.launch.devices import data_parallel, told
from steptime.launch.keys import Values
from steptime.launch.reading import Status

Changes = dict[str, tuple[Status, str]]
_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
_SCHEDULES = {"1F1B": ("1f1b", 1), "GPipe": ("gpipe", 1), "Interleaved1F1B": ("interleaved", 2)}
"""Schedule -> ours, and stages per rank where nothing else says them."""
_OLD_SCHEDULES = {
    "interleaved_1f1b": "Interleaved1F1B",
    "interleaved1f1b": "Interleaved1F1B",
    "1f1b": "1F1B",
    "gpipe": "GPipe",
}
_P = "parallelism."


class Said(NamedTuple):
    """What a job says: settings by their TOML names, the model section, devices where told, and the user's own keys."""

    values: Values
    model: Any
    devices: int | None
    sets: Mapping[str, Any] | None

    @property
    def n_layers(self) -> int:
        """Blocks of the model."""
        model = read_model(self.model)
        return int(model["n_layers"] if isinstance(model, Mapping) else model.n_layers)


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


def config_of(said: Said) -> tuple[dict[str, Any], Changes]:
    """The config, and the settings that turn out to be used otherwise, irrelevant or not modelled.

    Raises:
        ConfigError: a value that torchtitan does not take, or degrees and batch sizes that contradict each other.
    """
    degrees = degrees_of(said)
    changes = moot(degrees)
    parallelism: dict[str, Any] = {"tp": degrees.tp, "pp": degrees.pp, "dp": degrees.dp}
    if degrees.cp > 1:
        words = {"allgather": "all_gather", "alltoall": "p2p"}
        method = said.values.word(f"{_P}context_parallel_rotate_method", words)
        parallelism |= {"cp": degrees.cp, "cp_comm_type": method}
    if degrees.tp > 1:
        parallelism["sp"] = said.values.yes(f"{_P}enable_sequence_parallel", default=True)
    parallelism |= fsdp_of(said.values, degrees)
    if degrees.pp > 1:
        parallelism |= pipeline_of(said, degrees, changes)
    performance = {"software": "fsdp2" if degrees.fsdp else "torch"}
    performance |= dtypes_of(said.values, degrees, changes) | kernels_of(said.values, degrees, changes)
    performance |= checkpointing_of(said, changes)
    config = {
        "model": said.model,
        "parallelism": parallelism,
        "performance": performance,
        "data": data_of(said.values, degrees, changes),
    }
    return config, changes


def moot(degrees: Degrees) -> Changes:
    """Settings of a parallelism that the job does not use."""
    changes: Changes = {}
    unused = {
        "pipeline parallelism": (degrees.pp == 1, [f"{_P}pipeline_parallel_{name}" for name in _PIPELINE]),
        "context parallelism": (degrees.cp == 1, [f"{_P}context_parallel_rotate_method"]),
        "tensor parallelism": (degrees.tp == 1, [f"{_P}enable_sequence_parallel"]),
        "FSDP": (not degrees.fsdp, [f"{_P}fsdp_reshard_after_forward", "training.mixed_precision_reduce"]),
    }
    for name, (off, keys) in unused.items():
        if off:
            changes |= dict.fromkeys(keys, ("irrelevant", f"only with {name}"))
    return changes


_PIPELINE = (
    *("schedule", "microbatch_size", "microbatches", "layers_per_stage", "split_points", "schedule_csv"),
    *("first_stage_less_layers", "last_stage_less_layers"),
)


def degrees_of(said: Said) -> Degrees:
    """The degrees; dp_shard -1 takes what the others leave of the devices, and what the user sets goes over both.

    Raises:
        ConfigError: they do not multiply to the devices, or nothing tells how many there are.
    """
    values = said.values
    tp, pp, cp, replicate = (
        values.whole(f"{_P}{name}_degree")
        for name in ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel_replicate")
    )
    shard = values.whole(f"{_P}data_parallel_shard_degree", least=-1)
    if shard == 0:
        raise values.fail(f"{_P}data_parallel_shard_degree", "must be -1, or at least 1 (got 0)")
    rest = tp * pp * cp
    if shard < 0 or told(said.sets, "parallelism.dp") is not None:
        words = "tensor * pipeline * context parallel degree"
        dp = data_parallel(values.source, rest, said.devices, said.sets, words)
        if dp % replicate:
            raise values.fail(
                f"{_P}data_parallel_replicate_degree", f"must divide the {dp} data-parallel ranks (got {replicate})"
            )
    else:
        dp = replicate * shard
        if said.devices is not None and said.devices != dp * rest:
            raise ConfigError(
                f"{values.source}: the degrees multiply to {dp * rest} devices, and there are {said.devices}"
            )
    found = Degrees(tp, pp, cp, dp, replicate)
    if replicate > 1 and not found.fsdp and rest > 1:
        raise values.fail(
            f"{_P}data_parallel_replicate_degree", "DDP runs with no other parallelism; set data_parallel_shard_degree"
        )
    return found


def fsdp_of(values: Values, degrees: Degrees) -> dict[str, Any]:
    """FSDP2's options; none under DDP or on a single device."""
    if not degrees.fsdp:
        return {"zero_level": 0}
    # apply_fsdp: by default pipelines keep their parameters gathered between micro-batches
    policies = {"default": degrees.pp == 1, "always": True, "never": False}
    fsdp = {
        "reshard_after_forward": values.word(f"{_P}fsdp_reshard_after_forward", policies),
        "reduce_dtype": values.word("training.mixed_precision_reduce", _DTYPES),
        "wrap": "block",
    }
    return {"fsdp": fsdp} | ({"replicas": degrees.replicate} if degrees.replicate > 1 else {})


def dtypes_of(values: Values, degrees: Degrees, changes: Changes) -> dict[str, Any]:
    """Precision, and the dtypes of parameters, gradients and moments."""
    precision = values.word("training.mixed_precision_param", _DTYPES)
    stored = values.word("training.dtype", _DTYPES)
    states = {"param_dtype": stored, "main_grad_dtype": stored, "moment_dtype": stored}
    if degrees.fsdp:
        return {"precision": precision} | (states if stored == "bf16" else {})
    if stored == "bf16":
        return {"precision": "bf16"} | states
    if degrees.tp * degrees.pp > 1:
        # maybe_enable_amp: "Mixed precision training is disabled"
        note = "performance.precision fp32: there is no mixed precision with TP or PP but without FSDP"
        changes["training.mixed_precision_param"] = ("used", note)
        return {"precision": "fp32"}
    if precision == "bf16":
        why = "torch.autocast without FSDP: its casts of the fp32 weights are not counted"
        changes["training.mixed_precision_param"] = ("unmodelled", why)
    return {"precision": precision} | states


def kernels_of(values: Values, degrees: Degrees, changes: Changes) -> dict[str, Any]:
    """Compilation, low precision, loss parallelism, asynchronous tensor parallelism, the optimizer."""
    compiled = values.yes("compile.enable")
    changes["compile.enable"] = ("irrelevant", "off")
    if compiled:
        changes["compile.enable"] = ("unmodelled", "kernels that torch.compile fuses; taken as eager")
    converters = values.get("model.converters")
    if converters not in ([], "", None):
        changes["model.converters"] = ("unmodelled", "projections in another precision or layout; taken as they are")
    if str(values.get("optimizer.name")) not in {"Adam", "AdamW"}:
        changes["optimizer.name"] = ("unmodelled", "states of another optimizer; taken as Adam's")
    gathered = values.yes(f"{_P}disable_loss_parallel") or not values.yes(f"{_P}enable_loss_parallel", default=True)
    for key in ("disable_loss_parallel", "enable_loss_parallel"):
        if values.get(f"{_P}{key}") is not None:
            changes[f"{_P}{key}"] = ("irrelevant", "the loss is parallel, or there is no tensor parallelism")
            if gathered and degrees.tp > 1:
                changes[f"{_P}{key}"] = ("unmodelled", "every rank gathers all logits; taken as parallel")
    hidden = values.yes(f"{_P}enable_async_tensor_parallel")
    if not (hidden and compiled and degrees.tp > 1):
        changes[f"{_P}enable_async_tensor_parallel"] = ("irrelevant", "only with compile.enable and tensor parallelism")
    return {"overlap": {"tp": True}} if hidden and compiled and degrees.tp > 1 else {}


def checkpointing_of(said: Said, changes: Changes) -> dict[str, Any]:
    """Activation checkpointing, and whether recomputation ends with the last saved tensor where the file tells."""
    early = said.values.get("activation_checkpoint.early_stop")
    plan = recomputed_of(said, changes)
    if early is None or plan == {"activation_checkpointing_type": "none"}:
        if early is not None:
            changes["activation_checkpoint.early_stop"] = ("irrelevant", "nothing is checkpointed")
        return plan
    changes["activation_checkpoint.early_stop"] = ("used", "performance.recompute_stops_early")
    return plan | {"recompute_stops_early": bool(early)}


def recomputed_of(said: Said, changes: Changes) -> dict[str, Any]:
    """What is recomputed: nothing, whole blocks, every n-th block, or by op."""
    values = said.values
    option = str(values.get("activation_checkpoint.selective_ac_option"))
    mode = str(values.get("activation_checkpoint.mode")).lower()
    if mode != "selective":
        changes["activation_checkpoint.selective_ac_option"] = ("irrelevant", "only with mode selective")
    if mode in {"none", "full"}:
        return {"activation_checkpointing_type": mode}
    if mode == "selective" and option.isdigit() and int(option) > 0:
        # _apply_layer_sac: every n-th block is checkpointed whole
        blocks = said.n_layers // int(option)
        return {"recompute": {"granularity": "full", "method": "block", "n_layers": blocks}}
    if mode == "selective" and option == "op":
        why = "keeps products, attention and reduce-scatters by op; taken as recomputing norms and activations"
        changes["activation_checkpoint.selective_ac_option"] = ("unmodelled", why)
        return {"recompute": {"granularity": "selective", "modules": ["layernorm", "act"]}}
    if mode == "memory_budget":
        changes["activation_checkpoint.mode"] = ("unmodelled", "what the compiler recomputes; taken as none")
        return {"activation_checkpointing_type": "none"}
    if mode != "selective":
        raise values.fail(
            "activation_checkpoint.mode", f"expected none, selective, full or memory_budget (got {mode!r})"
        )
    raise values.fail("activation_checkpoint.selective_ac_option", f"expected op or a whole number (got {option!r})")


def data_of(values: Values, degrees: Degrees, changes: Changes) -> dict[str, Any]:
    """Batch and sequence.

    Raises:
        ConfigError: the global batch is no multiple of what the ranks take at once.
    """
    local = values.whole("training.local_batch_size")
    gbs = values.whole("training.global_batch_size", least=-1)
    micro, at_once = local, local * degrees.dp
    if degrees.pp > 1:
        parts = values.get(f"{_P}pipeline_parallel_microbatches")
        micro = local // int(parts) if parts else values.whole(f"{_P}pipeline_parallel_microbatch_size")
        if micro < 1 or local % micro:
            raise values.fail(
                "training.local_batch_size", f"must be a multiple of the micro-batch {micro} (got {local})"
            )
        if gbs > at_once:
            why = "the pipeline drains after every local batch; taken as one pass"
            changes["training.global_batch_size"] = ("unmodelled", why)
    if gbs < 1:
        gbs = at_once
    if gbs % at_once:
        raise values.fail(
            "training.global_batch_size",
            f"must be a multiple of local_batch_size * data-parallel ranks = {local} * {degrees.dp} (got {gbs})",
        )
    return {"gbs": gbs, "seqlen": values.whole("training.seq_len"), "microbatch_sz": micro}


def pipeline_of(said: Said, degrees: Degrees, changes: Changes) -> dict[str, Any]:
    """Schedule, virtual stages and layers per stage."""
    values, key = said.values, f"{_P}pipeline_parallel_schedule"
    word = str(values.get(key))
    word = _OLD_SCHEDULES.get(word.lower(), word)
    if word not in _SCHEDULES:
        changes[key] = ("unmodelled", "another schedule; taken as 1F1B")
    schedule, per_rank = _SCHEDULES.get(word, ("1f1b", 1))
    first = values.whole(f"{_P}pipeline_parallel_first_stage_less_layers", least=0)
    last = values.whole(f"{_P}pipeline_parallel_last_stage_less_layers", least=0)
    units = said.n_layers + first + last
    if values.get(f"{_P}pipeline_parallel_layers_per_stage") is not None:
        stages = -(-units // values.whole(f"{_P}pipeline_parallel_layers_per_stage"))
        if stages % degrees.pp:
            raise values.fail(
                f"{_P}pipeline_parallel_layers_per_stage",
                f"makes {stages} stages, which {degrees.pp} ranks cannot share",
            )
        per_rank = stages // degrees.pp
    stages = per_rank * degrees.pp
    if stages > units:
        raise values.fail(f"{_P}pipeline_parallel_degree", f"makes {stages} stages of {said.n_layers} layers")
    counts = [units // stages + (stage < units % stages) for stage in range(stages)]
    counts[0] -= first
    counts[-1] -= last
    found: dict[str, Any] = {"schedule": schedule, "layers_per_stage": counts}
    return found | ({"vpp": per_rank} if per_rank > 1 else {})
