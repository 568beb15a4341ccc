"""DeepSpeed: ds_config.json as a config; the user names the model and the sequence length.

Sources: deepspeedai/DeepSpeed@1b88ac36 deepspeed/runtime/config.py (_set_batch_related_parameters), runtime/zero/config.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from steptime.base.config import ConfigError, build, show
from steptime.job.edit import read_model
from steptime.launch.devices import data_parallel, devices_in, states_devices, told, told_whole
from steptime.launch.job_keys import JobKeys
from steptime.launch.keys import flatten, load_table, read_keys
from steptime.launch.nearby_files import PART_OF_A_JOB, NearbyFiles
from steptime.launch.reading import Env, LaunchFlag, Reading, Sets
from steptime.launch.zero_offload import offload_of
from steptime.model.model import Model

_BATCH, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_TOLD = {_BATCH: "data.gbs", _MICRO: "data.microbatch_sz", "zero_optimization.stage": "parallelism.zero_level"}
"""Key -> the setting that the user gives instead."""
_BUCKET = "zero_optimization.reduce_bucket_size"
DEEPCOMPILE = "compile.deepcompile"
TRACED_MASK = {"attention_kernel": "efficient", "repeat_kv": True}
"""Attention of transformers where Dynamo traces scaled_dot_product_attention, padded or not.

