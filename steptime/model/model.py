"""The model section of a config: a decoder-only transformer."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from steptime.base.config import Config, Section
from steptime.base.num import Num, maximum, minimum, where

DROPOUT = 0.1
"""What `dropout: true` stands for: GPT-2's and Megatron's default (megatron/core/transformer/transformer_config.py)."""


class Moe(Config):
    """Mixture of experts: what its layers are, which layers they are, and how the router deals tokens."""

    n_experts: int = Field(ge=1)
    expert_inter_sz: int = Field(ge=1)
    experts_per_token: int = Field(ge=1)
    n_dense_layers: int = Field(default=0, ge=0)
    """The first layers, which are dense."""
    moe_frequency: float = Field(default=1.0, gt=0, le=1)
    """Share of the other layers that have experts: 0.5 is every second one, from the second on (HF's decoder_sparse_step and
    interleave_moe_layer_step); `model.layers` lists any other pattern."""
    n_shared_experts: int = Field(default=0, ge=0)
    shared_expert_inter_sz: int = Field(
        default_factory=lambda data: data.get("n_shared_experts", 0) * data.get("expert_inter_sz", 1), ge=0
    )
    """Width of all shared experts together, which every token passes."""
    shared_expert_gate: bool = False
    """A gate of one output scales the shared experts (Qwen2-MoE)."""
    score_function: Literal["softmax", "sigmoid"] = "softmax"
    pre_softmax: bool = False
    """Softmax over all experts, then the top k (Mixtral and Qwen renormalize: the same after the top k)."""
    expert_bias: bool = False
    """A bias per expert that balances the load without a loss (DeepSeek-V3)."""
    node_limit: int | None = Field(default=None, ge=1)
    """Most nodes that a token's experts may lie on (DeepSeek-V3: 4)."""
    load_balancing: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn"] = "none"
    z_loss: bool = False
    capacity_factor: float | None = Field(default=None, gt=0)
    """Most rows of an expert over the mean; rows beyond it are dropped. Unsaid: none are."""
    pad_to_capacity: bool = False
    """Every expert gets as many rows as its capacity, empty ones included."""
    imbalance_factor: float = Field(default=1.0, ge=1)
    """Rows of the device with most over the mean, where experts lie on several devices. 1 is even load, which nearly all
    published throughputs force (NVIDIA-NeMo/Megatron-Bridge docs/performance-summary.md). Trained routers with a balance loss
    have 1.04 to 1.22 (shawntan/scattermoe#10), DeepSeek-V3's training trace 1.08 (deepseek-ai/profile-data train.json)."""
    expert_tp_degree: int | None = Field(default=None, ge=1)
    """The same as `parallelism.etp`, which it must equal."""

    @property
    def balancing_loss(self) -> bool:
        """Whether the load is balanced by a loss; sinkhorn balances the choice itself (Clark et al. 2022, arXiv 2202.01169)."""
        return self.load_balancing not in {"none", "sinkhorn"}

    def at(self, layer: int) -> bool:
        """Whether a layer has experts: of those after the dense ones, the last of each 1 / moe_frequency."""
        here = layer - self.n_dense_layers
        return here >= 0 and int((here + 1) * self.moe_frequency + 1e-9) > int(here * self.moe_frequency + 1e-9)


def _latent(data: dict[str, Any], width: int) -> int | None:
    """A width of latent attention, and of no other."""
    return width if data.get("kind") == "mla" else None


WINDOW_TILE = 128.0
"""Positions by which a windowed kernel's tiles reach beyond the window (FlashAttention's tiles of keys)."""


