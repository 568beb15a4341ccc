"""The `model` and `data` sections of a Megatron-LM job."""

from __future__ import annotations

import re
from typing import Any

from steptime.launch.megatron_flags import Arguments

_VOCABULARIES = (
    (r"GPT2BPETokenizer", "", 50257, "GPT-2's"),
    (r"Llama2Tokenizer", "", 32000, "Llama 2's"),
    (r"HuggingFaceTokenizer|PretrainedFromHF|Llama3Tokenizer", r"llama-?_?3", 128256, "Llama 3's"),
    (
        r"HuggingFaceTokenizer|PretrainedFromHF|Llama2Tokenizer|SentencePieceTokenizer",
        r"llama-?_?2",
        32000,
        "Llama 2's",
    ),
    (r"HuggingFaceTokenizer|PretrainedFromHF", r"gpt2", 50257, "GPT-2's"),
)
"""Tokenizers whose vocabulary is known: type, what the model's name holds, entries, whose."""


def model_section(arguments: Arguments, notes: list[str]) -> dict[str, Any]:
    """Shapes and kinds; keys that nobody says are left out, for the Job to ask for."""
    a = arguments
    hidden, heads = a.at_least_one("hidden_size"), a.at_least_one("num_attention_heads")
    glu = a.on("swiglu") or a.on("quick_geglu")
    section: dict[str, Any] = {
        "n_layers": a.at_least_one("num_layers") or a.at_least_one("encoder_num_layers"),
        "hidden_sz": hidden,
        "inter_sz": a.at_least_one("ffn_hidden_size") or _ffn(hidden, swiglu=a.on("swiglu")),
        "n_q_heads": heads,
        "n_kv_heads": a.at_least_one("num_query_groups") if a.on("group_query_attention") else heads,
        "head_dim": a.at_least_one("kv_channels"),
        "vocab_sz": _vocabulary(a, notes),
        "glu": glu,
        "activation": _activation(a, glu=glu),
        "norm": "rmsnorm" if (a.text("normalization") or "").lower() == "rmsnorm" else "layernorm",
        "bias": a.on("add_bias_linear"),
        "qk_norm": a.on("qk_layernorm"),
        "tie_embeddings": not a.on("untie_embeddings_and_output_weights"),
        "dropout": _dropout(a),
    }
    section["norm_bias"] = section["norm"] == "layernorm"
    if not section["bias"] and not section["dropout"]:  # torch's dropout of probability 0 returns its input
        a.without_effect("bias_dropout_fusion", "without bias and dropout both ways add the residual alone")
    if not section["bias"] and a.on("add_qkv_bias"):
        section["qkv_bias"] = True
    section |= _positions(a)
    return {key: value for key, value in section.items() if value is not None}


def _ffn(hidden: int | None, *, swiglu: bool) -> int | None:
    """4h; with SwiGLU two thirds of it, down to a multiple of 64 (Megatron-LM, arguments.py, validate_args)."""
    if hidden is None:
        return None
    return int(4 * hidden * 2 / 3 / 64) * 64 if swiglu else 4 * hidden


def _activation(a: Arguments, *, glu: bool) -> str:
    if a.on("squared_relu"):
        return "relu2"
    return "silu" if glu and not a.on("quick_geglu") else "gelu"


def _dropout(a: Arguments) -> float:
    """One probability for both kinds: what it costs depends on whether there is any."""
    hidden, attention = a.number("hidden_dropout"), a.number("attention_dropout")
    if bool(hidden) != bool(attention):
        off = "attention_dropout" if hidden else "hidden_dropout"
        a.leave_out(off, "dropout of one kind alone: both are counted")
    return hidden or attention


def _positions(a: Arguments) -> dict[str, Any]:
    kind = a.text("position_embedding_type") or "learned_absolute"
    if a.on("use_rotary_position_embeddings"):
        kind = "rope"
    if kind not in {"learned_absolute", "rope", "none"}:
        a.leave_out(
            "position_embedding_type", "rotary positions are counted" if kind == "mrope" else "no positions are counted"
        )
    learned = kind == "learned_absolute" and a.on("add_position_embedding")
    found: dict[str, Any] = {"learned_positions": learned, "rotary_embeds": kind in {"rope", "mrope"}}
    if learned:
        found["max_positions"] = a.at_least_one("max_position_embeddings")
    return found


def _vocabulary(a: Arguments, notes: list[str]) -> int | None:
    """Entries before padding, as far as they are said or the tokenizer tells."""
    if padded := a.at_least_one("padded_vocab_size"):
        return padded
    kind = a.text("tokenizer_type") or ("GPT2BPETokenizer" if a.said.get("merge_file") else "")
    size = a.at_least_one("vocab_size")
    if size is not None and kind == "NullTokenizer":
        size += 1  # core tokenizers/text/libraries/null_tokenizer.py: one more for the end of a document
    if size is None:
        model = (a.said.get("tokenizer_model") or a.said.get("tokenizer_name_or_path") or "").lower()
        for types, words, entries, whose in _VOCABULARIES:
            if re.fullmatch(types, kind) and re.search(words, model):
                size = entries
                notes.append(f"vocabulary unsaid, so {whose}: {entries} ({kind})")
                break
    if size is None:
        return None
    return size + (a.whole("vocab_extra_ids") or 0)


def data_section(arguments: Arguments, dp: int | None, notes: list[str]) -> dict[str, Any]:
    """The batch: without a global one, one micro-batch on each replica (Megatron-LM, arguments.py, validate_args)."""
    a = arguments
    micro = a.at_least_one("micro_batch_size") or a.at_least_one("batch_size")
    whole = a.at_least_one("global_batch_size")
    if whole is None and micro and dp:
        whole = micro * dp
        notes.append(f"global batch unsaid, so {whole}: one micro-batch on each replica")
    if rampup := a.text("rampup_batch_size"):
        notes.append(f"the batch grows ({a.name('rampup_batch_size')} {rampup}): a step of the full batch is estimated")
    section = {
        "gbs": whole,
        "seqlen": a.at_least_one("seq_length") or a.at_least_one("encoder_seq_length"),
        "microbatch_sz": micro,
    }
    return {key: value for key, value in section.items() if value is not None}
