"""The model section of a config: a decoder-only transformer."""

from typing import Annotated, Any, Literal, Self, TypeAlias

from steptime.base.config import Config, ConfigError
from steptime.base.core_schemas import BeforeValidator, Field, model_validator
from steptime.base.defaults import always
from steptime.base.num import Num, maximum, minimum
from steptime.model.lora import Lora

DROPOUT = 0.1
"""Probability behind `dropout: true`: GPT-2's and Megatron's default (megatron/core/transformer/transformer_config.py)."""


def _groups(data: dict[str, Any]) -> int | None:
    """The usual number of groups behind a limit of nodes, half of which or fewer are chosen (DeepSeek-V2 and V3)."""
    experts, limit = data.get("n_experts", 1), data.get("node_limit")
    return None if limit is None else next((n for n in range(2 * limit, experts) if experts % n == 0), experts)


class Moe(Config):
    """Mixture of experts: the experts, the layers that have them, and how the router distributes tokens."""

    n_experts: int = Field(ge=1)
    expert_inter_sz: int = Field(ge=1)
    experts_per_token: int = Field(ge=1)
    n_dense_layers: int = Field(default=0, ge=0)
    """Number of leading layers that are dense."""
    moe_frequency: float = Field(default=1.0, gt=0, le=1)
    """Share of the other layers that have experts: 0.5 is every second one, starting with the second (HF's decoder_sparse_step
    and interleave_moe_layer_step); `model.layers` lists any other pattern."""
    n_shared_experts: int = Field(default=0, ge=0)
    shared_expert_inter_sz: int = Field(
        default_factory=lambda data: data.get("n_shared_experts", 0) * data.get("expert_inter_sz", 1), ge=0
    )
    """Total width of the shared experts, which process every token."""
    latent_sz: int | None = Field(default=None, ge=1)
    """Width to which tokens are projected before they are sent to routed experts, and from which their sum is projected back
    (LatentMoE, Nemotron 3; Megatron-Core's moe_latent_size); default: experts see tokens as they are."""
    shared_expert_gate: bool = False
    """Whether a gate with one output scales the shared experts (Qwen2-MoE)."""
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    pre_softmax: bool = False
    """Softmax over all experts, then the top k (Mixtral and Qwen renormalize: the same after the top k)."""
    expert_bias: bool = False
    """Whether each expert has a bias that balances the load without a loss (DeepSeek-V3)."""
    node_limit: int | None = Field(default=None, ge=1)
    """Most nodes with experts of one token, each a group of experts (DeepSeek-V3: 4; HF's topk_group)."""
    n_groups: int | None = Field(default_factory=_groups, ge=1)
    """Groups of experts, of which a token takes the `node_limit` best (DeepSeek-V3: 8; HF's n_group); default: the smallest
    divisor of n_experts that is at least twice the limit."""
    load_balancing: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn"] = "none"
    z_loss: bool = False
    capacity_factor: float | None = Field(default=None, gt=0, le=100_000)
    """Most rows of an expert relative to the mean; rows beyond it are dropped. Default: none are dropped."""
    pad_to_capacity: bool = False
    """Whether every expert's rows are padded to its capacity, even if it is empty."""
    imbalance_factor: float = Field(default=1.0, ge=1)
    """Rows of the device with most over the mean, where experts are on several devices. 1 is even load, which nearly all
    published throughputs force (NVIDIA-NeMo/Megatron-Bridge docs/performance-summary.md). Trained routers with a balance loss
    have 1.04 to 1.22 (shawntan/scattermoe#10), DeepSeek-V3's training trace 1.08 (deepseek-ai/profile-data train.json)."""
    expert_tp_degree: int | None = Field(default=None, ge=1)
    """The same as `parallelism.etp`; both must be equal."""

    @property
    def balancing_loss(self) -> bool:
        """The loss that balances the load; sinkhorn balances the choice itself (Clark et al. 2022, arXiv 2202.01169)."""
        return self.load_balancing not in {"none", "sinkhorn"}

    def at(self, layer: int) -> bool:
        """Whether a layer has experts: after the dense ones, the last layer of each 1 / moe_frequency."""
        here = layer - self.n_dense_layers
        return here >= 0 and int((here + 1) * self.moe_frequency + 1e-9) > int(here * self.moe_frequency + 1e-9)


