"""Names of a layer's projections in order of lookup; "^" begins a whole name.

Sources: `modeling_*.py` of transformers 5 by family (Llama, GPT-2, GPT-J, GPT-NeoX, BLOOM, Falcon, MPT, OPT, Phi, InternLM2,
BERT, DistilBERT, ModernBERT, ALBERT, ViT, T5, BART, OLMo, CTRL, XLM, CPM-Ant), Megatron-LM `megatron/core/transformer`,
Meta's `llama/model.py`, llama.cpp `gguf-py/gguf/tensor_mapping.py`.
"""

from __future__ import annotations

import re

Q = (
    "q_proj", "wq", "attn_q", "linear_q", "q_lin", "attention.query", "self.query", "SelfAttention.q", "q_attn", "project_q",
    "multi_head_attention.Wq",
)  # fmt: skip
K = (
    "k_proj", "wk", "attn_k", "linear_k", "k_lin", "attention.key", "self.key", "SelfAttention.k", "project_k",
    "multi_head_attention.Wk",
)  # fmt: skip
QKV = (
    "linear_qkv", "query_key_value", "c_attn", "qkv_proj", "attn_qkv", "Wqkv", "wqkv", "W_pack", "att_proj", "qkv",
    "attn.in_proj", "self_attn.in_proj",
)  # fmt: skip
OUT = (
    "o_proj", "wo", "linear_proj", "attn.c_proj", "attn_output", "self_attn.dense", "self_attention.dense", "attention.dense",
    "attention.output.dense", "out_lin", "SelfAttention.o", "attn.Wo", "attn_out", "attn.proj", "out_proj",
    "attention_out", "multi_head_attention.dense",
)  # fmt: skip
LATENT = ("kv_a_proj_with_mqa", "wkv_a", "linear_kv_down_proj", "attn_kv_a_mqa")
LATENT_Q = ("q_b_proj", "wq_b", "linear_q_up_proj", "attn_q_b")
UP = (
    "up_proj", "w3", "ffn_up", "gate_up_proj", "linear_fc1", "dense_h_to_4h", "c_fc", "fc1", "fc_in", "ff_proj", "lin1",
    "DenseReluDense.wi", "DenseReluDense.wi_1", "mlp.Wi", "intermediate.dense", "w1", "feed_forward.key",
    "w_in.w_1", "ffn.0", "^ffn",
)  # fmt: skip
GATE = ("gate_proj", "w3", "ffn_gate", "DenseReluDense.wi_1", "w_in.w_0")
DOWN = (
    "down_proj", "w2", "linear_fc2", "dense_4h_to_h", "mlp.c_proj", "ffn_down", "fc2", "fc_out", "ff_out", "lin2",
    "DenseReluDense.wo", "mlp.Wo", "^output.dense", "feed_forward.value",
    "w_out", "ffn.2", "ffn_output",
)  # fmt: skip

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
