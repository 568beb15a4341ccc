"""Hugging Face model families: how to interpret each config.json.

Class defaults are those of transformers 4.57.1 (src/transformers/models/FAMILY/configuration_FAMILY.py); what the code does
whatever the file says is in modeling_FAMILY.py beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

Json = dict[str, object]

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "relu2": "relu2",
}
FORBIDDEN = {
    "text_config": "a model of several parts (its text_config can be read as a file of its own)",
    "add_cross_attention": "cross attention",
}
UNMODELED = {
    "bloom": "ALiBi positions and a norm after the embedding",
    "cohere": "attention and MLP in parallel",
    "falcon": "attention and MLP in parallel",
    "gemma3": "a model of several parts (its text_config can be read as a file of its own)",
    "gptj": "attention and MLP in parallel",
    "jamba": "a hybrid of attention and state-space layers",
    "mamba": "state-space layers",
    "mamba2": "state-space layers",
    "mpt": "ALiBi positions",
    "olmo": "norms without parameters",
    "olmo2": "norms after attention and MLP, and over all heads of q and k together",
    "phi": "attention and MLP in parallel",
}


@dataclass(frozen=True)
class Family:
    """The interpretation of one model_type."""

    fields: Json
    """Fields of `Model` that the modeling code fixes, whatever the file says."""
    defaults: Json
    """Class defaults of the keys read here."""
    only: Json = field(default_factory=dict)
    """Keys that must have this value where they are given or have a default; no other value is modeled."""
    bias: tuple[str, ...] = ()
    """Keys that switch biases of linear layers; they must agree, since `Model.bias` is one switch."""
    dropout: tuple[str, ...] = ()
    """Keys of dropout probabilities; they must agree."""
    names: dict[str, str] = field(default_factory=dict)
    """Common key -> the family's own spelling."""
    extra_positions: int = 0
    """Rows of the learned position table beyond max_position_embeddings."""
    windows: int | None = None
    """Interval of layers with full attention (the last of each), unless layer_types says otherwise; None: all are equal."""


GLU: Json = {"glu": True, "norm": "rmsnorm", "norm_bias": False}
PLAIN: Json = {"glu": False, "norm": "layernorm", "norm_bias": True}
UNTIED: Json = {"hidden_act": "silu", "tie_word_embeddings": False}
LLAMA: Json = UNTIED | {"attention_bias": False, "mlp_bias": False}
QWEN: Json = UNTIED | {"num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096}
GPT2: Json = {
    "hidden_act": "gelu_new",
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
}
GPT2_NAMES = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
}

GPT2_FAMILY = Family(
    PLAIN | {"bias": True, "learned_positions": True},
    GPT2,
    dropout=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    names=GPT2_NAMES,
)
LLAMA_FAMILY = Family(GLU, LLAMA, only={"attention_dropout": 0.0}, bias=("attention_bias", "mlp_bias"))

MOE = UNTIED | {"attention_dropout": 0.0, "attention_bias": False}
NO_BIAS: Json = {"attention_dropout": 0.0, "attention_bias": False}
LATENT_FAMILY = Family(GLU, MOE | {"n_shared_experts": 0, "first_k_dense_replace": 0}, only=NO_BIAS)
GEMMA: Json = {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256} | NO_BIAS
GEMMA_NAMES = {"hidden_act": "hidden_activation"}

