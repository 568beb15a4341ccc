"""Settings of Megatron-Core that say how fast it runs: precision, kernels, recomputation, overlap, optimizer states.

Sources as in `mcore.py`; recipes: megatron-core 0.16.1 fp8_utils.py, get_fp8_recipe.
"""

from __future__ import annotations

from typing import Any

from steptime.launch.keys import Values
from steptime.launch.reading import Status

Changes = dict[str, tuple[Status, str]]
_RECIPES = {"delayed": "fp8_delayed", "tensorwise": "fp8_current", "blockwise": "fp8_blockwise", "mxfp8": "mxfp8"}
_MODULES = {"core_attn", "layernorm", "mlp"}
_EXPERT_MODULES = {"moe_act", "moe", "shared_experts", "mla_up_proj"}
_DTYPES = {
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": "fp16",
}
_BACKENDS = {"flash": "flash", "fused": "flash", "auto": "flash", "unfused": "unfused", "local": "unfused"}
_ENUM = ["", "flash", "fused", "unfused", "local", "auto"]
"""AttnBackend's numbers (megatron/core/transformer/enums.py)."""


def performance_of(values: Values, changes: Changes) -> dict[str, Any]:
    """The performance section, all but the profile."""
    section = precision_of(values, changes) | recompute_of(values, changes) | kernels_of(values)
    section |= states_of(values, changes)
    return section | {"overlap": overlap_of(values, changes)}


def _said(values: Values, name: str) -> Any:
    """A setting of mixed_precision, which is put over the model's."""
    found = values.get(f"mixed_precision.{name}")
    return values.get(f"model.{name}") if found is None else found


def plain_dtype(values: Values) -> str:
    """The dtype of all that no recipe quantises."""
    return "bf16" if _said(values, "bf16") else "fp16" if _said(values, "fp16") else "fp32"


def precision_of(values: Values, changes: Changes) -> dict[str, Any]:
    """bf16, fp16, fp32, or a low-precision recipe with its stored parameters."""

    def said(name: str) -> Any:
        return _said(values, name)

    plain, fp8, fp4 = plain_dtype(values), said("fp8"), said("fp4")
    if not fp8 and not fp4:
        for section in ("model", "mixed_precision"):
            for name in (
                "fp8_recipe",
                "fp8_param",
                "fp8_param_gather",
                "fp4_recipe",
                "fp4_param",
                "first_last_layers_bf16",
            ):
                changes[f"{section}.{name}"] = ("irrelevant", "only with fp8 or fp4")
        return {"precision": plain}
    if said("first_last_layers_bf16"):
        for section in ("model", "mixed_precision"):
            changes[f"{section}.first_last_layers_bf16"] = (
                "unmodelled",
                "some layers in bf16; taken as all low-precision",
            )
    if fp4:
        return {"precision": "nvfp4"}
    values.values["model.fp8_recipe"] = said("fp8_recipe") or "delayed"
    recipe = values.word("model.fp8_recipe", _RECIPES)
    stored = values.yes("mixed_precision.fp8_param_gather", default=bool(said("fp8_param")))
    return {"precision": recipe, "fp8_params": stored}


def recompute_of(values: Values, changes: Changes) -> dict[str, Any]:
    """Recomputation."""
    granularity = values.get("model.recompute_granularity")
    if granularity is None:
        for name in ("method", "num_layers", "modules"):
            changes[f"model.recompute_{name}"] = ("irrelevant", "only with recompute_granularity")
        return {"activation_checkpointing_type": "none"}
    found = values.word("model.recompute_granularity", {"full": "full", "selective": "selective"})
    if found == "full":
        changes["model.recompute_modules"] = ("irrelevant", "only with recompute_granularity selective")
        recompute: dict[str, Any] = {"granularity": "full"}
        words = {"uniform": "uniform", "block": "block"}
        if values.get("model.recompute_method") is not None:
            recompute["method"] = values.word("model.recompute_method", words)
        if values.get("model.recompute_num_layers") is not None:
            recompute["n_layers"] = values.whole("model.recompute_num_layers", least=0)
        return {"recompute": recompute}
    modules = values.get("model.recompute_modules") or ["core_attn"]
    modules = [str(name) for name in modules] if isinstance(modules, list) else [str(modules)]
    strange = [name for name in modules if name not in _MODULES | _EXPERT_MODULES]
    if strange:
        raise values.fail("model.recompute_modules", f"unknown module (got {strange[0]!r})")
    kept = [name for name in modules if name in _MODULES]
    if not kept:
        return {"activation_checkpointing_type": "none"}
    return {"recompute": {"granularity": "selective", "modules": kept}}


