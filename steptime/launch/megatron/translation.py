"""Megatron's settings as a plan: one translation for all sources."""

from __future__ import annotations

from typing import Any

from steptime.base.config import ConfigError, build
from steptime.job.edit import read_model
from steptime.launch.devices import SET_DEVICES, told
from steptime.launch.job_keys import JobKeys
from steptime.launch.megatron.adapter_section import adapter_section
from steptime.launch.megatron.expert_layers import has_experts
from steptime.launch.megatron.model_section import data_section, model_section
from steptime.launch.megatron.parallelism_section import layout_section
from steptime.launch.megatron.performance_section import OLDER, performance_section
from steptime.launch.megatron.torch_fsdp import profile_of
from steptime.launch.reading import Reading
from steptime.model.model import Model


def _of_model(keys: JobKeys) -> None:
    """What degrees and stages need from a model given by name: layers and experts."""
    if told(keys.sets, "model") is None:
        return
    try:
        model = build(Model, read_model(told(keys.sets, "model")))
    except ConfigError:  # problems are counted with the whole plan
        return
    experts = model.moe
    sizes = {"num_layers": model.n_layers, "num_experts": experts and experts.n_experts}
    if experts is not None and experts.shared_expert_inter_sz:
        sizes["moe_shared_expert_intermediate_size"] = experts.shared_expert_inter_sz
    for key, size in sizes.items():
        if size is not None and keys.get(key) is None:
            keys.put(key, size, by="the model")


def plan_of(keys: JobKeys, software: str, devices: int | None) -> Reading:
    """The plan of a job on this number of devices (None: not given) with the defaults of a software profile.

    Raises:
        ConfigError: one line per problem: missing or contradictory settings, values that Megatron does not take.
    """
    _of_model(keys)
    software = profile_of(keys, software)
    if software.partition("@")[0] in OLDER and has_experts(keys):
        keys.leave_out("num_experts", "mixture of experts of older releases and DeepSpeed")
        keys.put("num_experts", None)
    layout = layout_section(keys, devices)
    performance = performance_section(keys, layout, software)
    model = told(keys.sets, "model")
    if model is None:
        model = model_section(keys)
    if adapters := adapter_section(keys, model, layout, str(performance.get("precision", "bf16"))):
        model = ({"preset": model} if isinstance(model, str) else model) | {"lora": adapters}
    data = data_section(keys, layout.get("dp"))
    config: dict[str, Any] = {"model": model, "parallelism": layout, "performance": performance, "data": data}
    open_keys = {
        "parallelism.dp": f"number of devices unknown; {SET_DEVICES}",
        "model.vocab_sz": "vocabulary size unknown; add --set model.vocab_sz=N",
        "data.gbs": "global batch size unknown; add --set data.gbs=N",
        "data.seqlen": "sequence length unknown; add --set data.seqlen=N",
    }
    if "dp" not in layout and "microbatch_sz" in data:  # then one micro-batch on each replica
        del open_keys["data.gbs"]
    if "model" in keys.left_open or "preset" in model:
        del open_keys["model.vocab_sz"]
    return keys.reading(config, open_keys)