FAMILIES: dict[str, Family] = {
    "deepseek_v2": LATENT_FAMILY,
    "deepseek_v3": replace(LATENT_FAMILY, defaults=LATENT_FAMILY.defaults | {"n_group": 8, "topk_group": 4}),
    "kimi_k2": LATENT_FAMILY,
    "gemma": Family(
        GLU,
        {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256, "num_key_value_heads": 16},
        only={"attention_dropout": 0.0, "attention_bias": False},
    ),
    "gemma2": Family(
        GLU | {"post_norms": True}, GEMMA | {"sliding_window": 4096}, only=NO_BIAS, names=GEMMA_NAMES, windows=2
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
        GLU, UNTIED | {"n_shared_experts": 0, "first_k_dense_replace": 0}, only={"attention_dropout": 0.0}
    ),
    "gpt_oss": Family(
        GLU | {"bias": True},
        UNTIED | {"head_dim": 64, "sliding_window": 128, "swiglu_limit": 7.0},
        only={"attention_dropout": 0.0},
        windows=2,
    ),
    "llama4_text": Family(
        GLU,
        UNTIED | {"head_dim": 128, "interleave_moe_layer_step": 1},
        only=NO_BIAS,
        names={"inner": "intermediate_size_mlp"},
    ),
    "kimi_linear": replace(
        LATENT_FAMILY,
        defaults=MOE | {"num_shared_experts": 0, "first_k_dense_replace": 0, "hidden_act": "silu"},
        names={"num_experts_per_tok": "num_experts_per_token"},
    ),
    "minimax": Family(GLU, UNTIED | {"num_key_value_heads": 8}, only={"attention_dropout": 0.0}),
    "minimax_text_01": Family(GLU, UNTIED | {"num_key_value_heads": 8}, only={"attention_dropout": 0.0}),
    "mixtral": Family(GLU, UNTIED | {"num_key_value_heads": 8}, only={"attention_dropout": 0.0}),
    "olmoe": Family(GLU | {"qk_norm": True}, MOE, only=NO_BIAS),
    "qwen2_moe": Family(GLU | {"qkv_bias": True}, UNTIED | {"decoder_sparse_step": 1}, only={"attention_dropout": 0.0}),
    "qwen3_moe": Family(GLU | {"qk_norm": True}, UNTIED | {"decoder_sparse_step": 1, "head_dim": 128}, only=NO_BIAS),
    # the query's projection is twice as wide: the other half is the gate (modeling_qwen3_next.py, Qwen3NextAttention)
    "qwen3_next": Family(
        GLU | {"qk_norm": True, "attention": {"gated": True}},
        UNTIED
        | {"decoder_sparse_step": 1, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32}
        | {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
        | {"intermediate_size": 5632, "shared_expert_intermediate_size": 512},
        only=NO_BIAS,
    ),
    "gpt2": GPT2_FAMILY,
    "gpt_bigcode": replace(GPT2_FAMILY, defaults=GPT2 | {"hidden_act": "gelu_pytorch_tanh", "multi_query": True}),
    "gpt_neox": Family(
        PLAIN | {"bias": True},
        UNTIED | {"hidden_act": "gelu", "attention_dropout": 0.0, "hidden_dropout": 0.0, "use_parallel_residual": True},
        only={"use_parallel_residual": False, "attention_bias": True},
        dropout=("attention_dropout", "hidden_dropout"),
    ),
    "granite": LLAMA_FAMILY,
    "llama": LLAMA_FAMILY,
    "mistral": Family(
        GLU,
        UNTIED | {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
        only={"attention_dropout": 0.0},
    ),
    # a shared expert whatever n_shared_experts says; attention without rotation (modeling_nemotron_h.py)
    "nemotron_h": Family(
        GLU | {"glu": False, "rotary_embeds": False},
        UNTIED
        | {
            "hidden_act": "relu2",
            "head_dim": 128,
            "num_key_value_heads": 8,
            "use_bias": False,
        }
        | {"moe_shared_expert_intermediate_size": 7688, "n_routed_experts": 8, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 7688},
        only=NO_BIAS
        | {"mlp_bias": False, "use_bias": False, "mamba_proj_bias": False, "use_conv_bias": True}
        | {"hidden_dropout": 0.0, "n_shared_experts": 1},
        names={"hidden_act": "mlp_hidden_act", "head_dim": "attention_head_dim"},
    ),
    "nemotron": replace(LLAMA_FAMILY, fields=PLAIN, defaults=LLAMA | {"hidden_act": "relu2"}),
    "opt": Family(
        PLAIN | {"learned_positions": True},
        {
            "hidden_act": "relu",
            "tie_word_embeddings": True,
            "max_position_embeddings": 2048,
            "enable_bias": True,
            "dropout": 0.1,
            "attention_dropout": 0.0,
        },
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
    "stablelm": Family(
        GLU | {"norm": "layernorm", "norm_bias": True},
        UNTIED | {"num_key_value_heads": 32, "attention_dropout": 0.0, "hidden_dropout": 0.0},
        only={"use_qkv_bias": False, "qk_layernorm": False, "use_parallel_residual": False},
        dropout=("attention_dropout", "hidden_dropout"),
    ),
    "starcoder2": Family(
        PLAIN,
        {
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "use_bias": True,
            "attention_dropout": 0.0,
            "residual_dropout": 0.0,
            "embedding_dropout": 0.0,
        },
        bias=("use_bias",),
        dropout=("attention_dropout", "residual_dropout", "embedding_dropout"),
    ),
}
