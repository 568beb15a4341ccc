"""The model section of a config: a decoder-only transformer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from steptime.base.config import Config, Section

DROPOUT = 0.1
"""What `dropout: true` stands for: GPT-2's and Megatron's default (megatron/core/transformer/transformer_config.py)."""


class Moe(Config):
    """Mixture of experts (read and refused for now: `rules.py`)."""

    n_experts: int = Field(ge=1)
    expert_inter_sz: int = Field(ge=1)
    experts_per_token: int = Field(ge=1)
    capacity_factor: float | None = None
    moe_frequency: float = 1.0
    expert_tp_degree: int | None = None
    n_shared_experts: int = 0
    shared_expert_inter_sz: int | None = None
    n_dense_layers: int = 0


class AttentionKind(Config):
    """Which attention; anything but plain GQA is read and refused for now."""

    kind: Literal["gqa", "mla"] = "gqa"
    window: int | None = None


class LayerRun(Config):
    """`repeat` neighboring layers of one kind, with widths of their own where they differ from the model's."""

    repeat: int = Field(1, ge=1)
    kind: Literal["dense"] = "dense"
    inter_sz: int | None = Field(None, ge=1)
    n_q_heads: int | None = Field(None, ge=1)
    n_kv_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=1)

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
    max_positions: int | None = Field(None, ge=1)
    """Rows of the learned position table; the sequence length where unsaid."""
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
    activation: Literal["silu", "gelu", "relu", "relu2"] = Field(
        default_factory=lambda data: "silu" if data.get("glu", True) else "gelu"
    )
    layers: list[Section[LayerRun]] | None = None
    """Layers that are not all alike, in depth order; all `n_layers` are dense and of the widths above where unsaid."""
    moe: Section[Moe] | None = None
    attention: Section[AttentionKind] = Field(default_factory=AttentionKind)
    mtp: int = 0
    source: str = ""
    """Where the figures come from (presets)."""