class AttentionKind(Config):
    """Which attention: grouped heads or latents, and how far back a position sees."""

    kind: Literal["gqa", "mla"] = "gqa"
    q_lora_rank: int | None = Field(default=None, ge=1)
    """Width of the query's latent; default: queries are projected straight (DeepSeek-V2-Lite)."""
    kv_lora_rank: int | None = Field(default_factory=lambda data: _latent(data, 512), ge=1)
    qk_nope_head_dim: int | None = Field(default_factory=lambda data: _latent(data, 128), ge=1)
    qk_rope_head_dim: int | None = Field(default_factory=lambda data: _latent(data, 64), ge=1)
    v_head_dim: int | None = Field(default_factory=lambda data: _latent(data, 128), ge=1)
    """Widths of latent attention; default: those of DeepSeek-V2 and V3."""
    window: int | None = Field(default=None, ge=1)
    """A position sees so many before it, itself included; default: all."""
    window_pattern: int | None = Field(default=None, ge=1)
    """The last of every n layers sees all positions (Gemma 3: 6, gpt-oss and Gemma 2: 2, Llama 4: 4); default: none does."""
    chunked: bool = False
    """The window is a chunk that a position sees the beginning of (Llama 4), not one that moves along."""
    sinks: bool = False
    """A learned logit per head takes part in the softmax (gpt-oss)."""
    gated: bool = False
    """A gate as wide as the query scales the output (Qwen3-Next)."""

    @property
    def latent_widths(self) -> tuple[int, int, int, int]:
        """Rank of keys and values, and of a head its part without rope, its rope part, its value; 0 without latents."""
        return self.kv_lora_rank or 0, self.qk_nope_head_dim or 0, self.qk_rope_head_dim or 0, self.v_head_dim or 0

    @property
    def whole_heads(self) -> bool:
        """Whether chunks or sinks need all positions of a head on one rank.

        transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py, attn_forward_func_with_cp: "Context
        parallelism only supports softmax_type with cp_comm_type = 'a2a'".
        """
        return self.chunked or self.sinks

    def at(self, layer: int) -> bool:
        """Whether a layer sees its window alone."""
        return self.window is not None and (self.window_pattern is None or (layer + 1) % self.window_pattern != 0)

    def shares(self, length: Num) -> tuple[Num, Num]:
        """Share of the scores of `length` positions that counts, and of those in the kernel's tiles.

        Causal: a half. A window of w: w s - w^2 / 2 of s^2. A chunk of c: c s / 2. Tiles reach a tile beyond a window that moves.

        >>> AttentionKind(window=128).shares(1024.0)
        (0.1171875, 0.5)
        """
        if self.window is None:
            return 0.5, 1.0
        length = maximum(length, 1.0)
        seen = minimum(1.0 * self.window, length)
        if self.chunked:
            return seen / length / 2.0, 1.0
        useful = where(seen < length, seen / (seen + WINDOW_TILE), 1.0)
        return seen / length * (1.0 - seen / length / 2.0), useful


LayerKind: TypeAlias = Literal["dense", "moe", "mamba", "attention", "mlp", "experts"]
"""A dense transformer layer, one with experts, a Mamba-2 layer, and in hybrid models attention, an MLP or experts alone."""


class Mamba(Config):
    """Mamba-2 layers (Dao and Gu 2024, arXiv 2405.21060); figures not set are Megatron-Core's defaults."""

    n_heads: int | None = Field(default=None, ge=1)
    """Heads; twice the hidden size over head_dim where not set."""
    head_dim: int = Field(default=64, ge=1)
    state_dim: int = Field(default=128, ge=1)
    n_groups: int = Field(default=8, ge=1)
    """Groups of heads that share B and C."""
    conv_width: int = Field(default=4, ge=1)
    chunk_sz: int = Field(default=128, ge=1)
    """Tokens that the scan takes at once."""

    def heads(self, hidden_sz: int) -> int:
        """Heads of a model of so wide a residual stream."""
        return self.n_heads or 2 * hidden_sz // self.head_dim


