"""Rules for a config's `performance` section: precision, dtypes of states, overlap, recomputation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptime.job.limits import Rule
from steptime.software.performance import EAGER_TORCH, load_software

if TYPE_CHECKING:
    from steptime.software.performance import Performance, Software

PERFORMANCE_RULES = [
    Rule(
        "machine has the precision",
        "performance.precision",
        "{f.machine} does not support {f.precision}; use one of {f.dtype_words} (--set performance.precision=...)",
        lambda f: f.precision in f.machine_dtypes,
    ),
    Rule(
        "framework has the recipe",
        "performance.precision",
        "{f.precision} is not modeled for {f.software}; use {f.recipe_words}",
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
        "FSDP gathers fp8 weights only with fp8_tensorwise (got {f.precision}); remove it",
        lambda f: (not f.states.fp8_params) | (f.family != "fsdp2") | (f.precision == "fp8_tensorwise"),
    ),
    # megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py, copy_main_weights_to_model_weights
    Rule(
        "fp8_params of Megatron-FSDP",
        "performance.fp8_params",
        "Megatron-FSDP stores parameters in fp8 only with zero_level 3 (got {f.zero_level}); use it, or remove fp8_params",
        lambda f: (not f.states.fp8_params) | (f.zero_level != 2) | (f.family != "megatron-core"),
    ),
    # pytorch/ao@ca17609a torchao/float8/float8_linear.py, Float8Linear.forward
    Rule(
        "saved_fp8_weights",
        "performance.saved_fp8_weights",
        "needs precision fp8_tensorwise without fp8_params (got {f.precision}); use false",
        lambda f: not f.saved_fp8_weights or (f.precision == "fp8_tensorwise" and not f.states.fp8_params),
    ),
    Rule(
        "saved_fp8_weights with recomputation",
        "performance.saved_fp8_weights",
        "recomputation casts weights again, and none is kept; use false, or no recomputation",
        lambda f: not f.saved_fp8_weights or (f.recompute is None and f.checkpoint_word in {None, "none"}),
    ),
    Rule(
        "remainder of bf16",
        "performance.master_dtype",
        "remainder stores the fp32 bits that bf16 drops, so param_dtype must be bf16 (got {f.states.param_dtype}); "
        "use bf16, or master_dtype fp32",
        lambda f: (f.states.master_dtype != "remainder") | (f.states.param_dtype == "bf16"),
    ),
    # torch.compile lowers flex_attention to its own kernel (torch/_inductor/kernel/flex)
    Rule(
        "flex_eager is not compiled",
        "performance.attention_kernel",
        "flex_eager is FlexAttention that nothing compiles, but compile is {f.kernels.compile}; use flex, or compile none",
        lambda f: (f.kernels.attention_kernel != "flex_eager") | (f.kernels.compile == "none"),
    ),
    Rule(
        "cuDNN's kernel on the device",
        "performance.attention_kernel",
        "cuDNN runs on NVIDIA devices only, and {f.machine} states no accelerator.compute_capability "
        "(got {f.attention_said[0]}); state it where the device is one, else use best, sdpa, fa2 or flex",
        lambda f: not (f.no_cudnn and (f.attention_said[0] or "").startswith("cudnn")),
    ),
    Rule(
        "cuDNN's back end on the device",
        "performance.attention_backend",
        "cuDNN runs on NVIDIA devices only, and {f.machine} states no accelerator.compute_capability; "
        "state it where the device is one, else use auto or direct",
        lambda f: not (f.no_cudnn and f.attention_said[1] == "cudnn"),
    ),
    Rule(
        "gathered logits of torch",
        "performance.gathered_logits",
        "true is modeled for torch and FSDP2 only (got {f.software}); remove it",
        lambda f: not f.torch_said[0] or f.family in EAGER_TORCH,
    ),
    Rule(
        "AdamW of torch",
        "performance.optimizer_impl",
        "foreach and for_loop are modeled for torch and FSDP2 only (got {f.software}); remove it",
        lambda f: not f.torch_said[1] or f.family in EAGER_TORCH,
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
        "{f.states.optimizer} updates whole tensors, which zero_level {f.zero_level} shards; use parallelism.zero_level 0",
        lambda f: (f.states.optimizer != "adafactor") | (f.zero_level == 0),
    ),
    Rule(
        "muon is not sharded",
        "performance.optimizer",
        "muon updates whole matrices, which zero_level {f.zero_level} shards; use parallelism.zero_level 0, dist_muon with 1, or "
        "FSDP2 without tp and experts",
        lambda f: (
            (f.states.optimizer != "muon")
            | (f.zero_level == 0)
            | ((f.family == "fsdp2") & (f.fsdp_version == 2) & (f.tp == 1) & (not f.moe))
        ),
    ),
    Rule(
        "dist_muon zero_level",
        "performance.optimizer",
        "dist_muon distributes whole matrices over data-parallel ranks; use parallelism.zero_level 1 (got {f.zero_level}), "
        "or muon",
        lambda f: (f.states.optimizer != "dist_muon") | (f.zero_level == 1),
    ),
    Rule(
        "dist_muon with replicas",
        "parallelism.replicas",
        "dist_muon does not run with replicas (got {f.replicas}); use 1",
        lambda f: (f.states.optimizer != "dist_muon") | (f.replicas == 1),
    ),
    Rule(
        "overlap fractions",
        "performance.overlap",
        "fractions must be between 0 and 1 (got {f.bad_shares}); use true, false or such a fraction",
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
        "has an effect only with granularity selective without modules, and performance.compile (got compile "
        "{f.kernels.compile}); set these, or remove it",
        lambda f: (
            f.recompute is None
            or f.recompute.memory_budget is None
            or (f.granularity == "selective" and not f.modules and f.kernels.compile != "none")
        ),
    ),
    Rule(
        "framework compiles",
        "performance.compile",
        "torch.compile of whole blocks is modeled for torch, FSDP2 and DeepSpeed only (got {f.software}); use none",
        lambda f: f.kernels.compile == "none" or f.family in {"torch", "fsdp2", "deepspeed"},
    ),
    Rule(
        "graph of torch's kernels",
        "performance.step_graph",
        "its nodes are torch's own kernels, of torch and FSDP2 without torch.compile (got {f.software}, compile "
        "{f.kernels.compile}); use none",
        lambda f: f.step_graph == "none" or (f.family in EAGER_TORCH and f.kernels.compile == "none"),
    ),
    Rule(
        "full keys",
        "performance.recompute.modules",
        "have an effect only with granularity selective (got granularity full); remove them, or use selective",
        lambda f: not (f.granularity == "full" and f.modules),
    ),
    # model/segments.py, segments_of: what a policy by op keeps decides about every other module
    Rule(
        "modules with a policy by op",
        "performance.recompute.modules",
        "per_op, per_op_all and per_op_resend decide on every op, so they go with core_attn only (got {f.module_words}); keep "
        "one of the three alone, or remove it",
        lambda f: not f.op_policies or (len(f.op_policies) == 1 and f.modules <= f.op_policies | {"core_attn"}),
    ),
    Rule(
        "recompute counts",
        "performance.recompute.n_layers",
        "expected one number, {f.pp} (per stage) or {f.chunks} (per chunk) (got {f.recompute_words}); give as many",
        lambda f: (
            (f.recompute is None or f.recompute.n_layers is None or len(f.recompute_counts) == 1)
            | (len(f.recompute_counts) == f.pp)
            | (len(f.recompute_counts) == f.chunks)
        ),
    ),
    Rule(
        "recompute counts positive",
        "performance.recompute.n_layers",
        "must be at least 1, or 0 with method block (got {f.recompute_words}); raise it",
        lambda f: min(f.recompute_counts, default=1) >= (0 if f.recompute_method == "block" else 1),
    ),
    Rule(
        "recompute of experts",
        "performance.recompute.modules",
        "moe, moe_act and shared_experts are of models with model.moe (got {f.module_words}); remove them",
        lambda f: f.moe or not f.modules & {"moe", "moe_act", "shared_experts"},
    ),
    Rule(
        "recompute of mla",
        "performance.recompute.modules",
        "mla_up_proj requires attention kind mla (got {f.attention}); remove it",
        lambda f: f.attention == "mla" or "mla_up_proj" not in f.modules,
    ),
]
"""Reported with the layout rules."""


def performance_facts(said: Performance, software: Software) -> dict[str, Any]:
    """The facts about what a plan itself says of its software."""
    usual, update = load_software(software.name), said.optimizer_impl
    whole = bool(said.gathered_logits) and not usual.comm.gathered_logits
    return {
        "attention_said": (said.attention_kernel, said.attention_backend),
        "torch_said": (whole, update not in {None, "fused", usual.states.optimizer_impl}),
        "step_graph": software.timing.step_graph,
        "checkpoint_word": said.activation_checkpointing_type,
        "recompute": said.recompute,
        "overlap": tuple((axis, float(share)) for axis, share in software.overlap if share is not None),
    }