def kernels_of(values: Values) -> dict[str, Any]:
    """Which kernels are fused."""
    graphs = str(values.get("model.cuda_graph_impl") or "none") != "none"
    fused_loss = values.yes("model.cross_entropy_loss_fusion") and values.get("model.cross_entropy_fusion_impl") == "te"
    # megatron/core/activations.py, squared_relu: compiled, whatever is said of the others
    compiled = str(values.get("model.activation_func")).endswith("squared_relu") and not values.yes(
        "model.gated_linear_unit"
    )
    section: dict[str, Any] = {
        "rope_impl": "fused" if values.yes("model.apply_rope_fusion") else "own_tables",
        "activation_impl": "fused" if compiled or values.yes("model.bias_activation_fusion") else "composite",
        # the native fusion keeps fp32 logits too (core tensor_parallel/cross_entropy.py)
        "loss_impl": "fused" if fused_loss else "composite",
        "grad_accumulation_fusion": values.yes("model.gradient_accumulation_fusion"),
        "cuda_graphs": graphs or values.yes("model.enable_cuda_graph") or values.yes("model.external_cuda_graph"),
    }
    if (backend := values.get("model.attention_backend")) is not None:
        name = str(backend).rpartition(".")[2]
        number = name.rpartition("(")[2].rstrip(")")
        values.values["model.attention_backend"] = _ENUM[int(number)] if number in {"1", "2", "3", "4", "5"} else name
        section["attention_impl"] = values.word("model.attention_backend", _BACKENDS)
    if values.get("model.masked_softmax_fusion") is not None:
        section["softmax_impl"] = "fused" if values.yes("model.masked_softmax_fusion") else "composite"
    if values.get("model.deallocate_pipeline_outputs") is not None:
        section["deallocate_pipeline_outputs"] = values.yes("model.deallocate_pipeline_outputs")
    return section


def states_of(values: Values, changes: Changes) -> dict[str, Any]:
    """Dtypes of main gradients, master weights and moments."""
    if values.get("mixed_precision.grad_reduce_in_fp32") is not None:
        changes["ddp.grad_reduce_in_fp32"] = ("irrelevant", "mixed_precision.grad_reduce_in_fp32 is put over it")
    in_fp32 = values.yes("mixed_precision.grad_reduce_in_fp32", default=values.yes("ddp.grad_reduce_in_fp32"))
    plain = plain_dtype(values)
    section: dict[str, Any] = {"main_grad_dtype": "fp32" if in_fp32 else plain}
    if str(values.get("optimizer.optimizer")) not in {"adam", "adamw"}:
        changes["optimizer.optimizer"] = ("unmodelled", "states of another optimizer; taken as Adam's")
    aware = values.yes("optimizer.use_precision_aware_optimizer")
    if not aware:
        for name in ("store_param_remainders", "exp_avg_dtype", "exp_avg_sq_dtype"):
            changes[f"optimizer.{name}"] = ("irrelevant", "only with use_precision_aware_optimizer")
        return section
    if values.yes("optimizer.store_param_remainders", default=True) and plain == "bf16":
        section["master_dtype"] = "remainder"
    moments = [
        values.word(f"optimizer.{name}", _DTYPES)
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype")
        if values.get(f"optimizer.{name}") is not None
    ]
    if len(set(moments)) > 1:
        changes["optimizer.exp_avg_sq_dtype"] = ("unmodelled", f"moments of two dtypes; taken as {moments[0]}")
    return section | ({"moment_dtype": moments[0]} if moments else {})


def overlap_of(values: Values, changes: Changes) -> dict[str, Any]:
    """What hides under compute: comm_overlap's word is put over the model's and ddp's."""

    def said(name: str, otherwise: str) -> bool:
        return values.yes(f"comm_overlap.{name}", default=values.yes(otherwise))

    reduce = said("overlap_grad_reduce", "ddp.overlap_grad_reduce")
    gather = said("overlap_param_gather", "ddp.overlap_param_gather")
    for name, other in (("tp_comm_overlap", "model"), ("overlap_p2p_comm", "model"), ("overlap_grad_reduce", "ddp")):
        if values.get(f"comm_overlap.{name}") is not None:
            changes[f"{other}.{name}"] = ("irrelevant", f"comm_overlap.{name} is put over it")
    told = (
        values.get("ddp.overlap_param_gather") is not None
        or values.get("comm_overlap.overlap_param_gather") is not None
    )
    if told and gather != reduce:
        words = "hidden" if reduce else "exposed"
        changes["ddp.overlap_param_gather"] = (
            "unmodelled",
            f"one of gather and reduction is hidden; both taken as {words}",
        )
    overlap: dict[str, Any] = {"tp": said("tp_comm_overlap", "model.tp_comm_overlap"), "dp": reduce}
    if values.whole("model.virtual_pipeline_model_parallel_size", 1) > 1:
        overlap["pp"] = said("overlap_p2p_comm", "model.overlap_p2p_comm")
    return overlap
