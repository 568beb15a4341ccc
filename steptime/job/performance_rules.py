"""Rules for a config's `performance` section: precision, dtypes of states, overlap, recomputation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptime.job.limits import Rule

if TYPE_CHECKING:
    from steptime.hardware.machine import Machine
    from steptime.software.performance import Performance, Software


def offload_facts(said: Performance, software: Software, machine: Machine) -> dict[str, Any]:
    """The facts about activations and states that are offloaded to host memory."""
    return {
        "cpu_offload": said.cpu_offload,
        "host": machine.host is not None,
        "offload": frozenset(said.offload_modules or ()),
        "host_link": machine.accelerator.host_bytes_per_s is not None,
        "graphs": bool(software.timing.cuda_graphs),
    }


PERFORMANCE_RULES = [
    Rule(
        "machine has the precision",
        "performance.precision",
        "{f.machine} does not support {f.precision}; use one of {f.dtype_words}",
        lambda f: f.precision in f.machine_dtypes,
    ),
    Rule(
        "framework has the recipe",
        "performance.precision",
        "{f.software} does not run {f.precision}; use {f.recipe_words}",
        lambda f: (not f.recipe) | (f.precision in f.framework.recipes),
    ),
    # megatron/core/transformer/transformer_config.py, __post_init__: "Delayed scaling does not support moe_act and layernorm"
    Rule(
        "norms under delayed scaling",
        "performance",
        "Megatron-Core does not recompute layernorm under {f.precision}; use fp8_current, or other modules",
        lambda f: (
            f.precision != "fp8_delayed" or not (f.checkpoint_word == "super-selective" or "layernorm" in f.modules)
        ),
    ),
    Rule(
        "fp8_params",
        "performance.fp8_params",
        "needs a low-precision recipe (got precision {f.precision}); remove it",
        lambda f: (not f.states.fp8_params) | f.recipe,
    ),
    # pytorch/ao torchao/float8/config.py, Float8LinearConfig.__post_init__: enable_fsdp_float8_all_gather needs tensorwise scales
    Rule(
        "fp8_params of torchao",
        "performance.fp8_params",
        "FSDP gathers fp8 weights with fp8_tensorwise alone (got {f.precision}); remove it",
        lambda f: (not f.states.fp8_params) | (f.family != "fsdp2") | (f.precision == "fp8_tensorwise"),
    ),
    Rule(
        "remainder of bf16",
        "performance.master_dtype",
        "remainder stores the fp32 bits that bf16 drops, so param_dtype must be bf16 (got {f.states.param_dtype})",
        lambda f: (f.states.master_dtype != "remainder") | (f.states.param_dtype == "bf16"),
    ),
    Rule(
        "framework has the optimizer",
        "performance.optimizer",
        "{f.software} does not run {f.states.optimizer}; use {f.framework.optimizer_words}",
        lambda f: f.states.optimizer in f.framework.optimizers,
    ),
    # megatron/core/optimizer/__init__.py: Muon under use_distributed_optimizer is the layer-wise one
    Rule(
        "optimizer needs whole tensors",
        "performance.optimizer",
        "{f.states.optimizer} updates whole tensors, which zero_level {f.zero_level} cuts; use parallelism.zero_level 0",
        lambda f: (f.states.optimizer != "adafactor") | (f.zero_level == 0),
    ),
    Rule(
        "muon is not sharded",
        "performance.optimizer",
        "muon updates whole matrices, which zero_level {f.zero_level} cuts; use parallelism.zero_level 0, or dist_muon with 1",
        lambda f: (f.states.optimizer != "muon") | (f.zero_level == 0),
    ),
    Rule(
        "dist_muon deals out",
        "performance.optimizer",
        "dist_muon deals out whole matrices to data-parallel ranks; use parallelism.zero_level 1 (got {f.zero_level}), or muon",
        lambda f: (f.states.optimizer != "dist_muon") | (f.zero_level == 1),
    ),
    Rule(
        "dist_muon with replicas",
        "parallelism.replicas",
        "dist_muon does not run with replicas (got {f.replicas}); use 1",
        lambda f: (f.states.optimizer != "dist_muon") | (f.replicas == 1),
    ),
    Rule(
        "shares",
        "performance.overlap",
        "fractions must be between 0 and 1 (got {f.bad_shares})",
        lambda f: not f.bad_shares,
    ),
    Rule(
        "one recompute",
        "performance.recompute",
        "conflicts with activation_checkpointing_type {f.checkpoint_word!r}; use one",
        lambda f: (f.recompute is None) | (f.checkpoint_word is None),
    ),
    Rule(
        "selective keys",
        "performance.recompute",
        "method and n_layers belong to granularity full; selective takes modules",
        lambda f: not (f.granularity == "selective" and (f.recompute_method or f.recompute_counts)),
    ),
    Rule(
        "memory budget",
        "performance.recompute.memory_budget",
        "belongs to granularity selective without modules, and to performance.compile (got compile {f.compiled})",
        lambda f: (
            f.recompute is None
            or f.recompute.memory_budget is None
            or (f.granularity == "selective" and not f.modules and f.compiled != "none")
        ),
    ),
    Rule(
        "framework compiles",
        "performance.compile",
        "torch.compile of whole blocks is modeled for torch and FSDP2 only (got {f.software}); use none",
        lambda f: f.compiled == "none" or f.family in {"torch", "fsdp2"},
    ),
    Rule(
        "full keys",
        "performance.recompute.modules",
        "belong to granularity selective (got granularity full)",
        lambda f: not (f.granularity == "full" and f.modules),
    ),
    Rule(
        "recompute counts",
        "performance.recompute.n_layers",
        "expected one number, {f.pp} (per stage) or {f.chunks} (per chunk) (got {f.recompute_words})",
        lambda f: (
            (f.recompute is None or f.recompute.n_layers is None or len(f.recompute_counts) == 1)
            | (len(f.recompute_counts) == f.pp)
            | (len(f.recompute_counts) == f.chunks)
        ),
    ),
    Rule(
        "recompute counts positive",
        "performance.recompute.n_layers",
        "must be at least 1, or 0 with method block (got {f.recompute_words})",
        lambda f: min(f.recompute_counts, default=1) >= (0 if f.recompute_method == "block" else 1),
    ),
    Rule(
        "recompute of experts",
        "performance.recompute.modules",
        "require model.moe (got {f.module_words})",
        lambda f: f.moe or not f.modules & {"moe", "moe_act", "shared_experts"},
    ),
    Rule(
        "offload framework",
        "performance.offload_modules",
        "is Megatron-Core's (got software {f.software}); remove it, or use megatron-core or a profile of its family",
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
        "offload of what runs again",
        "performance.offload_modules",
        "what granularity full, moe or core_attn run again cannot be offloaded too; remove it from one of them",
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
    Rule(
        "offload link",
        "performance.offload_modules",
        "{f.machine} does not say how fast its host's memory is reached; set accelerator.host_bytes_per_s in hardware.overrides",
        lambda f: (not f.offload) | f.host_link,
    ),
    Rule(
        "states on the host, framework",
        "performance.cpu_offload",
        "{f.software} with zero_level {f.zero_level} is not modeled yet; use megatron-core with zero_level 1, or FSDP2 or "
        "DeepSpeed with 3",
        lambda f: (
            (f.cpu_offload.share == 0.0)
            | (f.family == "megatron-core") & (f.zero_level == 1)
            | (f.family == "fsdp2") & (f.zero_level >= 2)
            | (f.family == "deepspeed") & (f.zero_level == 3)
        ),
    ),
    Rule(
        "states on the host, FSDP",
        "performance.cpu_offload",
        "FSDP puts parameters, gradients and optimizer states there together, after each micro-batch; use {{params: true}}",
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
        "FSDP 1 keeps sums of gradients on the device, which is not modeled yet; use fsdp version 2, or one micro-batch",
        lambda f: (f.cpu_offload.share == 0.0) | (f.fsdp_version == 2) | (f.microbatches == 1),
    ),
    # megatron/training/arguments.py, validate_args: use_precision_aware_optimizer, which is Adam's; HybridDeviceOptimizer updates
    # fp32 copies with fp32 moments
    Rule(
        "states on the host, dtypes",
        "performance.cpu_offload",
        "needs adamw with fp32 gradients, masters and moments (got {f.states.optimizer}, {f.states.main_grad_dtype}, "
        "{f.states.master_dtype}, {f.states.moment_dtype})",
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
        "DeepSpeedCPUAdam wants adamw, fp32 masters and moments, and no other overlap (got {f.states.optimizer}, "
        "{f.states.master_dtype}, {f.states.moment_dtype})",
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
        "{f.software} has no parameters on the host; remove it",
        lambda f: (not f.cpu_offload.params) | (f.family != "megatron-core"),
    ),
    Rule(
        "states on the host, rates",
        "performance.cpu_offload",
        "{f.machine} does not say how fast its host is; set accelerator.host_bytes_per_s and host.memory_bytes_per_s "
        "in hardware.overrides",
        lambda f: (f.cpu_offload.share == 0.0) | (f.host and f.host_link),
    ),
    Rule(
        "recompute of mla",
        "performance.recompute.modules",
        "mla_up_proj requires attention kind mla",
        lambda f: f.attention == "mla" or "mla_up_proj" not in f.modules,
    ),
]
"""Reported with the layout rules."""