The causal mask becomes a tensor (huggingface/transformers@00c4411c src/transformers/masking_utils.py, _ignore_causal_mask_sdpa),
with which FlashAttention is no choice, and keys and values are repeated for each query head (integrations/sdpa_attention.py,
use_gqa_in_sdpa). The memory-efficient kernel then computes all scores of the square."""


def read_deepspeed(
    path: str, text: str, env: Env = None, sets: Sets = None, nearby: NearbyFiles | None = None
) -> Reading:
    """A ds_config.json as a config.

    `env` may give the number of devices (WORLD_SIZE). `sets`: dotted keys that the user sets; `model` and `data.seqlen` are
    required, and parallelism.dp where the batch sizes do not determine it.

    Raises:
        ConfigError: one line per problem: no ds_config.json, keys that DeepSpeed does not have, a value of "auto", batch
            sizes that contradict each other or the devices, or no model.
    """
    tree = _json(path, text)
    table = load_table("deepspeed")
    zero = tree.get("zero_optimization")
    if isinstance(zero, bool):
        tree = tree | {"zero_optimization": {"stage": int(zero)}}
    keys = JobKeys(path, table, read_keys(flatten(tree), table), sets=sets)
    devices = devices_in("", env)
    _check_told(keys, devices, (nearby or NearbyFiles()).script_of(path))
    performance = {"software": "deepspeed"} | _precision(keys)
    parallelism, data = _layout(keys, devices)
    if parallelism["zero_level"]:
        _reduction(keys, parallelism, performance)
    performance |= of_ds_config(keys, parallelism["zero_level"])
    if away := offload_of(keys, parallelism["zero_level"]):
        performance["cpu_offload"] = away
    if plus := plus_plus_of(keys, parallelism["zero_level"]):
        parallelism["zero_plus_plus"] = plus
    if str(keys.get("optimizer.type") or "adam").lower() not in {"adam", "adamw"}:
        keys.leave_out("optimizer.type", "states of an optimizer other than Adam; counted as Adam's")
    if not states_devices(sets):
        note = "parallelism.dp, from the batch sizes or WORLD_SIZE"
        keys.assumed_flags.append(LaunchFlag("data-parallel ranks", str(parallelism["dp"]), "used", note))
    if told(sets, "performance.activation_checkpointing_type") is None and told(sets, "performance.recompute") is None:
        note = "performance.activation_checkpointing_type; enabled by the model, not by this file"
        keys.assumed_flags.append(LaunchFlag("activation checkpointing", "none", "default", note))
    model = told(sets, "model")
    return keys.reading({"model": model, "parallelism": parallelism, "performance": performance, "data": data})


class ZeroExtras(NamedTuple):
    """What a ds_config says of ZeRO besides its stage, as sections of a plan; empty where nothing."""

    cpu_offload: dict[str, Any]
    zero_plus_plus: dict[str, Any]
    engine: Mapping[str, Any] = {}
    """Batch (whole, micro, steps) and half precision (bf16, fp16) where it gives them itself and not by "auto"."""
    deepcompile: bool = False
    tp: int = 1

    @property
    def beyond(self) -> list[str]:
        """What it turns on besides the stage, in words."""
        named = {
            "states in host memory": self.cpu_offload,
            "ZeRO++": self.zero_plus_plus,
            "DeepCompile": self.deepcompile,
            "AutoTP": self.tp > 1,
        }
        return [name for name, on in named.items() if on]


def put_deepspeed_config(keys: JobKeys) -> ZeroExtras:
    """The ds_config of another trainer's job, if it lies next to its file: it overrides flags of the same meaning."""
    name = keys.get("deepspeed_config")
    text = keys.nearby.text(str(name)) if name else None
    if text is None or not keys.on("deepspeed"):
        return ZeroExtras({}, {})
    table = load_table("deepspeed")
    inner = JobKeys(str(name), table, read_keys(flatten(_json(str(name), text)), table))
    if inner.get("zero_optimization.stage") not in (None, "auto"):
        stage = "zero_optimization.stage"
        keys.put("zero_stage", inner.count(stage, 0, least=0), by=f"{name}: {stage}")
    whole, flag = inner.get(_BATCH), keys.get("global_batch_size")
    if None not in (whole, flag) and str(whole) not in {"auto", str(flag)} and told(keys.sets, "data.gbs") is None:
        both = f"{name}: {_BATCH} {whole} contradicts {keys.name('global_batch_size')} {flag}"
        keys.problem(f"{both}; add --set data.gbs=N")
    micro, steps = inner.get(_MICRO), inner.get(_STEPS)
    if whole is None and flag is None and "gas" in keys.table.rules and isinstance(steps, int) and steps > 0:
        keys.put("gas", steps, by=f"{name}: {_STEPS}")
    if all(isinstance(part, int) and part > 0 for part in (whole, micro, steps)) and whole % (micro * steps) == 0:
        keys.put("data_parallel_size", whole // (micro * steps))  # as runtime/config.py checks, _batch_assertion
    stage = keys.get("zero_stage")
    level = int(stage) if str(stage).isdecimal() else 0
    sizes = {"whole": whole, "micro": micro, "steps": steps}
    engine = {name: size for name, size in sizes.items() if isinstance(size, int) and size > 0}
    engine |= {half: True for half in ("bf16", "fp16") if inner.get(f"{half}.enabled") is True}
    tp = inner.count("tensor_parallel.autotp_size", 1, least=0) or 1
    found = ZeroExtras(offload_of(inner, level), plus_plus_of(inner, level), engine, inner.on(DEEPCOMPILE), tp)
    keys.problems += inner.problems
    inner.becomes(DEEPCOMPILE, "performance.overlap.dp, where the trainer compiles")
    weighty = [flag for flag in inner.flags() if flag.status in {"unmodeled", "approximated"}]
    keys.assumed_flags += [flag._replace(name=f"{name}: {flag.name}") for flag in weighty]
    return found


_PLUS = ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients")
_HPZ, _QWZ, _QGZ = (f"zero_optimization.{key}" for key in _PLUS)


def plus_plus_of(keys: JobKeys, level: int) -> dict[str, Any]:
    """What ZeRO++ changes, as the plan's zero_plus_plus: nothing below stage 3 (runtime/engine.py)."""
    if level != 3:
        for key in (_HPZ, _QWZ, _QGZ):
            keys.without_effect(key, f"ZeRO++ needs stage 3 (got {level})")
        return {}
    found: dict[str, Any] = {"hpz_partition_size": ranks} if (ranks := keys.count(_HPZ, 1, least=0) or 1) > 1 else {}
    switches = {"quantized_weights": _QWZ, "quantized_gradients": _QGZ}
    return found | {name: True for name, key in switches.items() if keys.on(key)}


def _json(path: str, text: str) -> dict[str, Any]:
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        if words := list(dict.fromkeys(re.findall(r":\s*([A-Z][A-Z_]{2,})\b", text))):
            what = f"a template: {', '.join(words[:3])}{' ...' * (len(words) > 3)} have no value"
            raise ConfigError(f"{path}: {what}; give the script that fills it in") from None
        if re.search(r"^\s*(?:deepspeed|torchrun|srun|accelerate|python3?)\s", text, re.MULTILINE):
            what = "starts a program of its own under DeepSpeed; give its ds_config.json, with --model NAME"
            raise ConfigError(f"{path}: {what} and --set data.seqlen=N") from None
        if path.endswith((".log", ".out")):
            what = "a log that does not print the job's config; give the config or the script"
            raise ConfigError(f"{path}: {what}, or compare both: 3dtrn validate --log {path} --plan FILE") from None
        raise ConfigError(f"{path}: line {error.lineno}, column {error.colno}: not valid JSON ({error.msg})") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply for a ds_config.json") from None
    known = {_BATCH, _MICRO, _STEPS, "zero_optimization", "bf16", "fp16", "optimizer"}
    if not isinstance(tree, dict) or not tree.keys() & known:
        what = "" if not isinstance(tree, dict) else " (no batch size, zero_optimization, bf16, fp16 or optimizer)"
        raise ConfigError(f"{path}: not a ds_config.json{what}")
    return tree


def _reduction(keys: JobKeys, parallelism: dict[str, Any], performance: dict[str, Any]) -> None:
    """Buckets of the gradient reduction, and whether it overlaps with backward."""
    sets = keys.sets
    if told(sets, "parallelism.bucket_size_mb") is None:
        if keys.get(_BUCKET) == "auto":  # transformers/integrations/deepspeed.py, trainer_config_finalize
            keys.put(_BUCKET, build(Model, read_model(told(sets, "model"))).hidden_sz ** 2)
        itemsize = 4 if performance.get("main_grad_dtype", performance["precision"]) == "fp32" else 2
        parallelism["bucket_size_mb"] = keys.count(_BUCKET) * itemsize / 1e6
    # by default only at stage 3 (zero/config.py, overlap_comm_valid); the profile states the hidden share
    overlap = "zero_optimization.overlap_comm"
    if keys.get(overlap) != "auto" and not keys.on(overlap, default=parallelism["zero_level"] == 3):
        performance["overlap"] = {"dp": False}


def _check_told(keys: JobKeys, devices: int | None, script: str) -> None:
    """Ask for what the file does not have: model, sequence length, and values that a trainer fills in; all at once.

    One `script` that names the file may have them.
    """

    def unsaid(key: str) -> bool:
        return told(keys.sets, key) is None

    nameless = all(map(unsaid, ("model", "model.preset", "model.n_layers")))
    if nameless:
        whose = PART_OF_A_JOB.format("a ds_config.json", script) if script else ""
        keys.problem(whose or "a ds_config.json names no model; add --set model=NAME (3dtrn models lists them)")
    if unsaid("data.seqlen"):
        keys.problem("a ds_config.json has no sequence length; add --set data.seqlen=N")
    _check_batch(keys, unsaid)
    halves = [key for key in ("bf16.enabled", "fp16.enabled") if keys.get(key) == "auto"]
    if halves and unsaid("performance.precision"):
        keys.problem(f'{", ".join(halves)}: "auto" is filled in by the trainer; add --set performance.precision=bf16')
    batch_told = all(keys.get(key) not in (None, "auto") for key in (_BATCH, _MICRO, _STEPS))
    if not batch_told and devices is None and not states_devices(keys.sets):
        keys.problem("number of devices unknown; add --set parallelism.dp=N, or set WORLD_SIZE")
    if keys.get("zero_optimization.stage") == "auto" and unsaid("parallelism.zero_level"):
        keys.problem('zero_optimization.stage: "auto" is filled in by the trainer; add --set parallelism.zero_level=N')
    if keys.get("bf16.enabled") is True and keys.get("fp16.enabled") is True:
        keys.problem("bf16.enabled and fp16.enabled are both true; use one")
    for key in (_BATCH, _MICRO, _STEPS):  # also what is written wrongly, in the same round
        if keys.get(key) != "auto" and unsaid(_TOLD.get(key, key)):
            keys.whole(key)
    stage = "zero_optimization.stage"
    level = keys.whole(stage, least=0) if keys.get(stage) != "auto" and unsaid(_TOLD[stage]) else None
    if level is not None and level > 3:
        keys.fail(stage, f"expected one of 0, 1, 2, 3 (got {level})")
    if keys.problems:
        keys.reading({})


def _check_batch(keys: JobKeys, unsaid: Callable[[str], bool]) -> None:
    """Ask for the sizes of the batch that neither the file nor the user (`unsaid`: a setting) gives."""
    by_trainer = [key for key in (_BATCH, _MICRO, _STEPS) if keys.get(key) == "auto"]
    given = {
        key
        for key in (_BATCH, _MICRO, _STEPS)
        if keys.get(key) not in (None, "auto") or not unsaid(_TOLD.get(key, key))
    }
    needed: tuple[str, ...] = (_BATCH, _MICRO)
    if _STEPS in given:  # one of both follows from the other and the ranks (_set_batch_related_parameters)
        needed = () if _BATCH in given else (_MICRO,)
    for key in needed if by_trainer else ():
        if key not in given:
            keys.problem(f'{", ".join(by_trainer)}: "auto" is filled in by the trainer; add --set {_TOLD[key]}=N')
    if not by_trainer and not given & {_BATCH, _MICRO}:
        fix = " ".join(f"--set {_TOLD[key]}=N" for key in needed)
        keys.problem(f"{_BATCH}: missing, and so is {_MICRO}; add {fix}")


def _precision(keys: JobKeys) -> dict[str, Any]:
    """bf16, fp16 or fp32, and the dtype in which gradients accumulate."""
    section = {"precision": told(keys.sets, "performance.precision")}
    if section["precision"] is None:
        section["precision"] = "bf16" if keys.on("bf16.enabled") else "fp16" if keys.on("fp16.enabled") else "fp32"
    if keys.get("data_types.grad_accum_dtype") is not None:
        section["main_grad_dtype"] = keys.word("data_types.grad_accum_dtype")
    return section


def _layout(keys: JobKeys, devices: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parallelism and data sections; the user's settings override the file."""
    tp = told_whole(keys.sets, "parallelism.tp") or keys.count("tensor_parallel.autotp_size", 1, least=0) or 1
    pp = told_whole(keys.sets, "parallelism.pp") or 1
    cp = told_whole(keys.sets, "parallelism.cp") or keys.count("sequence_parallel_size", 1)
    keys.put("tensor_parallel.autotp_size", tp if tp > 1 else 0)
    for key in (_BATCH, _MICRO, "zero_optimization.stage"):
        if (ours := told(keys.sets, _TOLD[key])) is not None:
            keys.put(key, ours)
    gbs, micro, dp = batch_of(keys, data_parallel(keys, {"tp": tp, "pp": pp, "cp": cp}, devices))
    layout = {"tp": tp, "pp": pp, "dp": dp, "zero_level": keys.count("zero_optimization.stage", 0, least=0)}
    data = {"gbs": gbs, "seqlen": told_whole(keys.sets, "data.seqlen"), "microbatch_sz": micro}
    return layout | ({"cp": cp} if cp > 1 else {}), data


def batch_of(keys: JobKeys, dp: int | None) -> tuple[int, int, int]:
    """Sequences per step and per micro-batch, and the data-parallel ranks that share them.

    train_batch_size = micro-batch * accumulation steps * data-parallel ranks, of which one may be missing.

    Raises:
        ConfigError: they contradict each other, or too few are given.
    """
    gbs, micro, steps = (None if keys.get(key) == "auto" else keys.whole(key) for key in (_BATCH, _MICRO, _STEPS))
    if dp is None and gbs is not None and micro is not None and steps is not None and gbs % (micro * steps) == 0:
        dp = gbs // (micro * steps)
    if gbs is not None and micro is not None and steps is not None and gbs != micro * steps * (dp or 0):
        ranks = "data-parallel ranks" if dp is None else f"{dp} data-parallel ranks"
        fix = "" if dp is None else "; add --set data.gbs=N"
        parts = f"{_MICRO} * {_STEPS} * {ranks} = {micro} * {steps} * {dp or 'N'}"
        raise keys.error(_BATCH, f"must be {parts} (got {gbs}){fix}")
    if dp is None:
        raise ConfigError(f"{keys.source}: number of devices unknown; add --set parallelism.dp=N, or set WORLD_SIZE")
    if gbs is None:
        gbs = (micro or 1) * (steps or 1) * dp
    if micro is None:
        micro = gbs // (dp * (steps or 1))
    if micro < 1 or gbs % (micro * dp):
        parts = f"{_MICRO} * data-parallel ranks = {micro or 1} * {dp}"
        raise keys.error(_BATCH, f"must be a multiple of {parts} (got {show(gbs)}); add --set data.gbs=N")
    return gbs, micro, dp


def of_ds_config(keys: JobKeys, level: int) -> dict[str, Any]:
    """What a ds_config alone compiles: DeepCompile, or all of the model by compile.enabled of DeepSpeed 0.14."""
    if keys.on(DEEPCOMPILE) and level == 3:
        return {"compile": "all", "overlap": {"dp": False}} | TRACED_MASK
    return {"compile": "all"} | TRACED_MASK if keys.on(DEEPCOMPILE) or keys.on("compile.enabled") else {}
