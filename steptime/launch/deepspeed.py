"""DeepSpeed: ds_config.json as a config; the model and the sequence are the user's to name.

Sources: deepspeedai/DeepSpeed@1b88ac36 deepspeed/runtime/config.py (_set_batch_related_parameters), runtime/zero/config.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from steptime.base.config import ConfigError, show
from steptime.launch.devices import data_parallel, devices_in, told, told_whole
from steptime.launch.keys import flatten, load_table, read_keys
from steptime.launch.reading import Flag, Reading
from steptime.launch.settings import Settings

_BATCH, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_TOLD = {
    _BATCH: "data.gbs",
    _MICRO: "data.microbatch_sz",
    "bf16.enabled": "performance.precision",
    "fp16.enabled": "performance.precision",
    "zero_optimization.reduce_bucket_size": "parallelism.bucket_size_mb",
    "zero_optimization.stage": "parallelism.zero_level",
    "zero_optimization.overlap_comm": "performance.overlap.dp",
}
"""Key that a trainer fills in ("auto") -> what the user sets instead."""
_DTYPES = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}


class Batch(NamedTuple):
    """Sequences per step, per micro-batch, and the data-parallel ranks that share them."""

    gbs: int
    micro: int
    dp: int


def read_deepspeed(
    path: str, text: str, env: Mapping[str, str] | None = None, sets: Mapping[str, Any] | None = None
) -> Reading:
    """A ds_config.json as a config.

    `env` may tell the number of devices (WORLD_SIZE). `sets`: dotted keys that the user sets; `model` and `data.seqlen` are
    required, and parallelism.dp where the batch sizes do not tell it.

    Raises:
        ConfigError: one line per problem: no ds_config.json, keys that DeepSpeed does not have, a value left to "auto", batch
            sizes that contradict each other or the devices, or no model.
    """
    tree = _json(path, text)
    table = load_table("deepspeed")
    zero = tree.get("zero_optimization")
    if isinstance(zero, bool):
        tree = tree | {"zero_optimization": {"stage": int(zero)}}
    s = Settings(path, table, read_keys(flatten(tree), table, path), sets=sets)
    if problems := _unsaid(s):
        raise ConfigError(problems)
    performance = {"software": "deepspeed"} | _precision(s)
    parallelism, batch = _layout(s, devices_in("", env))
    level = parallelism["zero_level"]
    performance |= _overlap(s, level)
    bucket = "zero_optimization.reduce_bucket_size"
    if level == 0:
        s.without_effect(bucket, "only with ZeRO")
    elif told(sets, "parallelism.bucket_size_mb") is None and s.get(bucket) != "auto":
        itemsize = 4 if performance.get("main_grad_dtype", performance["precision"]) == "fp32" else 2
        parallelism["bucket_size_mb"] = s.count(bucket) * itemsize / 1e6
    if parallelism["tp"] == 1:
        s.without_effect("activation_checkpointing.partition_activations", "only with tensor parallelism")
    if str(s.get("optimizer.type") or "adam").lower() not in {"adam", "adamw"}:
        s.leave_out("optimizer.type", "states of another optimizer; taken as Adam's")
    config = {
        "model": told(sets, "model"),
        "parallelism": parallelism,
        "performance": performance,
        "data": {"gbs": batch.gbs, "seqlen": told_whole(sets, "data.seqlen"), "microbatch_sz": batch.micro},
    }
    s.beside_flags += _not_in_the_file(batch, sets)
    return s.reading(config)


def _json(path: str, text: str) -> dict[str, Any]:
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: line {error.lineno}, column {error.colno}: not valid JSON ({error.msg})") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deep for a ds_config.json") from None
    known = {_BATCH, _MICRO, _STEPS, "zero_optimization", "bf16", "fp16", "optimizer"}
    if not isinstance(tree, dict) or not tree.keys() & known:
        what = "" if not isinstance(tree, dict) else " (no batch size, zero_optimization, bf16, fp16 or optimizer)"
        raise ConfigError(f"{path}: not a ds_config.json{what}")
    return tree


def _unsaid(s: Settings) -> list[str]:
    """What only the user can tell: the model, the sequence, and values that a trainer would fill in."""
    problems, path, sets = [], s.source, s.sets
    if told(sets, "model") is None and told(sets, "model.preset") is None and told(sets, "model.n_layers") is None:
        problems.append(f"{path}: a ds_config.json names no model; add --set model=NAME (3dtrn models lists them)")
    if told(sets, "data.seqlen") is None:
        problems.append(f"{path}: a ds_config.json has no sequence length; add --set data.seqlen=N")
    for key, ours in _TOLD.items():
        if s.get(key) == "auto" and told(sets, ours) is None:
            problems.append(
                f'{path}: {key}: "auto" is filled in by the trainer; write its value, or add --set {ours}=...'
            )
    if s.get("bf16.enabled") is True and s.get("fp16.enabled") is True:
        problems.append(f"{path}: bf16.enabled and fp16.enabled are both true; keep one")
    return problems


def _precision(s: Settings) -> dict[str, Any]:
    """bf16, fp16 or fp32, and what gradients accumulate in."""
    given = told(s.sets, "performance.precision")
    if given is not None:
        precision = str(given)
    else:
        precision = "bf16" if s.on("bf16.enabled") else "fp16" if s.on("fp16.enabled") else "fp32"
    section = {"precision": precision}
    if s.get("data_types.grad_accum_dtype") is not None:
        section["main_grad_dtype"] = s.word("data_types.grad_accum_dtype", _DTYPES)
    return section


def _layout(s: Settings, devices: int | None) -> tuple[dict[str, Any], Batch]:
    """Degrees, ZeRO level and batch."""
    tp = told_whole(s.sets, "parallelism.tp") or s.count("tensor_parallel.autotp_size", 1, least=0) or 1
    pp = told_whole(s.sets, "parallelism.pp") or 1
    cp = told_whole(s.sets, "parallelism.cp") or s.count("sequence_parallel_size", 1)
    batch = batch_of(s, data_parallel(s, {"tp": tp, "pp": pp, "cp": cp}, devices))
    level = told(s.sets, "parallelism.zero_level")
    if level is None:
        level = s.count("zero_optimization.stage", 0, least=0)
    layout = {"tp": tp, "pp": pp, "dp": batch.dp, "zero_level": level}
    return layout | ({"cp": cp} if cp > 1 else {}), batch


def batch_of(s: Settings, dp: int | None) -> Batch:
    """The batch: train_batch_size = micro-batch * accumulation steps * data-parallel ranks, of which one may be unsaid.

    Raises:
        ConfigError: they contradict each other, or too little is said.
    """

    def said(key: str) -> int | None:
        ours = told_whole(s.sets, _TOLD[key]) if key in _TOLD else None
        return ours or (None if str(s.get(key)) in {"None", "auto"} else s.whole(key))

    gbs, micro, steps = said(_BATCH), said(_MICRO), said(_STEPS)
    if dp is None and gbs is not None and micro is not None and steps is not None and gbs % (micro * steps) == 0:
        dp = gbs // (micro * steps)
    if gbs is not None and micro is not None and steps is not None and gbs != micro * steps * (dp or 0):
        ranks = "data-parallel ranks" if dp is None else f"{dp} data-parallel ranks"
        raise s.error(_BATCH, f"must be {_MICRO} * {_STEPS} * {ranks} = {micro} * {steps} * {dp or 'N'} (got {gbs})")
    if dp is None:
        raise ConfigError(
            f"{s.source}: the number of devices is not in the file; add --set parallelism.dp=N (data-parallel ranks), "
            "or set WORLD_SIZE"
        )
    if gbs is None and micro is None:
        raise s.error(_BATCH, f"missing, and so is {_MICRO}; one is required")
    if gbs is None:
        gbs = (micro or 1) * (steps or 1) * dp
    if micro is None:
        micro = gbs // (dp * (steps or 1))
    if micro < 1 or gbs % (micro * dp):
        parts = f"{_MICRO} * data-parallel ranks = {micro or 1} * {dp}"
        raise s.error(_BATCH, f"must be a multiple of {parts} (got {show(gbs)})")
    return Batch(gbs, micro, dp)


def _overlap(s: Settings, level: int) -> dict[str, Any]:
    """overlap_comm: unsaid, it is on at stage 3 alone (zero/config.py, overlap_comm_valid); the profile says how much hides."""
    said = s.get("zero_optimization.overlap_comm")
    if level == 0:
        s.without_effect("zero_optimization.overlap_comm", "only with ZeRO")
        return {}
    if said == "auto":
        return {}
    hidden = level == 3 if said is None else s.on("zero_optimization.overlap_comm")
    if hidden:
        s.becomes("zero_optimization.overlap_comm", "performance.overlap.dp: the share of the deepspeed profile")
        return {}
    return {"overlap": {"dp": False}}


def _not_in_the_file(batch: Batch, sets: Mapping[str, Any] | None) -> list[Flag]:
    """What the config rests on beside the file."""
    flags = []
    if told(sets, "parallelism.dp") is None:
        flags.append(
            Flag("data-parallel ranks", str(batch.dp), "used", "parallelism.dp, by the batch sizes or WORLD_SIZE")
        )
    if told(sets, "performance.activation_checkpointing_type") is None and told(sets, "performance.recompute") is None:
        note = "performance.activation_checkpointing_type; the model switches it on, not this file"
        flags.append(Flag("activation checkpointing", "none", "default", note))
    return flags
