"""The settings of low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685); `lora_ops` adds them to a part's ops."""

from __future__ import annotations

from typing import Literal, TypeAlias

from steptime.base.config import Config
from steptime.base.core_schemas import Field
from steptime.model.ops import Gemm, Op

Target: TypeAlias = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
QKV: tuple[Target, ...] = ("q_proj", "k_proj", "v_proj")
MLP: tuple[Target, ...] = ("gate_proj", "up_proj", "down_proj")
EVERY: tuple[Target, ...] = (*QKV, "o_proj", *MLP)
PROJECTIONS: dict[str, tuple[Target, ...]] = {
    "attn.qkv": QKV,
    "attn.q_proj": ("q_proj",),
    "attn.k_proj": ("k_proj",),
    "attn.v_proj": ("v_proj",),
    "attn.proj": ("o_proj",),
    "mlp.gate_up": ("gate_proj", "up_proj"),
    "mlp.gate_proj": ("gate_proj",),
    "mlp.up_proj": ("up_proj",),
    "mlp.down": ("down_proj",),
}
"""Projections of a dense layer by the name of their op, in Hugging Face's names; a fused one has one adapter."""
Split: TypeAlias = Literal["both", "one"]
BaseDtype: TypeAlias = Literal["bf16", "fp16", "fp32", "nf4"]
NF4 = 0.5 + 1.0 / 64.0 + 4.0 / (64.0 * 256.0)
"""Bytes per weight in NF4: 4 bits, an 8-bit scale for each 64, and an fp32 one for each 256 of these (Dettmers et al. 2023, arXiv
2305.14314, section 3, double quantization)."""


class Lora(Config):
    """Adapters of the projections of all layers; every other parameter is frozen."""

    rank: int = Field(default=8, ge=1)
    targets: list[Target] = Field(default_factory=lambda: list(EVERY), min_length=1)
    """Projections with an adapter."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of dropping an element of an adapter's input."""
    base_dtype: BaseDtype | None = None
    """Stored dtype of the frozen weights: that of compute where not set; nf4 (QLoRA) is that of the layers' projections."""
    split: Split = "both"
    """Matrices of an adapter that tensor parallelism splits: both, or the one beside the split dimension alone."""

    def adapts(self, op: Op) -> bool:
        """Whether an op is a projection with an adapter."""
        return isinstance(op, Gemm) and any(target in self.targets for target in PROJECTIONS.get(op.name, ()))
