"""The `model` and `data` sections of a Megatron job."""

from __future__ import annotations

import re
from typing import Any

from steptime.launch.devices import told
from steptime.launch.keys import load_table
from steptime.launch.settings import Settings

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "quick_gelu": "gelu",
    "relu": "relu",
    "squared_relu": "relu2",
}
_ROTARY = {"learned_absolute": False, "none": False, "nope": False, "rope": True, "yarn": True, "mrope": True}
"""Kind of positions -> whether they rotate queries and keys (core models/gpt/gpt_model.py)."""


def model_section(s: Settings, *, unfused: bool) -> dict[str, Any]:
    """Shapes and kinds; keys that nobody says are left out, for the Job to ask for. `unfused`: attention keeps its scores."""
    hidden, heads = s.count("hidden_size"), s.count("num_attention_heads")
    glu = s.on("swiglu") or s.on("quick_geglu") or s.on("gated_linear_unit")
    norm = s.word("normalization", {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"})
    share = "share_embeddings_and_output_weights"
    section: dict[str, Any] = {
        "n_layers": s.count("num_layers"),
        "hidden_sz": hidden,
        "inter_sz": s.whole("ffn_hidden_size") or _ffn(hidden, swiglu=s.on("swiglu")),
        "n_q_heads": heads,
        "n_kv_heads": s.whole("num_query_groups") if s.on("group_query_attention") else heads,
        "head_dim": s.whole("kv_channels"),
        "vocab_sz": _vocabulary(s),
        "glu": glu,
        "activation": _activation(s, glu=glu),
        "norm": norm,
        "bias": s.on("add_bias_linear"),
        "qk_norm": s.on("qk_layernorm"),
        "tie_embeddings": not s.on("untie_embeddings_and_output_weights") if s.get(share) is None else s.on(share),
        "dropout": _dropout(s, unfused=unfused),
        "norm_bias": norm == "layernorm",
    }
    if not section["bias"] and not section["dropout"]:  # torch's dropout of probability 0 returns its input
        s.without_effect("bias_dropout_fusion", "without bias and dropout both ways add the residual alone")
    if not section["bias"] and s.on("add_qkv_bias"):
        section["qkv_bias"] = True
    section |= _positions(s)
    return {key: value for key, value in section.items() if value is not None}


def _ffn(hidden: int, *, swiglu: bool) -> int:
    """4h (TransformerConfig); of the flag --swiglu two thirds of it, down to a multiple of 64 (arguments.py, validate_args)."""
    return int(4 * hidden * 2 / 3 / 64) * 64 if swiglu else 4 * hidden


def _activation(s: Settings, *, glu: bool) -> str:
    """The function, by name in a config object, by switches on the command line."""
    if s.get("activation_func") is not None:
        return str(s.word("activation_func", _ACTIVATIONS))
    if s.on("squared_relu"):
        return "relu2"
    return "silu" if glu and not s.on("quick_geglu") else "gelu"


def _dropout(s: Settings, *, unfused: bool) -> float:
    """One probability for both kinds: what it costs depends on whether there is any.

    Dropout of the hidden states keeps a mask for each residual and for the embedding (core fusions/fused_bias_dropout.py). That
    of attention keeps one of the scores where they are in memory, and the state of a generator in a fused kernel, where it
    costs nothing that is counted.
    """
    hidden, attention = s.number("hidden_dropout"), s.number("attention_dropout")
    if bool(hidden) == bool(attention):
        return hidden
    if unfused:
        s.leave_out("attention_dropout" if hidden else "hidden_dropout", "dropout of one kind alone: both are counted")
        return hidden or attention
    s.without_effect("attention_dropout", "inside the attention kernel, which keeps no mask")
    return hidden


def _positions(s: Settings) -> dict[str, Any]:
    kind = "position_embedding_type"
    if s.on("use_rotary_position_embeddings"):
        s.put(kind, "rope", by=s.name("use_rotary_position_embeddings"))
    rotary = s.word(kind, _ROTARY)
    if s.get(kind) == "mrope":
        s.leave_out(kind, "rotary positions are counted")
    learned = s.get(kind) == "learned_absolute" and s.on("add_position_embedding")
    found: dict[str, Any] = {"learned_positions": learned, "rotary_embeds": rotary}
    return found | ({"max_positions": s.whole("max_position_embeddings")} if learned else {})


def _vocabulary(s: Settings) -> int | None:
    """Entries before padding, as far as they are said or the tokenizer tells."""
    if (set_by_user := told(s.sets, "model.vocab_sz")) is not None:
        return int(set_by_user) if isinstance(set_by_user, int) else None
    if padded := s.whole("padded_vocab_size"):
        return padded
    kind = str(s.get("tokenizer_type") or ("GPT2BPETokenizer" if s.get("merge_file") else ""))
    size = s.whole("vocab_size")
    if size is not None and kind == "NullTokenizer":
        size += 1  # core tokenizers/text/libraries/null_tokenizer.py: one more for the end of a document
    if size is None:
        model = str(s.get("tokenizer_model") or s.get("tokenizer_name_or_path") or "")
        words = f"{kind} {model}".lower()
        known = (item for item in load_table("megatron").raw["vocabularies"] if re.search(item["pattern"], words))
        if (found := next(known, None)) is None:
            return None
        size = int(found["entries"])
        s.notes.append(f"vocabulary unsaid, so {found['of']}: {size} ({kind or model})")
    return size + (s.whole("vocab_extra_ids", least=0) or 0)


def data_section(s: Settings, dp: int | None) -> dict[str, Any]:
    """The batch: without a global one, one micro-batch on each replica (Megatron-LM, arguments.py, validate_args)."""
    micro, gbs = s.count("micro_batch_size"), s.whole("global_batch_size")
    if gbs is None and dp:
        gbs = micro * dp
        s.notes.append(f"global batch unsaid, so {gbs}: one micro-batch on each replica")
    if (
        gbs is not None
        and dp
        and gbs % (micro * dp)
        and not any(told(s.sets, f"data.{k}") for k in ("gbs", "microbatch_sz"))
    ):
        parts = f"micro-batch size * data-parallel ranks = {micro} * {dp}"
        s.fail("global_batch_size", f"must be a multiple of {parts} (got {gbs})")
    if rampup := s.get("rampup_batch_size"):
        name = s.name("rampup_batch_size")
        s.notes.append(f"the batch grows ({name} {rampup}): a step of the full batch is estimated")
    length = s.whole("seq_length") or told(s.sets, "data.seqlen")
    section = {"gbs": gbs, "seqlen": length, "microbatch_sz": micro}
    return {key: value for key, value in section.items() if value is not None}
