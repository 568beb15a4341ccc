"""The `parallelism` section of a Megatron job."""

from __future__ import annotations

import re
from typing import Any

from steptime.launch.devices import data_parallel, told_whole
from steptime.launch.job_keys import JobKeys
from steptime.launch.keys import load_table
from steptime.launch.megatron.expert_layers import expert_degrees
from steptime.launch.megatron.layer_kinds import hybrid_pattern
from steptime.launch.megatron.performance_section import main_grad_dtype, optimizer_of, plain_dtype
from steptime.launch.reading import OTHER_NODES, LaunchFlag

_REFUSED = {
    "use_distributed_optimizer": "the distributed optimizer",
    "gradient_accumulation_fusion": "gradient accumulation fusion; add --no-gradient-accumulation-fusion",
}


def layout_section(keys: JobKeys, devices: int | None) -> dict[str, Any]:
    """Degrees, the distribution of layers and of states; without a number of devices, dp is left for the Job to ask for."""
    stages = "pipeline_model_parallel_size"
    if keys.get(stages) == "0" and keys.name(stages) == "--pipe-parallel-size":  # "Disable with 0", its help says
        keys.put(stages, 1)
    tp, pp, cp = (keys.count(f"{axis}_parallel_size") for axis in ("tensor_model", "pipeline_model", "context"))
    if ulysses := (keys.whole("ds_sequence_parallel_size") or 1) > 1:  # of Megatron-DeepSpeed
        cp = keys.count("ds_sequence_parallel_size")
    section: dict[str, Any] = {"tp": tp, "pp": pp}
    fix = "" if keys.get("world_size") is not None else OTHER_NODES
    said = keys.whole("data_parallel_size")
    if (dp := data_parallel(keys, section | ({"cp": cp} if cp > 1 else {}), devices, fix) or said) is not None:
        section["dp"] = dp
        if said is not None and said != dp and devices is not None and devices == dp * tp * pp * cp:
            keys.problem(f"data_parallel_size {said} contradicts world size {devices}, from which {dp} follows")
    if cp > 1:
        section |= {"cp": cp, "cp_comm_type": "a2a"} if ulysses else {"cp": cp} | _exchange(keys, cp)
    vpp = _virtual_stages(keys, pp)
    if vpp > 1:
        section["vpp"] = vpp
    section |= expert_degrees(keys, tp)
    section["sp"] = keys.on("sequence_parallel") and tp > 1  # arguments.py, validate_args
    if tp == 1:
        keys.without_effect("sequence_parallel", "only with tensor parallelism")
    section |= _stages(keys, pp, vpp) | _states(keys)
    return section | _groups(keys, section)


def _groups(keys: JobKeys, section: dict[str, Any]) -> dict[str, int]:
    """The group of micro-batches of interleaved stages: pp by default (core model_parallel_config.py, __post_init__).

    A plan without one uses a valid size; Megatron-LM stops where pp does not divide the micro-batches.
    """
    name, pp = "microbatch_group_size_per_vp_stage", section["pp"]
    said = keys.whole(name)
    if "vpp" not in section:
        if said is not None:
            keys.without_effect(name, "only with virtual stages")
        return {}
    if said is not None and said != pp:
        return {"microbatch_group_sz": said}
    gbs = told_whole(keys.sets, "data.gbs") or keys.whole("global_batch_size")
    micro = told_whole(keys.sets, "data.microbatch_sz") or keys.whole("micro_batch_size")
    batch = (micro or 0) * section.get("dp", 0)
    return {"microbatch_group_sz": pp} if gbs and batch and gbs // batch % pp else {}


def _exchange(keys: JobKeys, cp: int) -> dict[str, Any]:
    """How context-parallel ranks exchange keys and values, and over how many of them by all-to-all combined with a ring.

    Sizes: megatron/training/arguments.py, validate_args (their product is cp; needed with a2a+p2p). Groups of a single rank are
    none (TransformerEngine v2.9 context_parallel.py, attn_forward_func_with_cp).
    """
    kinds, sizes = set(keys.words("cp_comm_type")) or {"p2p"}, "hierarchical_context_parallel_sizes"
    known = load_table("megatron").rules["cp_comm_type"].words
    kind = known.get(next(iter(kinds))) if len(kinds) == 1 else None
    if kind is None:
        keys.approximate("cp_comm_type", "exchanges of several kinds: counted as a ring")
    if kind != "a2a+p2p":
        keys.without_effect(sizes, "only with --cp-comm-type a2a+p2p")
        return {"cp_comm_type": kind or "p2p"}
    said = [int(word) for word in keys.words(sizes) if word.isdecimal() and len(word) < 10]
    if len(said) != 2 or said[0] * said[1] != cp:
        keys.fail(sizes, f"a2a+p2p needs two sizes whose product is cp {cp} (got {keys.get(sizes)})")
        return {"cp_comm_type": "p2p"}
    if 1 in said:
        return {"cp_comm_type": "p2p" if said[0] == 1 else "a2a"}
    return {"cp_comm_type": kind, "cp_a2a": said[0]}


