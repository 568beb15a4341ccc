"""The `model` and `data` sections of a Megatron job."""

from __future__ import annotations

import re
from typing import Any

from steptime.job.edit import read_model
from steptime.launch.devices import told, told_whole
from steptime.launch.job_keys import JobKeys
from steptime.launch.megatron.expert_layers import expert_section
from steptime.launch.megatron.layer_kinds import attention_section, hybrid_pattern, hybrid_section, latent
from steptime.launch.named_models import preset_of
from steptime.launch.vocabulary import SIZES, entries_of, of_same_sizes, reads_pieces

TOKENIZERS = (
    *("tokenizer_model", "tokenizer_name_or_path", "hf_tokenizer_path"),
    *("tokenizer_file", "vocab_file", "merge_file"),
)
"""Arguments that name a tokenizer's files."""
_CALLED = ("load", "save", "pretrained_checkpoint", "wandb_exp_name", "tensorboard_dir", "model_name")
"""Arguments whose values may name the model."""


def model_section(keys: JobKeys) -> dict[str, Any]:
    """Shapes and kinds; keys that are not given are left for the Job to ask for."""
    if not {"num_layers", "hidden_size", "num_attention_heads"} & {*keys.values, *keys.defaults}:
        keys.left_open.setdefault("model", "model unknown; add --set model=NAME (3dtrn models lists them)")
        return {}
    if keys.on("use_checkpoint_args") and "add_bias_linear" not in keys.values:
        return _of_checkpoint(keys)
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    named = str(keys.get("glu_activation")).endswith("glu")
    glu = keys.on("swiglu") or keys.on("quick_geglu") or keys.on("gated_linear_unit") or named
    norm = "rmsnorm" if keys.on("use_rms_norm") else keys.word("normalization")
    section: dict[str, Any] = {
        "n_layers": keys.whole("num_layers") if hybrid_pattern(keys) else keys.count("num_layers"),
        "hidden_sz": hidden,
        "inter_sz": keys.whole("ffn_hidden_size") or _ffn(keys, hidden),
        "n_q_heads": heads,
        "n_kv_heads": None if latent(keys) else _kv_heads(keys, heads),
        "head_dim": None if latent(keys) else keys.whole("kv_channels"),
        "vocab_sz": vocabulary(keys),
        "glu": glu,
        "activation": _activation(keys, glu=glu),
        "swiglu_limit": (keys.number("activation_func_clamp_value") or None) if glu else None,
        "norm": norm,
        "bias": keys.on("add_bias_linear"),
        "qk_norm": keys.on("qk_layernorm") and not latent(keys),
        "tie_embeddings": _tied(keys),
        **_dropout(keys),
        "norm_bias": norm == "layernorm",
    }
    if not section["bias"] and not section["dropout"]:  # torch's dropout of probability 0 returns its input
        keys.without_effect("bias_dropout_fusion", "without bias and dropout, fused and unfused only add the residual")
    if not section["bias"] and keys.on("add_qkv_bias"):
        section["qkv_bias"] = True
    section |= _positions(keys) | hybrid_section(keys) | attention_section(keys)
    section |= expert_section(keys, section["inter_sz"])
    if depths := section.get("mtp") or keys.whole("mtp_num_layers", least=0):
        section |= {"mtp": depths, "mtp_repeated": keys.on("mtp_use_repeated_layer") or None}
    return {key: value for key, value in section.items() if value is not None}


def _tied(keys: JobKeys) -> bool:
    """Whether the head shares the embedding's weights; --causal-lm makes a head of its own."""
    own = keys.on("causal_lm")
    if own and keys.count("tensor_model_parallel_size") == 1:
        keys.becomes("causal_lm", "model.tie_embeddings")
    apart = own or keys.on("untie_embeddings_and_output_weights")
    return keys.on("share_embeddings_and_output_weights", default=not apart)


_LOADED = ("load", "pretrained_checkpoint", "tokenizer_model", "tokenizer_name_or_path")
"""Arguments whose paths name the model that training starts from."""


def _of_checkpoint(keys: JobKeys) -> dict[str, Any]:
    """The preset that a part of the paths names and whose sizes the flags have; the checkpoint has its other settings.

    Megatron-LM megatron/checkpointing.py, load_args_from_checkpoint: groups, biases and positions override the flags.
    """
    parts = [part for key in _LOADED for part in str(keys.get(key) or "").split("/")]
    for name in dict.fromkeys(found for part in parts if part and (found := preset_of(part))):
        said = {size: keys.whole(argument) for size, argument in zip(SIZES[:4], _SIZES[:4], strict=True)}
        if all(getattr(read_model(name), size) == value for size, value in said.items()):
            where = keys.name("use_checkpoint_args")
            keys.notes.append(f"model {name}, which the paths name and whose sizes the flags have ({where})")
            for argument in _SIZES[:4]:
                keys.becomes(argument, "model")
            return {"preset": name} | {key: value for key, value in _dropout(keys).items() if value is not None}
    what = f"{keys.name('use_checkpoint_args')}: sizes, groups and biases of the checkpoint override the flags"
    keys.left_open["model"] = f"{what}; add --set model=NAME (3dtrn models lists them)"
    return {}


