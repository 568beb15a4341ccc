"""Hugging Face model families: how to interpret each config.json.

Class defaults are those of transformers 4.57.1 (src/transformers/models/FAMILY/configuration_FAMILY.py; 5.23.0 for families that
came later: minimax_m2, ministral3, qwen3_5_text, qwen3_5_moe_text, solar_open); what the code always does is in
modeling_FAMILY.py in the same folder.
"""

from __future__ import annotations

from dataclasses import replace

from steptime.model.hf_family import Family, Json

GLU: Json = {"glu": True, "norm": "rmsnorm", "norm_bias": False}
PLAIN: Json = {"glu": False, "norm": "layernorm", "norm_bias": True}
UNTIED: Json = {"hidden_act": "silu", "tie_word_embeddings": False}
TIED: Json = {"tie_word_embeddings": True}
LLAMA: Json = UNTIED | {"attention_bias": False, "mlp_bias": False}
QWEN: Json = UNTIED | {"num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096}
GPT2_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
GPT2: Json = {"hidden_act": "gelu_new", "tie_word_embeddings": True, "max_position_embeddings": 1024}
GPT2 |= dict.fromkeys(GPT2_DROPOUT, 0.1)
GPT2_NAMES = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
}

GPT2_FAMILY = Family(PLAIN | {"bias": True, "learned_positions": True}, GPT2, dropout=GPT2_DROPOUT, names=GPT2_NAMES)
LLAMA_FAMILY = Family(GLU, LLAMA, only={"attention_dropout": 0.0}, bias=("attention_bias", "mlp_bias"))

