"""The `parallelism` section of a Megatron-LM job."""

from __future__ import annotations

import re
from typing import Any

from steptime.launch.megatron_flags import Arguments

_SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def layout_section(arguments: Arguments, devices: int | None) -> dict[str, Any]:
    """Degrees, the spread of layers and of states; without a number of devices, dp is left for the Job to ask for."""
    a = arguments
    tp = a.at_least_one("tensor_model_parallel_size") or 1
    if "tensor_model_parallel_size" not in a.said:
        tp = a.at_least_one("model_parallel_size") or 1
    pp, cp = a.at_least_one("pipeline_model_parallel_size") or 1, a.at_least_one("context_parallel_size") or 1
    section: dict[str, Any] = {"tp": tp, "pp": pp}
    if devices is not None:
        dp, rest = divmod(devices, tp * pp * cp)
        if rest or dp == 0:
            words = f"tp {tp} x pp {pp}" + (f" x cp {cp}" if cp > 1 else "")
            fix = "" if "world_size" in a.said else "; for other nodes than the script's add --set parallelism.dp=N"
            a.problems.append(f"world size {devices} is no multiple of {words} = {tp * pp * cp}{fix}")
        section["dp"] = max(dp, 1)
        said = a.whole("data_parallel_size") if "data_parallel_size" in a.said else None
        if said is not None and said != dp and not rest:
            a.problems.append(f"data_parallel_size {said} contradicts world size {devices}, which leaves {dp}")
    if cp > 1:
        section |= {"cp": cp} | _exchange(a)
    vpp = _virtual_stages(a, pp)
    if vpp > 1:
        section["vpp"] = vpp
    section["sp"] = a.on("sequence_parallel") and tp > 1
    section |= _stages(a, pp, vpp) | _states(a)
    if (group := a.whole("microbatch_group_size_per_vp_stage")) is not None and group != pp:
        a.leave_out("microbatch_group_size_per_vp_stage", f"groups of pp = {pp} micro-batches are counted")
    elif group is not None:
        a.without_effect("microbatch_group_size_per_vp_stage", "what is counted")
    return section


def _exchange(a: Arguments) -> dict[str, Any]:
    kinds = set(a.words("cp_comm_type"))
    known = {"p2p": "p2p", "a2a": "a2a", "allgather": "all_gather", "all_gather": "all_gather"}
    if len(kinds) == 1 and (kind := known.get(next(iter(kinds)))):
        return {"cp_comm_type": kind}
    a.leave_out("cp_comm_type", "exchanges of several kinds: a ring is counted")
    return {"cp_comm_type": "p2p"}


def _virtual_stages(a: Arguments, pp: int) -> int:
    """Model chunks of a stage: said, or from the layers of a chunk."""
    if layout := a.text("pipeline_model_parallel_layout"):
        return max(1, len(stages_of(layout)) // pp)
    if (said := a.at_least_one("virtual_pipeline_model_parallel_size")) is not None:
        return said
    if (said := a.at_least_one("num_virtual_stages_per_pipeline_rank")) is not None:
        return said
    per_chunk = a.at_least_one("num_layers_per_virtual_pipeline_stage")
    layers = a.at_least_one("num_layers") or a.at_least_one("encoder_num_layers")
    if per_chunk is None or layers is None:
        return 1
    layers += a.on("account_for_embedding_in_pipeline_split") + a.on("account_for_loss_in_pipeline_split")
    if layers % (pp * per_chunk):
        name = a.name("num_layers_per_virtual_pipeline_stage")
        a.problems.append(f"{name}: {layers} layers are no multiple of pp {pp} x {per_chunk}")
        return 1
    return layers // (pp * per_chunk)


def stages_of(layout: str) -> list[str]:
    """The model chunks of a pipeline layout, in depth order: "Et*2|t|tL" is Ett, t and tL.

    Source: megatron/core/transformer/pipeline_parallel_layer_layout.py, PipelineParallelLayerLayout: E embedding, t decoder
    layer, m multi-token prediction, L loss; (...)*n and x*n repeat, commas mean nothing.
    """
    text = layout.replace(",", "").replace(" ", "").strip("'\"")
    while found := re.search(r"\(([^()]*)\)(?:\*(\d+))?|([A-Za-z|])\*(\d+)", text):
        body, count = (found[1], found[2]) if found[3] is None else (found[3], found[4])
        if len(text) > 100_000:
            break
        text = text[: found.start()] + body * min(int(count or 1), 10_000) + text[found.end() :]
    return text.split("|")


def _stages(a: Arguments, pp: int, vpp: int) -> dict[str, Any]:
    """How layers are spread where not evenly."""
    if layout := a.text("pipeline_model_parallel_layout"):
        stages = stages_of(layout)
        if not re.fullmatch(r"Et*", stages[0]) or not re.fullmatch(r"t*L", stages[-1]) or "m" in "".join(stages):
            a.leave_out("pipeline_model_parallel_layout", "embedding first and loss last are counted")
        return {"layers_per_stage": [stage.count("t") for stage in stages]}
    layers = a.at_least_one("num_layers") or a.at_least_one("encoder_num_layers") or 0
    embedding, loss = a.on("account_for_embedding_in_pipeline_split"), a.on("account_for_loss_in_pipeline_split")
    if embedding and loss:
        return {"embedding_and_loss_count_as_layers": True}
    chunks = pp * vpp
    if embedding or loss:
        even, rest = divmod(layers + 1, chunks)
        if rest:
            a.problems.append(f"{layers} layers and one end do not spread evenly over {chunks} chunks")
        return {"layers_per_stage": [even - (embedding and i == 0) - (loss and i == chunks - 1) for i in range(chunks)]}
    first = a.at_least_one("decoder_first_pipeline_num_layers") or a.at_least_one("num_layers_in_first_pipeline_stage")
    last = a.at_least_one("decoder_last_pipeline_num_layers") or a.at_least_one("num_layers_in_last_pipeline_stage")
    if first is None and last is None:
        return {}
    middle = pp - (first is not None) - (last is not None)
    left = layers - (first or 0) - (last or 0)
    if left < 0 or (left and not middle) or (middle and left % middle):
        a.problems.append(
            f"{layers} layers less {first or 0} first and {last or 0} last do not spread over {middle} stages"
        )
        return {}
    counts = [first or left // middle, *[left // middle] * (pp - 2), last or left // middle] if pp > 1 else [layers]
    if any(count % vpp for count in counts):
        a.problems.append(f"stages of {counts} layers do not divide into {vpp} virtual stages")
    return {"layers_per_stage": [counts[i % pp] // vpp for i in range(chunks)]}


def _states(a: Arguments) -> dict[str, Any]:
    """How optimizer states are spread, and the buckets of gradients."""
    level = int(a.on("use_distributed_optimizer"))
    if a.on("use_megatron_fsdp") or a.on("use_custom_fsdp"):
        level = _SHARDING.get(a.text("data_parallel_sharding_strategy") or "", level)
    if a.on("use_torch_fsdp2"):
        level = 3 if a.on("torch_fsdp2_reshard_after_forward") else 2
    section: dict[str, Any] = {"zero_level": level}
    if (copies := a.at_least_one("num_distributed_optimizer_instances") or 1) > 1:
        section["replicas"] = copies
    if buckets := a.at_least_one("ddp_num_buckets"):
        section["n_param_buckets"] = buckets
    elif size := a.at_least_one("ddp_bucket_size") or a.at_least_one("bucket_size"):
        section["bucket_size_mb"] = size  # elements; `megatron` makes bytes of them
    return section
