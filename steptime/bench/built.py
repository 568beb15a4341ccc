"""Plan keys that the benchmark's torch modules do not build: such keys are refused, since a different model would run.

A key of the model is refused unless it is named here, so that keys added to plans later are refused as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TypeAlias

from steptime.job.job import Job
from steptime.model.model import AttentionKind, Model
from steptime.software.performance import load_software

Limit: TypeAlias = tuple[bool, str, str]
"""Whether the job violates it, the problem, the fix."""
PLAIN_KEYS = frozenset({
    "name", "source", "n_layers", "hidden_sz", "inter_sz", "n_q_heads", "n_kv_heads", "head_dim", "vocab_sz", "max_positions",
    "glu", "activation", "norm", "bias", "qkv_bias", "norm_bias", "qk_norm", "rotary_embeds", "learned_positions", "dropout",
    "attention_dropout", "tie_embeddings", "attention",
})  # fmt: skip
"""Keys of `model` whose values the modules all build; those of `model.attention` are checked one by one."""
PARTS_OF = {
    "mamba": "hybrid_pattern",
    "qk_norm_type": "qk_norm",
    "window_pattern": "window",
    "chunked": "window",
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), "kind"),
}
"""Keys that have no effect without another one."""
VALUES: dict[str, tuple[Any, ...]] = {
    "precision": ("bf16", "fp16", "fp32"),
    "attention_kernel": ("fa2",),
    "loss_impl": ("composite", "fused"),
    "recompute_stops_early": (True,),
    "compile": ("none",),
    "dummy_wgrads": ("none",),
    "step_graph": ("none",),
    "loss_chunks": (1,),
    "gathered_logits": (False,),
    "vocab_multiple": (1,),
    "deferred_head_wgrads": (0,),
    "te_workspaces": (0,),
    "grouped_workspaces": (0,),
    "fp8_params": (False,),
    "deterministic": (False,),
    "scores_in_buffer": (False,),
    "attention_mask": (False,),
    "batches_stay": (False,),
    "repeat_kv": (False,),
    "qk_norm_gathered": (False,),
}
"""Switches that the steps do not follow, and that have no check in `runnable`: the values with which the steps run."""


def model_limits(job: Job) -> Iterator[Limit]:
    """Parts of the model that the modules lack."""
    model = job.model
    for path, section in (("model", model), ("model.attention", model.attention)):
        for key, usual in _usual(section).items():
            text = f"{path}.{key}: the benchmark's blocks have only plain attention and one dense MLP"
            also = " --set model.mamba=null" if key == "hybrid_pattern" else ""
            yield getattr(section, key) != usual and _matters(job, key), text, _set(f"{path}.{key}", usual) + also
    text = "model.qk_norm_type: the benchmark normalizes q and k per head only"
    yield model.whole_qk_norm, text, _set("model.qk_norm_type", "per_head")


def _usual(section: Model | AttentionKind) -> dict[str, Any]:
    """Keys that the modules do not read, and the value of each that changes nothing."""
    fields, read = type(section).model_fields, PLAIN_KEYS | PARTS_OF.keys()
    return {key: field.default for key, field in fields.items() if key not in read}


def _matters(job: Job, key: str) -> bool:
    """Whether a key has an effect on a sequence of this length."""
    return key != "window" or (job.model.attention.window or 0) < job.data.seqlen


def performance_limits(job: Job) -> Iterator[Limit]:
    """Parts of `performance` that the steps lack."""
    s, said, plan = job.software, job.performance, job.recompute
    profile, settings = load_software(s.family), s.settings()
    idle = {"recompute_stops_early"} if plan.granularity == "none" else set[str]()
    idle |= {"attention_kernel"} if s.kernels.attention_impl == "unfused" else set()
    for key, values in VALUES.items():
        text = f"performance.{key}: the benchmark runs {' or '.join(map(_written, values))} (got {_written(settings[key])})"
        yield settings[key] not in values and key not in idle, text, _set(f"performance.{key}", values[0])
    text = "performance.software: the benchmark runs q, k, v, gate and up as separate matrix multiplies"
    yield bool(s.kernels.fused_projections), text, _set("performance.software", s.family)
    for key, none in (
        ("offload_modules", None),
        ("activation_offload", False),
        ("bf16_layers_at_start", 0),
        ("bf16_layers_at_end", 0),
    ):
        text = f"performance.{key}: not supported by the benchmark's steps"
        yield bool(getattr(said, key)), text, _set(f"performance.{key}", none)
    text = "performance.cpu_offload: the benchmark keeps all states on the device"
    yield said.cpu_offload.share > 0.0, text, _set("performance.cpu_offload", {})
    text = "performance.recompute.method: the benchmark recomputes layers by uniform or block (got every)"
    yield plan.method == "every", text, _set("performance.recompute.method", "block")
    for axis in ("tp", "dp", "pp"):
        value, usual = getattr(s.overlap, axis), getattr(profile.overlap, axis)
        text = f"performance.overlap.{axis}: the benchmark overlaps as torch does ({_written(usual)}; got {_written(value)})"
        yield value != usual and getattr(job.parallelism, axis) > 1, text, _set(f"performance.overlap.{axis}", usual)


def _set(path: str, value: Any) -> str:
    """The argument that sets a key."""
    return f"--set {path}={_written(value)}"


def _written(value: Any) -> str:
    """A value as written after --set."""
    return value if isinstance(value, str) else json.dumps(value)
