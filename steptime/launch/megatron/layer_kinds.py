"""Kinds of layers in a Megatron job: hybrid patterns and Mamba; latents, windows, sinks and gates of attention."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from typing import Any

from steptime.launch.job_keys import JobKeys
from steptime.launch.reading import OTHER_MODEL
from steptime.model.hf_hybrid import AHEAD

_SIZES = ("mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups")
"""Sizes of Mamba layers."""
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
LINEAR = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)
"""Sizes of latent and of linear attention."""
_MOST_LAYERS = 10_000
"""Upper bound of the number of layers."""


def sizes_of(keys: JobKeys, names: Iterable[str]) -> dict[str, int]:
    """The sizes that are given, each under the plan's key that the table has for it."""
    said = {keys.table.rules[name].note.rpartition(".")[2]: keys.whole(name) for name in names}
    return {ours: size for ours, size in said.items() if size is not None}


def hybrid_pattern(keys: JobKeys) -> str:
    """Kinds of layer by letter, pipeline stages split by "|" (core ssm/mamba_hybrid_layer_allocation.py); empty without any."""
    return _patterns(keys)[0]


def _patterns(keys: JobKeys) -> list[str]:
    """That pattern, and one for each depth of multi-token prediction."""
    said = keys.get("hybrid_layer_pattern") or keys.get("hybrid_override_pattern")
    return str(said or "").strip("\\\"'").split("/")


def hybrid_section(keys: JobKeys) -> dict[str, Any]:
    """What a hybrid model adds to the `model` section; empty for other models."""
    pattern = hybrid_pattern(keys)
    if not pattern:
        if keys.on("is_hybrid_model"):
            keys.leave_out("is_hybrid_model", "hybrid layers without a pattern")
        if keys.get("mamba_ssm_ngroups"):  # only in NeMo 1's Mamba
            keys.leave_out("mamba_ssm_ngroups", f"Mamba layers without a pattern, {OTHER_MODEL}")
        return {}
    depths = _patterns(keys)[1:]
    if {*depths} - {AHEAD}:
        keys.leave_out("hybrid_layer_pattern", f"multi-token prediction layers other than {AHEAD}")
    if re.search(r"(?:mamba|hybrid)_stack_spec", str(keys.get("spec") or "")):
        keys.without_effect("spec", "the layers of the hybrid pattern")
    letters, said = pattern.replace("|", ""), keys.whole("num_layers")
    if said not in {None, len(letters)}:
        keys.problem(f"the hybrid pattern has {len(letters)} layers, num_layers is {said}")
    sizes = sizes_of(keys, _SIZES)
    mamba = {"mamba": sizes} if "M" in letters else {}
    return {"n_layers": len(letters), "hybrid_pattern": letters, "mtp": len(depths) or None, **mamba}


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


def listed(text: str) -> list[int]:
    """The layers of a pattern in Python's words: sums and products of lists (arguments.py, moe_freq_type); empty for any other.

    >>> listed("([0]*1+[1]*2)*2"), listed("[0]*100000*100000")
    ([0, 1, 1, 0, 1, 1], [])
    """
    try:
        found = _value(ast.parse(re.sub(r"[\s\"'\\]", "", text), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        return []
    return found if isinstance(found, list) else []


def _value(node: ast.expr) -> list[int] | int:
    """A list, a number, or a sum or product of them.

    Raises:
        ValueError: it is something else, or longer than any model.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List):
        return [item.value for item in node.elts if isinstance(item, ast.Constant) and isinstance(item.value, int)]
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(left, list) and isinstance(right, int) and isinstance(node.op, ast.Mult):
            return left * (right if len(left) * right <= _MOST_LAYERS else 0)
    raise ValueError