def _virtual_stages(keys: JobKeys, pp: int) -> int:
    """Model chunks per stage: given, or from the number of layers per chunk."""
    if layout := keys.get("pipeline_model_parallel_layout"):
        return max(1, len(stages_of(layout)) // pp)
    if "|" in (pattern := hybrid_pattern(keys)):
        return max(1, (pattern.count("|") + 1) // pp)
    if (said := keys.whole("virtual_pipeline_model_parallel_size")) is not None:
        return said
    name = "num_layers_per_virtual_pipeline_stage"
    per_chunk, layers = keys.whole(name), keys.whole("num_layers")
    if per_chunk is None or layers is None:
        return 1
    layers += keys.on("account_for_embedding_in_pipeline_split") + keys.on("account_for_loss_in_pipeline_split")
    if layers % (pp * per_chunk):
        keys.fail(name, f"{layers} layers are not a multiple of pp {pp} x {per_chunk}")
        return 1
    return layers // (pp * per_chunk)


_LAYERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def stages_of(layout: Any) -> list[str]:
    """The model chunks of a pipeline layout, in depth order: "Et*2|t|tL" is Ett, t and tL.

    Source: megatron/core/transformer/pipeline_parallel_layer_layout.py, PipelineParallelLayerLayout: E embedding, t decoder
    layer, m multi-token prediction, L loss; (...)*n and x*n repeat, commas are ignored. A list has the layers' names.

    >>> stages_of([["embedding", "decoder", "decoder"], ["decoder", "mtp", "loss"]])
    ['Ett', 'tmL']
    """
    if isinstance(layout, list) and all(isinstance(stage, list) for stage in layout):
        return ["".join(_LAYERS.get(str(layer), "?") for layer in stage) for stage in layout]
    text = str(layout).replace(",", "").replace(" ", "").strip("'\"")
    while found := re.search(r"\(([^()]*)\)(?:\*(\d+))?|([A-Za-z|])\*(\d+)", text):
        body, count = (found[1], found[2]) if found[3] is None else (found[3], found[4])
        if len(text) > 100_000:
            break
        text = text[: found.start()] + body * min(int(count or 1), 10_000) + text[found.end() :]
    return text.split("|")


def _stages(keys: JobKeys, pp: int, vpp: int) -> dict[str, Any]:
    """How layers are distributed if not evenly (core transformer/transformer_block.py, get_num_layers_to_build)."""
    if layout := keys.get("pipeline_model_parallel_layout"):
        stages = stages_of(layout)
        whole = re.fullmatch(r"Et*", stages[0]) and re.fullmatch(r"t*m*L", stages[-1])
        if not whole or "m" in "".join(stages[:-1]):
            keys.leave_out("pipeline_model_parallel_layout", "counted with embedding first, loss last")
        return {"layers_per_stage": [stage.count("t") for stage in stages]}
    if "|" in (pattern := hybrid_pattern(keys)):
        return {"layers_per_stage": [len(stage) for stage in pattern.split("|")]}
    layers, chunks = keys.whole("num_layers") or 0, pp * vpp
    if pp > 1 and (counts := [int(count) for count in keys.words("num_layer_list") if count.isdecimal()]):
        if len(counts) != chunks or sum(counts) != layers:
            keys.problem(f"{keys.name('num_layer_list')} does not distribute {layers} layers over {chunks} stages")
        return {"layers_per_stage": counts}
    if (partition := keys.get("pp_partition_method")) is not None and pp > 1:
        if "embed" in str(partition).lower():  # deepspeed/runtime/pipe/module.py, _partition_layers
            return {"embedding_and_loss_count_as_layers": True}
        if str(partition).lower() != "type:transformer":
            keys.approximate("pp_partition_method", "counted with layers distributed evenly")
    if keys.on("deepspeed") and pp > 1 and layers % pp:
        # the first stages have one more (deepspeed/runtime/utils.py, partition_balanced)
        return {"layers_per_stage": [layers // pp + (stage < layers % pp) for stage in range(pp)]}
    embedding, loss = (keys.on(f"account_for_{end}_in_pipeline_split") for end in ("embedding", "loss"))
    if embedding and loss:
        return {"embedding_and_loss_count_as_layers": True}
    if embedding or loss:
        even, rest = divmod(layers + 1, chunks)
        if rest:
            keys.problem(f"{layers} layers and one end cannot be distributed evenly over {chunks} chunks")
        return {"layers_per_stage": [even - (embedding and i == 0) - (loss and i == chunks - 1) for i in range(chunks)]}
    first, last = (keys.whole(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last"))
    if first is None and last is None:
        return {}
    middle = pp - (first is not None) - (last is not None)
    left = layers - (first or 0) - (last or 0)
    if left < 0 or (left and not middle) or (middle and left % middle):
        ends = f"{first or 0} first and {last or 0} last"
        keys.problem(f"{layers} layers less {ends} cannot be distributed evenly over {middle} stages")
        return {}
    each = left // max(middle, 1)
    counts = [first or each, *[each] * (pp - 2), last or each] if pp > 1 else [layers]
    if any(count % vpp for count in counts):
        keys.problem(f"stages of {counts} layers do not divide into {vpp} virtual stages")
    return {"layers_per_stage": [counts[i % pp] // vpp for i in range(chunks)]}


_WHOLE = 3
_STAGE_3 = "DeepSpeed's gathers of parameters (ZeRO stage 3) around Megatron's layers; stage 2 is counted"


def _states(keys: JobKeys) -> dict[str, Any]:
    """How optimizer states are sharded, and the buckets of gradients."""
    if keys.on("use_torch_fsdp2"):
        return _fully_shard(keys)
    level = int(keys.on("use_distributed_optimizer") or optimizer_of(keys) == "dist_muon")
    if keys.on("use_megatron_fsdp"):
        level = keys.word("data_parallel_sharding_strategy")
    if keys.on("deepspeed"):
        # DeepSpeed's BF16_Optimizer shards its states over data parallelism at stage 0 too (runtime/bf16_optimizer.py)
        level = max(int(keys.number("zero_stage")), int(keys.on("bf16")))
        if level == _WHOLE:
            keys.assumed_flags.append(LaunchFlag(keys.name("zero_stage"), str(level), "unmodeled", _STAGE_3))
            level -= 1
    section: dict[str, Any] = {} if "parallelism.zero_level" in keys.left_open else {"zero_level": level}
    if (copies := keys.whole("num_distributed_optimizer_instances") or 1) > 1:
        section["replicas"] = copies
    if buckets := keys.whole("ddp_num_buckets"):
        section["n_param_buckets"] = buckets
    elif size := keys.whole("ddp_bucket_size"):
        section["bucket_size_mb"] = size * (4 if main_grad_dtype(keys) == "fp32" else 2) / 1e6  # given in elements
    return section


def _fully_shard(keys: JobKeys) -> dict[str, Any]:
    """Options of --use-torch-fsdp2, Megatron-Core's layers under torch's fully_shard; what Megatron refuses with it is a problem.

    Source: megatron-core 0.16.1 distributed/torch_fully_sharded_data_parallel.py; NVIDIA/Megatron-LM@d98e8a64
    megatron/training/arguments.py, validate_args, alike in core_v0.12.0. Gradients are reduced in the dtype of the parameters,
    as no MixedPrecisionPolicy says otherwise.
    """
    for key, what in _REFUSED.items():
        if keys.on(key):
            keys.fail("use_torch_fsdp2", f"Megatron-LM does not support it with {what}")
    section: dict[str, Any] = {"reduce_dtype": plain_dtype(keys)}
    if not keys.on("torch_fsdp2_reshard_after_forward"):
        section["reshard_after_forward"] = False
    copies = keys.whole("data_parallel_replicate_degree") or 1  # of Primus
    return {"fsdp": section} | ({"replicas": copies} if copies > 1 else {})