MOE = UNTIED | {"attention_dropout": 0.0, "attention_bias": False}
NO_BIAS: Json = {"attention_dropout": 0.0, "attention_bias": False}
# n_shared_experts and first_k_dense_replace: the configuration_deepseek.py of Kimi K2's files
LATENT_FAMILY = Family(GLU, MOE | {"n_shared_experts": 0, "first_k_dense_replace": 0}, only=NO_BIAS)
GEMMA: Json = {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256} | NO_BIAS
GEMMA_NAMES = {"hidden_act": "hidden_activation"}
# the query's projection is twice as wide: the other half is the gate (modeling_qwen3_next.py, Qwen3NextAttention)
DELTA_NET = Family(
    GLU | {"qk_norm": True, "attention": {"gated": True}},
    UNTIED
    | {"head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32}
    | {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4},
    only=NO_BIAS,
)
POST_NORMS: Json = GLU | {"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_type": "per_layer"}
OLMO2 = Family(POST_NORMS, UNTIED, only=NO_BIAS)
COHERE = Family(
    GLU | {"norm": "layernorm", "parallel_residual": True, "shared_norm": True},
    {"hidden_act": "silu", "tie_word_embeddings": True, "use_qk_norm": False},
    only=NO_BIAS | {"use_qk_norm": False},
)
ERNIE = Family(
    GLU,
    UNTIED | {"tie_word_embeddings": True, "num_key_value_heads": 2, "head_dim": 128, "use_bias": False},
    bias=("use_bias",),
)
GLM = Family(
    GLU,
    UNTIED | {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
    only={"attention_dropout": 0.0},
    switches={"qkv_bias": "attention_bias"},
)

MIXTRAL = Family(GLU, UNTIED | {"num_key_value_heads": 8}, only={"attention_dropout": 0.0})
FAMILIES: dict[str, Family] = {
    "deepseek_v2": replace(LATENT_FAMILY, defaults=LATENT_FAMILY.defaults | {"n_shared_experts": 2}),
    "deepseek_v3": replace(
        LATENT_FAMILY, defaults=MOE | {"n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4}
    ),
    "kimi_k2": LATENT_FAMILY,
    "gemma": Family(
        GLU,
        {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256, "num_key_value_heads": 16},
        only={"attention_dropout": 0.0, "attention_bias": False},
    ),
    "gemma2": Family(
        GLU | {"post_norms": True},
        GEMMA | {"num_key_value_heads": 4, "sliding_window": 4096},
        only=NO_BIAS,
        names=GEMMA_NAMES,
        windows=2,
    ),
    "gemma3_text": Family(
        GLU | {"post_norms": True, "qk_norm": True},
        GEMMA | {"sliding_window": 4096, "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4},
        only=NO_BIAS,
        names=GEMMA_NAMES,
        windows=6,
    ),
    # qkv alone have biases (modeling_glm4_moe.py, Glm4MoeAttention)
    "glm4_moe": Family(
        GLU,
        UNTIED
        | {"num_key_value_heads": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
        | {"attention_bias": False, "use_qk_norm": False},
        only={"attention_dropout": 0.0},
        switches={"qkv_bias": "attention_bias", "qk_norm": "use_qk_norm"},
    ),
    "gpt_oss": Family(
        GLU | {"bias": True},
        UNTIED | {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "swiglu_limit": 7.0},
        only={"attention_dropout": 0.0},
        windows=2,
    ),
    "llama4_text": Family(
        GLU,
        UNTIED
        | {"num_key_value_heads": 8, "head_dim": 128, "interleave_moe_layer_step": 1, "attention_chunk_size": 8192},
        only=NO_BIAS,
        names={"inner": "intermediate_size_mlp"},
    ),
    "kimi_linear": replace(
        LATENT_FAMILY,
        defaults=MOE | {"num_shared_experts": 0, "first_k_dense_replace": 0, "hidden_act": "silu"},
        names={"num_experts_per_tok": "num_experts_per_token"},
    ),
    "dots1": Family(
        GLU | {"qk_norm": True},
        UNTIED | {"num_key_value_heads": 32, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
        only=NO_BIAS | {"sliding_window": None},
    ),
    "ernie4_5_moe": replace(
        ERNIE,
        defaults=UNTIED
        | {"tie_word_embeddings": True, "num_key_value_heads": 4, "use_bias": False, "moe_num_shared_experts": 2}
        | {"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1},
        only={"moe_layer_end_index": -1, "moe_layer_interval": 1},
        names={"num_experts_per_tok": "moe_k"},
    ),
    "granitemoe": Family(GLU, UNTIED | {"num_local_experts": 8, "num_experts_per_tok": 2}, only=NO_BIAS),
    "minimax": MIXTRAL,
    "minimax_text_01": MIXTRAL,
    "mixtral": MIXTRAL,
    "minimax_m2": Family(
        GLU | {"qk_norm": True, "qk_norm_type": "per_layer"}, MIXTRAL.defaults | {"head_dim": 128}, only=MIXTRAL.only
    ),
    "olmoe": Family(GLU | {"qk_norm": True, "qk_norm_type": "per_layer"}, MOE, only=NO_BIAS),
    "qwen2_moe": Family(
        GLU | {"qkv_bias": True},
        QWEN | {"num_key_value_heads": 16, "decoder_sparse_step": 1},
        only={"attention_dropout": 0.0},
    ),
    "qwen3_moe": Family(
        GLU | {"qk_norm": True}, QWEN | {"num_key_value_heads": 4, "decoder_sparse_step": 1}, only=NO_BIAS
    ),
    "qwen3_5_text": replace(DELTA_NET, defaults=DELTA_NET.defaults | {"num_key_value_heads": 4}),
    # every layer has experts: intermediate_size has no use
    "qwen3_5_moe_text": replace(
        DELTA_NET,
        defaults=DELTA_NET.defaults
        | {"decoder_sparse_step": 1, "num_key_value_heads": 2, "intermediate_size": 512}
        | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts_per_tok": 8}
        | {"num_experts": 256},
    ),
    "qwen3_next": replace(
        DELTA_NET,
        defaults=DELTA_NET.defaults
        | {"decoder_sparse_step": 1, "num_key_value_heads": 2, "intermediate_size": 5632}
        | {"shared_expert_intermediate_size": 512},
    ),
    "solar_open": Family(
        GLU,
        UNTIED | {"num_key_value_heads": 8, "head_dim": 128, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
        only={"attention_dropout": 0.0, "attention_bias": False},
        names={"intermediate_size": "moe_intermediate_size"},  # every layer has experts
    ),
    "gpt2": GPT2_FAMILY,
    "gpt_bigcode": replace(GPT2_FAMILY, defaults=GPT2 | {"hidden_act": "gelu_pytorch_tanh", "multi_query": True}),
    "gpt_neox": Family(
        PLAIN | {"bias": True},
        UNTIED | {"hidden_act": "gelu", "attention_dropout": 0.0, "hidden_dropout": 0.0, "use_parallel_residual": True},
        only={"attention_bias": True},
        switches={"parallel_residual": "use_parallel_residual"},
        dropout=("attention_dropout", "hidden_dropout"),
    ),
    "arcee": replace(LLAMA_FAMILY, fields=GLU | {"glu": False}, defaults=LLAMA | {"hidden_act": "relu2"}),
    "cohere": COHERE,
    "cohere2": replace(COHERE, defaults=COHERE.defaults | {"sliding_window": 4096}, windows=4),
    "ernie4_5": ERNIE,
    "exaone4": Family(
        POST_NORMS | {"qk_norm_type": "per_head"},
        UNTIED | {"num_key_value_heads": 32, "sliding_window": 4096},
        only={"attention_dropout": 0.0},
        windows=4,
    ),
    # modeling_falcon.py, FalconDecoderLayer: one norm for both halves unless the new architecture has two
    "falcon": Family(
        PLAIN,
        TIED
        | {"hidden_act": "gelu", "bias": False, "alibi": False, "parallel_attn": True}
        | {"multi_query": True, "new_decoder_architecture": False, "num_ln_in_parallel_attn": None}
        | {"attention_dropout": 0.0, "hidden_dropout": 0.0},
        only={"alibi": False},
        bias=("bias",),
        dropout=("attention_dropout", "hidden_dropout"),
        switches={"parallel_residual": "parallel_attn"},
        names={
            "intermediate_size": "ffn_hidden_size",
            "num_key_value_heads": "num_kv_heads",
            "hidden_act": "activation",
        },
    ),
    "glm": GLM,
    "glm4": replace(GLM, fields=GLU | {"post_norms": True}),
    "granite": LLAMA_FAMILY,
    "hunyuan_v1_dense": Family(GLU | {"qk_norm": True}, UNTIED, only=NO_BIAS),
    "llama": LLAMA_FAMILY,
    "mistral": Family(
        GLU,
        UNTIED | {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
        only={"attention_dropout": 0.0},
    ),
    "ministral3": replace(MIXTRAL, defaults=MIXTRAL.defaults | {"head_dim": 128}),
    # a shared expert whatever n_shared_experts says; attention without rotation (modeling_nemotron_h.py)
    "nemotron_h": Family(
        GLU | {"glu": False, "rotary_embeds": False},
        UNTIED
        | {"hidden_act": "relu2", "head_dim": 128, "num_key_value_heads": 8, "use_bias": False}
        | {"moe_shared_expert_intermediate_size": 7688, "n_routed_experts": 8, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 7688},
        only=NO_BIAS
        | {"mlp_bias": False, "use_bias": False, "mamba_proj_bias": False, "use_conv_bias": True}
        | {"hidden_dropout": 0.0, "n_shared_experts": 1},
        names={"hidden_act": "mlp_hidden_act", "head_dim": "attention_head_dim"},
    ),
    "nemotron": replace(LLAMA_FAMILY, fields=PLAIN, defaults=LLAMA | {"hidden_act": "relu2"}),
    "olmo2": OLMO2,
    "olmo3": replace(OLMO2, defaults=UNTIED | {"sliding_window": 4096}, windows=4),
    "opt": Family(
        PLAIN | {"learned_positions": True},
        TIED
        | {"hidden_act": "relu", "max_position_embeddings": 2048, "enable_bias": True}
        | {"dropout": 0.1, "attention_dropout": 0.0},
        only={"do_layer_norm_before": True, "_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True},
        bias=("enable_bias",),
        dropout=("dropout", "attention_dropout"),
        names={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
        extra_positions=2,
    ),
    "phi3": Family(
        GLU,
        UNTIED | {"attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "max_position_embeddings": 4096},
        dropout=("attention_dropout", "resid_pdrop", "embd_pdrop"),
    ),
    "qwen2": Family(GLU | {"qkv_bias": True}, QWEN, only={"attention_dropout": 0.0}),
    "qwen3": Family(
        GLU | {"qk_norm": True}, QWEN | {"head_dim": 128}, only={"attention_dropout": 0.0, "attention_bias": False}
    ),
    "seed_oss": Family(
        GLU,
        UNTIED
        | {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "attention_dropout": 0.1}
        | {"residual_dropout": 0.1},
        only={"attention_out_bias": False, "mlp_bias": False},
        dropout=("attention_dropout", "residual_dropout"),
        switches={"qkv_bias": "attention_bias"},
    ),
    "smollm3": replace(
        LLAMA_FAMILY,
        defaults=LLAMA | {"num_key_value_heads": 4, "tie_word_embeddings": True, "use_sliding_window": False},
    ),
    "stablelm": Family(
        GLU | {"norm": "layernorm", "norm_bias": True},
        UNTIED
        | {"num_key_value_heads": 32, "attention_dropout": 0.0, "hidden_dropout": 0.0, "use_parallel_residual": False},
        only={"use_qkv_bias": False, "qk_layernorm": False},
        dropout=("attention_dropout", "hidden_dropout"),
        # modeling_stablelm.py, StableLmDecoderLayer: post_attention_layernorm is None beside attention
        switches={"parallel_residual": "use_parallel_residual", "shared_norm": "use_parallel_residual"},
    ),
    "starcoder2": Family(
        PLAIN,
        TIED
        | {"hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 2}
        | {"max_position_embeddings": 4096, "use_bias": True}
        | {"attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0},
        bias=("use_bias",),
        dropout=("attention_dropout", "residual_dropout", "embedding_dropout"),
    ),
}
