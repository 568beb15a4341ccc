"""How a trainer's job shards its states: FSDP's version and settings, or ZeRO by a ds_config, its name, or accelerate's keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from steptime.launch.deepspeed import put_deepspeed_config
from steptime.launch.devices import told
from steptime.launch.shell.scope import argument_asked
from steptime.launch.trainers.figures import Figures, size_of
from steptime.launch.zero_offload import offload_of


def put_fsdp(found: Figures, config: dict[str, Any], half: str) -> bool:
    """Put into the config how torch's FSDP shards weights of dtype `half`; the result: whether each node holds all of them.

    Sources: accelerate utils/dataclasses.py, FullyShardedDataParallelPlugin (version 1 unless another is said,
    set_mixed_precision); OLMo olmo/config.py, FSDPPrecision.
    """
    keys = found.keys
    word, said = str(found.get("@fsdp") or found.get("@distributed")).lower(), found.get("@fsdp_strategy")
    strategy = str(("" if word.isdecimal() else word) if said is None else said).lower()
    version = 2 if "2" in str(found.get("@fsdp_version") or word) else 1
    options: dict[str, Any] = {"version": version} | (_of_version_1(found) if version == 1 else {})
    if re.search(r"shard_grad_op|zero2|^false$" + ("|^[25]$" if version == 1 else ""), strategy):
        options["reshard_after_forward"] = False
    elif version == 2 and strategy.isdecimal() and int(strategy) not in {1, found.whole("@dp_shard")}:
        keys.leave_out(found.figures["@fsdp_strategy"], "parameters that stay gathered on some ranks")
    if str(found.get("@fsdp_precision")).lower() == "full":  # composer/distributed/mosaic_parallelism.py
        keys.leave_out(found.figures["@fsdp_precision"], "parameters gathered in fp32 under autocast")
    if half != "fp32":
        mixed = str(found.get("@fsdp_precision")).lower() in {"mixed", "default", "float32"}
        options["reduce_dtype"] = "fp32" if mixed else half
    if ((unit := keys.table.raw.get("whole_without")) and keys.get(unit) is None) or _unwrapped(found, word):
        options["wrap"] = "model"  # and no next unit to gather
        options.pop("backward_prefetch", None)
    if found.on("@sync_each_batch"):
        options["no_sync"] = False
    config["parallelism"]["fsdp"] = options
    if "offload" in word or found.on("@fsdp_offload"):
        config["performance"]["cpu_offload"] = {"params": True}
    return "hybrid" in strategy or strategy == "hsdp" or strategy in {"4", "5"}


def _unwrapped(found: Figures, word: str) -> bool:
    """Whether the whole model is one unit: the policy NO_WRAP, accelerate's where none is said, as by fsdp without auto_wrap.

    Source: accelerate utils/dataclasses.py, auto_wrap_policy; transformers training_args.py, FSDPOption.AUTO_WRAP.
    """
    policy = str(found.get("@fsdp_policy") or "").lower()
    by_size = found.get("@fsdp_least") not in (None, 0, "0")
    if policy == "size_based_wrap" or (by_size and not policy):
        by = found.figures["@fsdp_policy" if policy else "@fsdp_least"]
        found.keys.approximate(by, "units by size: blocks are counted")
        return False
    alone = found.backend() == "@fsdp" or re.search("full_shard|shard_grad_op|hybrid_shard", word)
    unsaid = found.keys.table.raw.get("accelerates") and alone and "auto_wrap" not in word and not policy
    return "no_wrap" in policy or bool(unsaid)


def _of_version_1(found: Figures) -> dict[str, Any]:
    """When backward gathers, and whether parameters are kept apart; what is not said stays open but for accelerate.

    Source: accelerate utils/dataclasses.py, FullyShardedDataParallelPlugin (backward_prefetch: NO_PREFETCH where nothing is said,
    as in transformers training_args.py; use_orig_params).
    """
    word = str(found.get("@fsdp_prefetch") or "").lower()
    early: dict[str, Any] = {"backward_prefetch": "post"} if word == "backward_post" else {}
    unsaid = not word and found.keys.table.raw.get("accelerates")
    none = {"prefetch": 0} if unsaid or word in {"no_prefetch", "none"} else {}
    flat = str(found.get("@fsdp_original_params")).lower() == "false"
    return early | none | ({"original_params": False} if flat else {})


def put_zero(found: Figures, config: dict[str, Any]) -> None:
    """Put the stage into the config, and what is in the host's memory; what is not set stays open."""
    keys, said = found.keys, str(found.get("@deepspeed"))
    name = "" if said.lower() in {"none", "true"} else said
    if name:
        keys.put("deepspeed", True)
        keys.put("deepspeed_config", name)
        extras = put_deepspeed_config(keys)
        _put_engine(found, name, extras.engine)
        config["parallelism"] |= {"zero_plus_plus": extras.zero_plus_plus} if extras.zero_plus_plus else {}
        config["parallelism"] |= {"tp": extras.tp} if extras.tp > 1 else {}
        away, stage, found.deepcompile = extras.cpu_offload, keys.get("zero_stage"), extras.deepcompile
    else:
        away, stage = _by_accelerate(found)
    if away:
        config["performance"]["cpu_offload"] = away
    if stage is None and (in_name := re.search(r"z(?:ero)?_?-?(?:stage)?_?([0-3])", name.lower())):
        stage = in_name[1]
        keys.notes.append(f"ZeRO stage {stage} from the name {name}")
    there = keys.nearby.text(name) is not None  # then it says so itself
    if not there and re.search(r"(?<!no)(?<!no[-_])(?<!without[-_])offload", name.lower()):
        keys.leave_out(found.figures["@deepspeed"], "states in host memory")
    if stage is not None:
        config["parallelism"]["zero_level"] = size_of(stage, stage)
    elif told(keys.sets, "parallelism.zero_level") is None:
        asked = argument_asked(said)
        why = f"ds_config: {asked}, or add" if asked else f"{said} was not found; add --with FILE, or"
        keys.left_open.setdefault("parallelism.zero_level", f"{why} --set parallelism.zero_level=N")