def _latent(data: dict[str, Any], width: int) -> int | None:
    """Whether the field is a width of latent attention only."""
    return width if data.get("kind") == "mla" else None


class AttentionKind(Config):
    """The kind of attention: grouped heads or latents, and how far back each position sees."""

    kind: Literal["gqa", "mla"] = "gqa"
    q_lora_rank: int | None = Field(default=None, ge=1, le=100_000)
    """Width of the query's latent; default: queries are projected directly (DeepSeek-V2-Lite)."""
    kv_lora_rank: int | None = Field(default_factory=lambda data: _latent(data, 512), ge=1, le=100_000)
    qk_nope_head_dim: int | None = Field(default_factory=lambda data: _latent(data, 128), ge=1, le=10_000)
    qk_rope_head_dim: int | None = Field(default_factory=lambda data: _latent(data, 64), ge=1, le=10_000)
    v_head_dim: int | None = Field(default_factory=lambda data: _latent(data, 128), ge=1, le=10_000)
    """Widths of latent attention; default: those of DeepSeek-V2 and V3."""
    window: int | None = Field(default=None, ge=1)
    """Number of positions that each position sees, itself included; default: all."""
    window_pattern: int | None = Field(default=None, ge=1)
    """The last of every n layers sees all positions (Gemma 3: 6, gpt-oss and Gemma 2: 2, Llama 4: 4); default: none does."""
    chunked: bool = False
    """Whether the window is a fixed chunk, of which a position sees the beginning (Llama 4), instead of moving with the
    position."""
    sinks: bool = False
    """Whether a learned logit per head takes part in the softmax (gpt-oss)."""
    gated: bool = False
    """Whether a gate as wide as the query scales the output (Qwen3-Next)."""

    @model_validator(mode="after")
    def _latents_have_widths(self) -> Self:
        widths = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        if self.kind == "mla" and (empty := [name for name in widths if getattr(self, name) is None]):
            raise ConfigError(
                f"model.attention.{name}: mla needs a width; remove the key for its default" for name in empty
            )
        return self

    @property
    def latent_widths(self) -> tuple[int, int, int, int]:
        """Rank of keys and values; per head the width without rope, the rope part, and the value's; 0 without latents."""
        return self.kv_lora_rank or 0, self.qk_nope_head_dim or 0, self.qk_rope_head_dim or 0, self.v_head_dim or 0

    @property
    def whole_heads(self) -> bool:
        """Whether chunks or sinks need all positions of a head on one rank.

        transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py, attn_forward_func_with_cp: "Context
        parallelism only supports softmax_type with cp_comm_type = 'a2a'".
        """
        return self.chunked or self.sinks

    def at(self, layer: int) -> bool:
        """Whether a layer sees only its window."""
        return self.window is not None and (self.window_pattern is None or (layer + 1) % self.window_pattern != 0)

    def shares(self, length: Num) -> tuple[Num, Num]:
        """Share of the scores of `length` positions that is used, and how many keys a query sees at most.

        Causal: a half. A window of w: w s - w^2 / 2 of s^2. A chunk of c: c s / 2.

        >>> AttentionKind(window=128).shares(1024.0)
        (0.1171875, 128.0)
        """
        if self.window is None:
            return 0.5, length
        length = maximum(length, 1.0)
        seen = minimum(1.0 * self.window, length)
        if self.chunked:
            return seen / length / 2.0, seen
        return seen / length * (1.0 - seen / length / 2.0), seen


