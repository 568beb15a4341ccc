"""Rules for what lies in host memory: activations of modules or of whole layers, optimizer states, parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptime.job.limits import Rule

if TYPE_CHECKING:
    from steptime.hardware.machine import Machine
    from steptime.software.performance import Performance, Software


OF_NO_PROFILE = (
    "offload_modules", "activation_offload", "bf16_layers_at_start", "bf16_layers_at_end", "saved_fp8_weights",
    "quantized_head",
)  # fmt: skip
"""Keys of `performance` that no profile sets; none where they are empty."""


def offload_facts(said: Performance, software: Software, machine: Machine) -> dict[str, Any]:
    """The facts about activations and states that are offloaded to host memory."""
    return {
        "cpu_offload": said.cpu_offload,
        "host": machine.host is not None,
        "offload": frozenset(said.offload_modules or ()),
        "bf16_layers": (said.bf16_layers_at_start or 0, said.bf16_layers_at_end or 0),
        "offload_share": float(said.activation_offload or 0.0),
        "host_link": machine.accelerator.host_bytes_per_s is not None,
        "graphs": bool(software.timing.cuda_graphs),
    }


HOST_LINK = (
    "the bandwidth between device and host memory of {f.machine} is unknown; "
    "set accelerator.host_bytes_per_s in hardware.overrides"
)
HOOKED = frozenset({"torch", "fsdp2", "deepspeed"})
"""Families whose activations torch's saved-tensor hooks can offload."""