def put_bf16_optimizer(found: Figures, config: dict[str, Any]) -> None:
    """States in bf16 jobs of DeepSpeed's pipeline engine are sharded over data parallelism at stage 0 too.

    DeepSpeed runtime/engine.py, _do_optimizer_sanity_check: BF16_Optimizer wherever pipeline_parallelism is; GPT-NeoX builds a
    PipelineModule where pipe_parallel_size is at least 1 (neox_arguments/arguments.py, is_pipe_parallel). fp16.type is of
    releases before that optimizer (1.0 requirements.txt, DeeperSpeed of 2021).
    """
    if "fp16.type" in found.keys.values:
        return
    stages = found.keys.get(str(found.keys.table.raw.get("pipeline_engine")))
    if stages and config["performance"]["precision"] == "bf16" and config["parallelism"].get("zero_level", 0) == 0:
        config["parallelism"]["zero_level"] = 1


def put_uneven_stages(found: Figures, config: dict[str, Any]) -> None:
    """Layers that the stages of DeepSpeed's pipeline engine do not divide: one more on each of the first stages.

    DeepSpeed runtime/pipe/module.py, _partition_layers: stages as equal as they can be.
    """
    pp, layers = size_of(config["parallelism"].get("pp"), 0), size_of(config["model"].get("n_layers"), 0)
    if found.keys.table.raw.get("pipeline_engine") and pp > 1 and layers > pp and layers % pp:
        config["parallelism"]["layers_per_stage"] = [layers // pp + (stage < layers % pp) for stage in range(pp)]
        found.keys.notes.append(f"{layers} layers on {pp} stages: one more on each of the first {layers % pp}")


_ENGINE = {"whole": "@batch", "micro": "@micro", "steps": "@steps", "bf16": "@bf16", "fp16": "@fp16"}


def _put_engine(found: Figures, name: str, engine: Mapping[str, Any]) -> None:
    """What a ds_config gives itself goes before the trainer's defaults, which would contradict it.

    The Trainer of transformers stops where they differ (integrations/deepspeed.py, fill_match); another program has no such
    defaults.
    """
    keys = found.keys
    said = {figure for figure in _ENGINE.values() if found.figures.get(figure) in keys.values}
    if "@batch" in said or not engine.keys() & {"whole", "micro"}:
        engine = {part: value for part, value in engine.items() if part in {"bf16", "fp16"}}
    elif "micro" not in engine and "@micro" in found.figures and "@micro" not in said:
        keys.put(found.figures["@micro"], None)
    half = said & {"@bf16", "@fp16"} or "@half" in found.figures
    for part, value in engine.items():
        figure = _ENGINE[part]
        key = next((key for key, rule in keys.table.rules.items() if rule.note == figure), "")
        if key and figure not in said and not (half and part in {"bf16", "fp16"}):
            found.figures[figure] = key
            keys.put(key, value, by=name)


def _by_accelerate(found: Figures) -> tuple[dict[str, Any], Any]:
    """What accelerate's own keys put on the host, and the stage, by default 2.

    Source: accelerate utils/dataclasses.py, DeepSpeedPlugin.
    """
    keys, stage = found.keys, found.keys.get("zero_stage")
    own = found.figures.get("@deepspeed", "use_deepspeed") == "use_deepspeed"
    if stage is None and (why := keys.without_value.get("use_deepspeed")):
        keys.ask("parallelism.zero_level", f"ZeRO stage unknown: {why}")
    if stage is None and own and "parallelism.zero_level" not in keys.left_open:
        stage = 2
        keys.notes.append("ZeRO stage not set, 2 assumed: accelerate's default")
    names = ("@offload_optimizer", "@offload_params")
    optimizer, params = ((found.figures[name],) if name in found.figures else () for name in names)
    return offload_of(keys, size_of(stage, 0), optimizer, params), stage