LayerKind: TypeAlias = Literal["dense", "moe", "mamba", "attention", "mlp", "experts"]
"""A dense transformer layer, one with experts, a Mamba-2 layer, and in hybrid models attention, an MLP or experts only."""


class Mamba(Config):
    """Mamba-2 layers (Dao and Gu 2024, arXiv 2405.21060); figures not set are Megatron-Core's defaults."""

    n_heads: int | None = Field(default=None, ge=1, le=10_000)
    """Heads; twice the hidden size over head_dim where not set."""
    head_dim: int = Field(default=64, ge=1, le=2_000)
    state_dim: int = Field(default=128, ge=1, le=2_000)
    n_groups: int = Field(default=8, ge=1, le=10_000)
    """Number of groups of heads that share B and C."""
    conv_width: int = Field(default=4, ge=1, le=64)
    chunk_sz: int = Field(default=128, ge=1, le=1_000_000)
    """Tokens per chunk of the scan."""

    def heads(self, hidden_sz: int) -> int:
        """Heads of a model with this hidden size."""
        return self.n_heads or 2 * hidden_sz // self.head_dim


class LinearAttention(Config):
    """Linear attention in place of attention in some layers; the defaults are Megatron-Core's."""

    kind: Literal["gated_delta_net", "kda", "lightning"] = "gated_delta_net"
    """Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464), Kimi Delta Attention (arXiv 2510.26692) or Lightning Attention (Qin et
    al. 2024, arXiv 2401.04658)."""
    n_value_heads: int = Field(default=32, ge=1, le=10_000)
    n_key_heads: int = Field(
        default_factory=lambda data: 16 if data.get("kind") == "gated_delta_net" else data.get("n_value_heads", 1), ge=1
    )
    """Heads of queries and keys; in Gated DeltaNet each serves several heads of values."""
    key_head_dim: int = Field(default=128, ge=1, le=2_000)
    value_head_dim: int = Field(default=128, ge=1, le=2_000)
    conv_width: int = Field(default=4, ge=1, le=64)
    """Width in tokens of the short convolution of queries, keys and values; Lightning Attention has none."""
    freq: Annotated[int, Field(ge=2)] | list[Literal[0, 1]] = 4
    """Interval of layers with full attention (the last of each), or a list: 1 for each layer with linear attention, 0 for each
    with full (Megatron's linear_attention_freq)."""

    @property
    def widths(self) -> tuple[int, int]:
        """Total width of queries, or keys, and of values."""
        return self.n_key_heads * self.key_head_dim, self.n_value_heads * self.value_head_dim

    @property
    def listed(self) -> int:
        """Number of layers that `freq` lists; 0 where it is a number."""
        return 0 if isinstance(self.freq, int) else len(self.freq)

    def at(self, layer: int) -> bool:
        """Whether a layer has linear attention."""
        if isinstance(self.freq, int):
            return (layer + 1) % self.freq != 0
        return layer < len(self.freq) and self.freq[layer] == 1


class LayerRun(Config):
    """`repeat` consecutive layers of one kind, with their own widths where they differ from the model's."""

    repeat: int = Field(default=1, ge=1)
    kind: LayerKind = "dense"
    inter_sz: int | None = Field(default=None, ge=1)
    n_q_heads: int | None = Field(default=None, ge=1)
    n_kv_heads: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=1)

    @property
    def widths(self) -> dict[str, Any]:
        """The widths that it sets."""
        said = {key: getattr(self, key) for key in ("inter_sz", "n_q_heads", "n_kv_heads", "head_dim")}
        return {key: value for key, value in said.items() if value is not None}