OFFLOAD_RULES = [
    Rule(
        "offload framework",
        "performance.offload_modules",
        "is an option of Megatron-Core (got software {f.software}); remove it, or use megatron-core or a profile of its family",
        lambda f: (not f.offload) | (f.family == "megatron-core"),
    ),
    # megatron/core/transformer/transformer_config.py, __post_init__
    Rule(
        "offload of attn_proj",
        "performance.offload_modules",
        "attn_proj needs core_attn, which keeps its input too; add it, or remove attn_proj",
        lambda f: "attn_proj" not in f.offload or "core_attn" in f.offload,
    ),
    Rule(
        "offload of recomputed modules",
        "performance.offload_modules",
        "modules recomputed by granularity full, moe or core_attn cannot also be offloaded; remove them from one of the two",
        lambda f: (
            (not f.offload or f.granularity != "full")
            and not ("moe" in f.modules and f.offload & {"expert_fc1", "moe_act"})
            and not ("core_attn" in f.modules and "core_attn" in f.offload)
        ),
    ),
    Rule(
        "offload with sharded parameters or graphs",
        "performance.offload_modules",
        "not modeled yet with zero_level 2 and 3 or with cuda_graphs; use zero_level 1 and cuda_graphs false",
        lambda f: (not f.offload) | ((f.zero_level < 2) & (not f.graphs)),
    ),
    Rule("offload link", "performance.offload_modules", HOST_LINK, lambda f: (not f.offload) | f.host_link),
    Rule(
        "activation offload link",
        "performance.activation_offload",
        HOST_LINK,
        lambda f: (not f.offload_share) | f.host_link,
    ),
    Rule(
        "offloaded fraction",
        "performance.activation_offload",
        "must be true, false, or a fraction from 0 to 1 (got {f.offload_share:g}); use one of them",
        lambda f: 0.0 <= f.offload_share <= 1.0,
    ),
    Rule(
        "activation offload framework",
        "performance.activation_offload",
        "needs torch's saved-tensor hooks (got software {f.software}); use offload_modules, or fsdp2, torch or deepspeed",
        lambda f: (not f.offload_share) | (f.family in HOOKED),
    ),
    Rule(
        "activation offload with graphs or a split backward",
        "performance.activation_offload",
        "not modeled yet with cuda_graphs or with schedules that split backward; use cuda_graphs false and another schedule",
        lambda f: (not f.offload_share) | (not f.graphs and not f.split_backward),
    ),
    Rule(
        "activation offload of some layers",
        "performance.activation_offload",
        "not modeled yet with full recomputation of some layers, or of several layers per unit; recompute every layer "
        "(method uniform, n_layers 1), or none",
        lambda f: (
            not f.offload_share
            or f.granularity != "full"
            or (f.recompute_method in {"", "uniform"} and set(f.recompute_counts) <= {1})
        ),
    ),
    Rule(
        "states on the host, framework",
        "performance.cpu_offload",
        "{f.software} with zero_level {f.zero_level} is not modeled yet; use megatron-core with zero_level 1, FSDP2 or "
        "DeepSpeed with 3, or DeepSpeed with 1 or 2 and only {{optimizer: 1}}",
        lambda f: (
            (f.cpu_offload.share == 0.0)
            | (f.family == "megatron-core") & (f.zero_level == 1)
            | (f.family == "fsdp2") & (f.zero_level >= 2)
            | (f.family == "deepspeed") & (f.zero_level == 3)
            | (f.family == "deepspeed")
            & ((f.zero_level == 1) | (f.zero_level == 2))
            & (f.cpu_offload.share == 1.0)
            & (not f.cpu_offload.params)
        ),
    ),
    Rule(
        "states on the host, ranks in turn",
        "performance.cpu_offload.round_robin",
        "is an option of DeepSpeed at zero_level 1 and 2 (got {f.software}, {f.zero_level}); remove it",
        lambda f: (
            (not f.cpu_offload.round_robin) | (f.family == "deepspeed") & ((f.zero_level == 1) | (f.zero_level == 2))
        ),
    ),
    # DeepSpeed's pipelines: gradients of the first stages are copied while later ones compute
    Rule(
        "states on the host, DeepSpeed's pipelines",
        "performance.cpu_offload",
        "not modeled yet for DeepSpeed with pp {f.pp}; use pp 1",
        lambda f: (f.cpu_offload.share == 0.0) | (f.family != "deepspeed") | (f.pp == 1),
    ),
    Rule(
        "states on the host, FSDP",
        "performance.cpu_offload",
        "FSDP offloads parameters, gradients and optimizer states together, without overlap; use {{params: true}}",
        lambda f: (
            (f.cpu_offload.share == 0.0)
            | (f.family != "fsdp2")
            | (f.cpu_offload.params and f.cpu_offload.share == 1.0 and not f.cpu_offload.overlap)
        ),
    ),
    Rule(
        "states on the host, FSDP's pipelines",
        "performance.cpu_offload",
        "not modeled yet for FSDP with pp {f.pp}, or with optimizer {f.states.optimizer}; use pp 1 and adamw",
        lambda f: (f.cpu_offload.share == 0.0) | (f.family != "fsdp2") | (f.pp == 1) & (f.states.optimizer == "adamw"),
    ),
    # torch/distributed/fsdp/_runtime_utils.py, _accumulate_sharded_grad: sums of several micro-batches stay on the device
    Rule(
        "states on the host, FSDP 1",
        "performance.cpu_offload",
        "FSDP 1 accumulates gradients on the device, which is not modeled yet; use fsdp version 2, or one micro-batch",
        lambda f: (f.cpu_offload.share == 0.0) | (f.fsdp_version == 2) | (f.microbatches == 1),
    ),
    # megatron/training/arguments.py, validate_args: use_precision_aware_optimizer, which is Adam's; HybridDeviceOptimizer updates
    # fp32 copies with fp32 moments
    Rule(
        "states on the host, dtypes",
        "performance.cpu_offload",
        "needs adamw with fp32 gradients, masters and moments (got {f.states.optimizer}, {f.states.main_grad_dtype}, "
        "{f.states.master_dtype}, {f.states.moment_dtype}); set these, or remove cpu_offload",
        lambda f: (
            (f.cpu_offload.share == 0.0)
            | (f.family != "megatron-core")
            | (
                (f.states.optimizer == "adamw")
                & (f.states.main_grad_dtype == f.states.master_dtype == f.states.moment_dtype == "fp32")
            )
        ),
    ),
    # deepspeedai/DeepSpeed@edaa7221 deepspeed/ops/adam/cpu_adam.py
    Rule(
        "states on the host, DeepSpeedCPUAdam",
        "performance.cpu_offload",
        "DeepSpeedCPUAdam needs adamw, fp32 masters and moments, and overlap false (got {f.states.optimizer}, "
        "{f.states.master_dtype}, {f.states.moment_dtype}); set these, or remove cpu_offload",
        lambda f: (
            (f.cpu_offload.share == 0.0)
            | (f.family != "deepspeed")
            | (
                (f.states.optimizer == "adamw")
                & (f.states.master_dtype == f.states.moment_dtype == "fp32")
                & (not f.cpu_offload.overlap)
            )
        ),
    ),
    # megatron/training/arguments.py: --fp8-param-gather wants --fp8-recipe delayed
    Rule(
        "states on the host, fp8",
        "performance.cpu_offload",
        "fp8_params need precision fp8_delayed (got {f.precision}); use it, or fp8_params false",
        lambda f: (f.cpu_offload.share == 0.0) | (not f.states.fp8_params) | (f.precision == "fp8_delayed"),
    ),
    Rule(
        "parameters on the host",
        "performance.cpu_offload.params",
        "{f.software} cannot offload parameters; remove it",
        lambda f: (not f.cpu_offload.params) | (f.family != "megatron-core"),
    ),
    Rule(
        "states on the host, rates",
        "performance.cpu_offload",
        "the host memory bandwidth of {f.machine} is unknown; set accelerator.host_bytes_per_s and host.memory_bytes_per_s "
        "in hardware.overrides",
        lambda f: (f.cpu_offload.share == 0.0) | (f.host and f.host_link),
    ),
]
"""Reported with the layout rules."""
