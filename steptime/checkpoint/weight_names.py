"""Names of a layer's projections in order of lookup; "^" begins a whole name."""

from __future__ import annotations

import re

from steptime.checkpoint.name_tables import table, words

_MODULES = {kind: words(names) for kind, names in table("names")["modules"].items()}
Q, K, QKV, OUT = (_MODULES[kind] for kind in ("q", "k", "qkv", "out"))
LATENT, LATENT_Q = _MODULES["latent"], _MODULES["latent_q"]
UP, GATE, DOWN = (_MODULES[kind] for kind in ("up", "gate", "down"))

EMBED = re.compile(
    r"(?:^|\.)(?:embed_tokens|tokens_embed|wte|word_embeddings?|tok_embeddings|token_embd|embed_in|shared|token_embedding|"
    r"(?:backbone|rwkv|embeddings|model|transformer)\.(?:tok_)?embeddings?|emb|input_embedding|transformer\.w)\.weight$"
)
POSITIONS = re.compile(
    r"(?:^|\.)(?:wpe|position_embeddings?|embed_positions|position_embd)\.weight$|embeddings\.position_embeddings$"
)
HEAD = re.compile(r"(?:^|\.)(?:lm_head|output_layer|embed_out|output|head)\.weight$")
NORM = re.compile(r"(?:[Nn]orm\w*|ln_?\w*|layernorm\w*)\.(weight|bias)$|layer_?norm_(weight|bias)$")
RMSNORM = re.compile(r"(?:^|\.)(?:SelfAttention\.q\.weight|project_q\.weight|mixer\.A_log|mamba\.A_log)$")
"""Tensors of families with RMSNorm: T5, CPM-Ant and Mamba."""
LAYERNORM = re.compile(r"norm_attn_norm|mlp\.Wi\.")
"""Tensors of families with LayerNorm without bias: DBRX and ModernBERT."""
Q_NORM = re.compile(r"(?:q_norm|q_layernorm|attn_q_norm|query_layernorm)\.weight$")
QKV_MODULE = re.compile(r"(?:[qkv]_proj|w[qkv]|linear_qkv|W?qkv|attn_[qkv]|[qkv]_lin|query|key|value|query_key_value)$")
"""Modules whose biases are those of q, k and v."""
BUFFERS = re.compile(
    r"inv_freq$|rope\.?_?freqs|position_ids$|e_score_correction_bias$|expert_bias$|final_logits_bias$|slope_rate$|_decay$|"
    r"running_(?:mean|var)$|num_batches_tracked$|relative_position_index$"
)
"""Buffers, which are no parameters; some formats save them and others do not."""
EXPERT = re.compile(r"experts\.(?:local_experts\.|deepspeed_experts\.|linear_fc[12]\.(?:weight|bias))?(\d{1,6})")
PACKED_UP = re.compile(
    r"(?:experts\.(?:experts\.)?(?:gate_up_proj|linear_fc1|fc1)|(?:moe|mlp)\.input_linear|ffn_(?:up|gate)_exps)(?:\.weight)?$"
)
PACKED_DOWN = re.compile(
    r"(?:experts\.(?:experts\.)?(?:down_proj|linear_fc2|fc2)|(?:moe|mlp)\.output_linear|ffn_down_exps)(?:\.weight)?$"
)
ROUTER = re.compile(
    r"(?:router(?:\.layer)?|(?:mlp|moe|ffn|block_sparse_moe|mixer)\.gate|gate\.wg|ffn_gate_inp)\.weight$"
)
SPARSE = re.compile(r"expert|_exps|moe\.")
"""What only layers with experts have."""
SHARED = re.compile(r"shared_expert\w*\.|shared_mlp\.|_shexp\.")


def ends(tail: str, name: str) -> bool:
    """Whether `tail`, the rest of a name behind the layer number, is the weight of the module `name`."""
    weight = f"{name.removeprefix('^')}.weight"
    return tail == weight or (name[0] != "^" and tail.endswith(f".{weight}"))


def is_attention(tail: str) -> bool:
    """Whether `tail` is a projection of queries, keys or values, or of their latents."""
    return any(ends(tail, name) for name in (*Q, *K, *QKV, *LATENT))