class Model(Config):
    """A decoder-only transformer: embedding, n_layers blocks, final norm, head."""

    name: str = ""
    n_layers: int = Field(ge=1)
    hidden_sz: int = Field(ge=1)
    inter_sz: int = Field(ge=1)
    n_q_heads: int = Field(ge=1)
    vocab_sz: int = Field(ge=1)
    n_kv_heads: int = Field(default_factory=lambda data: data.get("n_q_heads", 1), ge=1)
    head_dim: int = Field(default_factory=lambda data: data.get("hidden_sz", 1) // data.get("n_q_heads", 1), ge=1)
    glu: bool = True
    learned_positions: bool = False
    max_positions: int | None = Field(default=None, ge=1)
    """Rows of the learned position table; the sequence length where not set."""
    rotary_embeds: bool = Field(default_factory=lambda data: not data.get("learned_positions", False))
    dropout: Annotated[float, BeforeValidator(lambda rate: DROPOUT * rate if isinstance(rate, bool) else rate)] = Field(
        0.0, ge=0, lt=1
    )
    """A probability; true means DROPOUT."""
    attention_dropout: float = Field(default_factory=lambda data: data.get("dropout", 0.0), ge=0, lt=1)
    """That of attention's scores."""
    tie_embeddings: bool = False
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    bias: bool = False
    qkv_bias: bool = Field(default_factory=lambda data: data.get("bias", False))
    """Whether the q, k and v projections have biases when others do not (Qwen2)."""
    norm_bias: bool = Field(default_factory=lambda data: data.get("bias", False))
    qk_norm: bool = False
    qk_norm_type: Literal["per_head", "per_layer"] = "per_head"
    """Whether a norm of q and k covers each head, or all heads of the layer together (OLMoE, OLMo 2, MiniMax-M2's word)."""
    pre_norms: bool = True
    """Whether attention and MLP begin with a norm; OLMo 2 and 3 have only those at their ends."""
    post_norms: bool = False
    """Whether attention and MLP end with a norm (Gemma 2 and 3, OLMo 2 and 3)."""
    parallel_residual: bool = False
    """Whether attention and MLP both read the input of the layer, and both are added to it (GPT-J, GPT-NeoX, Falcon)."""
    shared_norm: bool = False
    """Whether one norm feeds both of them (GPT-J, Phi-2, Falcon 7B, Cohere); needs parallel_residual."""
    activation: Literal["silu", "gelu", "relu", "relu2"] = Field(
        default_factory=lambda data: "silu" if data.get("glu", True) else "gelu"
    )
    swiglu_limit: float | None = Field(default=None, gt=0)
    """Gate and up are clamped to it, and the gate's activation is the quick GELU (gpt-oss: 7)."""
    layers: list[LayerRun] | None = None
    """Layers in depth order where they differ; by default all `n_layers` are dense with the widths above."""
    hybrid_pattern: str | None = Field(default=None, pattern=r"^[M*E-]+$")
    """Kinds of layer in depth order, in Megatron's letters: M Mamba-2, * attention, - MLP, E experts, each with its own norm."""
    mamba: Mamba | None = Field(
        default_factory=lambda data: Mamba() if "M" in (data.get("hybrid_pattern") or "") else None
    )
    moe: Moe | None = None
    attention: AttentionKind = Field(default_factory=always(AttentionKind.model_construct()))
    linear_attention: LinearAttention | None = None
    """Linear attention in some layers, `attention` in the others."""
    lora: Lora | None = None
    """Adapters over frozen weights; by default every parameter is trained."""
    mtp: int = Field(0, ge=0)
    mtp_repeated: bool = False
    """Depths of multi-token prediction: layers after the last one, each with its own loss; repeated: one layer for all."""
    source: str = ""
    """Where the figures come from (presets)."""

    @property
    def whole_qk_norm(self) -> bool:
        """Whether a norm of q and k covers all heads of a layer."""
        return self.qk_norm and self.qk_norm_type == "per_layer"

    @property
    def head_widths(self) -> tuple[int, int]:
        """Width of a head of queries and keys, and of values."""
        if self.attention.kind == "mla":
            _, nope, rope, value = self.attention.latent_widths
            return nope + rope, value
        return self.head_dim, self.head_dim