def _kv_heads(keys: JobKeys, heads: int) -> int | None:
    """Key and value heads; forks with --num-key-value-heads have no switch for them."""
    alias = not keys.name("num_query_groups").replace("-", "_").endswith("num_query_groups")
    if keys.on("group_query_attention") or ("num_query_groups" in keys.values and alias):
        keys.becomes("num_query_groups", "model.n_kv_heads")
        return keys.whole("num_query_groups")
    return 1 if keys.get("attention_head_type") is not None and keys.word("attention_head_type") else heads


def _ffn(keys: JobKeys, hidden: int) -> int:
    """4h (TransformerConfig); with --swiglu two thirds of it, rounded down to a multiple of 64 (arguments.py, validate_args).

    FlagScale's --multiple-of rounds up instead, after --hidden-dim-multiplier (its patch of the same function).
    """
    if not keys.on("swiglu"):
        return 4 * hidden
    if multiple := keys.whole("multiple_of"):
        return -(-int(int(4 * hidden * 2 / 3) * (keys.number("hidden_dim_multiplier") or 1)) // multiple) * multiple
    return int(4 * hidden * 2 / 3 / 64) * 64


def _activation(keys: JobKeys, *, glu: bool) -> str:
    """The function, by name in a config object, by switches on the command line."""
    if keys.get("activation_func") is not None:
        return str(keys.word("activation_func"))
    if keys.on("squared_relu"):
        return "relu2"
    if keys.get("glu_activation") is not None:
        return str(keys.word("glu_activation"))
    return "silu" if glu and not keys.on("quick_geglu") else "gelu"


def _dropout(keys: JobKeys) -> dict[str, Any]:
    """The probability of hidden states, and that of attention's scores where one of the two is 0.

    Dropout of the hidden states keeps a mask for each residual and for the embedding (core fusions/fused_bias_dropout.py).
    Attention dropout keeps a mask of the scores where they are in memory; a fused kernel keeps none, but takes time to draw it
    (`cost.rates.DRAWN_PER_SM`). Nothing else depends on the probabilities.
    """
    hidden, attention = keys.number("hidden_dropout"), keys.number("attention_dropout")
    return {"dropout": hidden, "attention_dropout": None if bool(hidden) == bool(attention) else attention}


def _positions(keys: JobKeys) -> dict[str, Any]:
    kind = "position_embedding_type"
    rotary = keys.word(kind)
    if keys.get(kind) == "mrope":
        keys.leave_out(kind, "counted as rotary positions")
    learned = keys.get(kind) in ("learned_absolute", "absolute", "learned") and keys.on("add_position_embedding")
    found: dict[str, Any] = {"learned_positions": learned, "rotary_embeds": rotary}
    return found | ({"max_positions": keys.whole("max_position_embeddings")} if learned else {})


_SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")
"""Arguments with the SIZES by which a preset is recognized."""
_OF_LOADED = {
    re.compile(r"(?i)qwen-?(?:1\.5|[23](?!\d))"): "Qwen2Tokenizer",
    re.compile(r"(?i)llama-?31?(?!\d|b\b)"): "LLama3Tokenizer",
}
"""Folders of checkpoints whose tokenizers count no special tokens, which --extra-vocab-size adds, and their type."""


def vocabulary(keys: JobKeys) -> int | None:
    """Entries before padding, as far as they are given, or the tokenizer's name or files tell."""
    if (set_by_user := told(keys.sets, "model.vocab_sz")) is not None:
        return int(set_by_user) if isinstance(set_by_user, int) else None
    if padded := keys.whole("padded_vocab_size") or keys.whole("pad_vocab_size_to"):
        return padded
    kind = str(keys.get("patch_tokenizer_type") or keys.get("tokenizer_type") or "")
    kind = kind or ("GPT2BPETokenizer" if keys.get("merge_file") else "")
    size = keys.whole("vocab_size")
    files = [str(name) for key in TOKENIZERS if (name := keys.get(key))]
    if size is not None and kind == "NullTokenizer":
        size += 1  # core tokenizers/text/libraries/null_tokenizer.py: one more for the end of a document
    elif size is not None and kind == "GPT2BPETokenizer":
        size = _of_gpt2(keys, size, files)
    if size is None:
        called = ["/".join(keys.source.split("/")[-2:]), *(str(keys.get(key) or "") for key in _CALLED)]
        found = entries_of(kind, files, keys.nearby, " ".join(called))
        # Pai-Megatron-Patch megatron_patch/tokenizer/__init__.py: the tokenizer of the checkpoint's folder
        loaded = str(keys.get("load") or "") if keys.get("patch_tokenizer_type") else ""
        for name in filter(None, [keys.get("run.name"), loaded] if not files else []):
            base = next((base for words, base in _OF_LOADED.items() if name == loaded and words.search(loaded)), "")
            found = found or (entries_of(base, []) if base else entries_of("", [str(name)]))
        if keys.tokenizer.isdecimal():
            found = found or (int(keys.tokenizer), "VOCAB_SIZE of the script")
        elif keys.tokenizer and not found and reads_pieces(kind):  # its file has a plain name
            found = entries_of("", [f"{keys.tokenizer}_tokenizer.model"])
        found = found or _one_multiple(keys)
        if found is None:
            sizes = {key: keys.whole(name) for key, name in zip(SIZES, _SIZES, strict=True)}
            sizes["n_kv_heads"] = sizes["n_kv_heads" if keys.on("group_query_attention") else "n_q_heads"]
            found = of_same_sizes(sizes, files, " ".join(called))
            if found and found[1].startswith("llama3") and keys.get("model.tokenizer.library") == "sentencepiece":
                found = None  # Llama 3's is no SentencePiece model
        if found is None:
            return None
        size, whose = found
        keys.notes.append(f"vocabulary not set, {whose} assumed: {size}")
    return size + sum(keys.whole(key, least=0) or 0 for key in ("extra_vocab_size", "vocab_extra_ids"))


def has_own_vocabulary(keys: JobKeys) -> bool:
    """Whether a file names a tokenizer whose entries neither it nor the user tells: that of a model may be another one."""
    notes = [*keys.notes]
    unknown = any(keys.get(key) for key in TOKENIZERS) and vocabulary(keys) is None
    keys.notes = notes
    return unknown and told(keys.sets, "model.vocab_sz") is None


def _of_gpt2(keys: JobKeys, size: int, files: list[str]) -> int:
    """Entries of GPT-2's files, where these tell them: Megatron-LM then does not read --vocab-size.

    NVIDIA/Megatron-LM megatron/training/tokenizer/tokenizer.py, build_tokenizer
    """
    found = entries_of("", files, keys.nearby)
    if found is None or found[0] == size:
        return size
    unread = f"GPT2BPETokenizer does not read {keys.name('vocab_size')} {size}"
    keys.notes.append(f"vocabulary {found[0]}, {found[1]}: {unread}")
    return found[0]


def _one_multiple(keys: JobKeys) -> tuple[int, str] | None:
    """What a vocabulary is padded to, where that is large enough to be one multiple: 16032 x tp 8 for Llama 3's 128256."""
    multiple, tp = keys.whole("make_vocab_size_divisible_by") or 0, keys.whole("tensor_model_parallel_size") or 1
    size = multiple * tp
    what = f"one multiple of {keys.name('make_vocab_size_divisible_by')} {multiple} x tp {tp}"
    return (size, what) if size >= 30_000 else None


def data_section(keys: JobKeys, dp: int | None) -> dict[str, Any]:
    """The batch: without a global one, one micro-batch on each replica (Megatron-LM, arguments.py, validate_args)."""
    micro, gbs = keys.whole("micro_batch_size"), keys.whole("global_batch_size")
    if keys.get("micro_batch_size") is None:
        keys.ask("data.microbatch_sz", "micro-batch size unknown")
        micro = told_whole(keys.sets, "data.microbatch_sz")
    if gbs is None and dp and micro:
        steps = keys.whole("gas")
        gbs = micro * dp * (steps or 1)
        if steps is None:
            keys.notes.append(f"global batch not set, {gbs} assumed: one micro-batch per replica")
    set_by_user = told(keys.sets, "data.gbs") or told(keys.sets, "data.microbatch_sz")
    if gbs is not None and dp and micro and gbs % (micro * dp) and not set_by_user:
        parts = f"micro-batch size * data-parallel ranks = {micro} * {dp}"
        keys.fail("global_batch_size", f"must be a multiple of {parts} (got {gbs}); add --set data.gbs=N")
    if rampup := keys.get("rampup_batch_size"):
        name = keys.name("rampup_batch_size")
        keys.notes.append(f"the batch grows ({name} {rampup}): the estimate is for the full batch")
    length = keys.whole("seq_length") or told(keys.sets, "data.seqlen")
    section = {"gbs": gbs, "seqlen": length, "microbatch_sz": micro}
    return {key: value for key, value in section.items() if value is not None}
