"""Kinds of attention in a Megatron job: latents, windows, sinks and gates."""

from __future__ import annotations

from typing import Any

from steptime.launch.job_keys import JobKeys
from steptime.launch.megatron.expert_layers import listed
from steptime.launch.megatron.hybrid_layers import sizes_of

_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
LINEAR = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)
"""Sizes of latent and of linear attention."""


def latent(keys: JobKeys) -> bool:
    """Whether attention uses latents (MLA)."""
    return keys.on("multi_latent_attention")


def attention_section(keys: JobKeys) -> dict[str, Any]:
    """The `attention` part of the `model` section; empty for plain attention."""
    found: dict[str, Any] = {}
    if latent(keys):
        found = {"kind": "mla"} | sizes_of(keys, _LATENT)
        if not keys.on("qk_layernorm"):
            keys.approximate("qk_layernorm", "norms of the latents are off, but counted")
        for name in ("group_query_attention", "num_query_groups", "kv_channels"):
            keys.without_effect(name, "latent attention has its own head widths")
    found |= _window(keys)
    if keys.get("softmax_type") is not None and keys.word("softmax_type"):
        found["sinks"] = True
    elif keys.get("softmax_type") == "off-by-one":
        keys.without_effect("softmax_type", "a constant in the softmax changes no cost")
    if keys.on("attention_output_gate"):
        found["gated"] = True
    return ({"attention": found} if found else {}) | _linear(keys)


def _linear(keys: JobKeys) -> dict[str, Any]:
    """Gated DeltaNet in all layers but the last of every N, or in those that a list gives a 1.

    core models/gpt/experimental_attention_variant_module_specs.py, get_linear_attention_pattern
    """
    kind, said = keys.get("experimental_attention_variant"), str(keys.get("linear_attention_freq") or "")
    if kind is None:
        return {}
    if kind != "gated_delta_net":
        keys.leave_out("experimental_attention_variant", "a different kind of attention")
        return {}
    freq: int | list[int] = int(said) if said.isdecimal() else listed(said)
    if not freq or freq == 1:
        wrong = f"expected a number of at least 2, or a list of 0 and 1 per layer (got {said or 'nothing'})"
        keys.fail("linear_attention_freq", wrong)
        return {}
    return {"linear_attention": {"kind": kind, **sizes_of(keys, LINEAR), "freq": freq}}


def _window(keys: JobKeys) -> dict[str, Any]:
    """How many positions each position sees, itself included, and in which layers.

    The flag gives the positions to the left and to the right; an integer N next to it leaves every N-th layer without (core
    transformer/utils.py, is_layer_window_attention).
    """
    said = [int(number) for number in keys.words("window_size") if number.lstrip("-").isdecimal()]
    if not said or said[0] < 0:
        return {}
    if said[0] >= (keys.whole("seq_length") or 0) > 0:
        keys.without_effect("window_size", "not shorter than the sequence")
        return {}
    found = {"window": said[0] + 1}
    skips = str(keys.get("window_attn_skip_freq") or "")
    if skips.isdecimal():
        return found | {"window_pattern": int(skips)}
    if skips:
        keys.leave_out("window_attn_skip_freq", "layers listed one by one: counted as a window in every layer")
    return found