class LinearAttention(Config):
    """Linear attention in the place of attention in some layers; figures not set are Megatron-Core's defaults."""

    kind: Literal["gated_delta_net", "kda", "lightning"] = "gated_delta_net"
    """Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464), Kimi Delta Attention (arXiv 2510.26692) or Lightning Attention (Qin et
    al. 2024, arXiv 2401.04658)."""
    n_value_heads: int = Field(default=32, ge=1)
    n_key_heads: int = Field(
        default_factory=lambda data: 16 if data.get("kind") == "gated_delta_net" else data.get("n_value_heads", 1), ge=1
    )
    """Heads of queries and keys, each for several of values in Gated DeltaNet."""
    key_head_dim: int = Field(default=128, ge=1)
    value_head_dim: int = Field(default=128, ge=1)
    conv_width: int = Field(default=4, ge=1)
    """Tokens that the short convolution of queries, keys and values sees; Lightning Attention has none."""
    freq: Annotated[int, Field(ge=2)] | list[Literal[0, 1]] = 4
    """The last of every so many layers has full attention; or 1 for each layer with linear attention, 0 for each with full
    (Megatron's linear_attention_freq)."""

    @property
    def widths(self) -> tuple[int, int]:
        """Width of all queries, or keys, and of all values."""
        return self.n_key_heads * self.key_head_dim, self.n_value_heads * self.value_head_dim

    @property
    def listed(self) -> int:
        """How many layers `freq` lists; 0 where it is a number."""
        return 0 if isinstance(self.freq, int) else len(self.freq)

    def at(self, layer: int) -> bool:
        """Whether a layer has linear attention."""
        if isinstance(self.freq, int):
            return (layer + 1) % self.freq != 0
        return layer < len(self.freq) and self.freq[layer] == 1


class LayerRun(Config):
    """`repeat` neighboring layers of one kind, with widths of their own where they differ from the model's."""

    repeat: int = Field(default=1, ge=1)
    kind: LayerKind = "dense"
    inter_sz: int | None = Field(default=None, ge=1)
    n_q_heads: int | None = Field(default=None, ge=1)
    n_kv_heads: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=1)

    @property
    def widths(self) -> dict[str, Any]:
        """What it says of its widths."""
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
    """A probability; true is DROPOUT."""
    tie_embeddings: bool = False
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    bias: bool = False
    qkv_bias: bool = Field(default_factory=lambda data: data.get("bias", False))
    """Biases of the q, k and v projections, which Qwen2 has and no others."""
    norm_bias: bool = Field(default_factory=lambda data: data.get("bias", False))
    qk_norm: bool = False
    post_norms: bool = False
    """Attention and MLP end in a norm of their own as well (Gemma 2 and 3)."""
    activation: Literal["silu", "gelu", "relu", "relu2"] = Field(
        default_factory=lambda data: "silu" if data.get("glu", True) else "gelu"
    )
    swiglu_limit: float | None = Field(default=None, gt=0)
    """Gate and up are clamped to it, and the gate's activation is the quick GELU (gpt-oss: 7)."""
    layers: list[Section[LayerRun]] | None = None
    """Layers that are not all alike, in depth order; all `n_layers` are dense and of the widths above where not set."""
    hybrid_pattern: str | None = Field(default=None, pattern=r"^[M*E-]+$")
    """Kinds of layer in depth order, in Megatron's letters: M Mamba-2, * attention, - MLP, E experts, each with its own norm."""
    mamba: Section[Mamba] | None = Field(
        default_factory=lambda data: Mamba() if "M" in (data.get("hybrid_pattern") or "") else None
    )
    moe: Section[Moe] | None = None
    attention: Section[AttentionKind] = Field(default_factory=AttentionKind)
    linear_attention: Section[LinearAttention] | None = None
    """Linear attention in some layers, `attention` in the others."""
    mtp: int = Field(0, ge=0)
    """Depths of multi-token prediction: layers after the last one, each with a loss of its own (DeepSeek-V3)."""
    source: str = ""
    """Where the figures come from (presets)."""

    @property
    def head_widths(self) -> tuple[int, int]:
        """Width of a query's and key's head, and of a value's."""
        if self.attention.kind == "mla":
            _, nope, rope, value = self.attention.latent_widths
            return nope + rope, value
        return self.head_dim, self.head_dim
