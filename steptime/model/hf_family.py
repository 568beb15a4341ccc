"""How one family of Hugging Face's config.json is described, and features that are not modeled."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    "text_config": "a multimodal model (save its text_config as a separate file and use that)",
    "add_cross_attention": "cross attention",
}
UNMODELED = {
    "bloom": "ALiBi positions and a norm after the embedding",
    "gemma3": "a multimodal model (save its text_config as a separate file and use that)",
    "jamba": "a hybrid of attention and state-space layers",
    "mamba": "state-space layers",
    "mamba2": "state-space layers",
    "mpt": "ALiBi positions",
    "gptj": "biases only in the MLP and the output head",
    "olmo": "norms without parameters",
    "phi": "a bias in the output head",
}


@dataclass(frozen=True)
class Family:
    """The interpretation of one model_type."""

    fields: Json
    """Fields of `Model` that are fixed by the modeling code, regardless of the file."""
    defaults: Json
    """Class defaults of the keys read here."""
    only: Json = field(default_factory=dict)
    """Keys that must have this value where they are given or have a default; no other value is modeled."""
    bias: tuple[str, ...] = ()
    """Keys that switch biases of linear layers; they must agree, since `Model.bias` is one switch."""
    dropout: tuple[str, ...] = ()
    """Keys of dropout probabilities; they must agree."""
    switches: dict[str, str] = field(default_factory=dict)
    """Field of `Model` -> the key that switches it."""
    names: dict[str, str] = field(default_factory=dict)
    """Common key -> the family's own spelling."""
    extra_positions: int = 0
    """Rows of the learned position table beyond max_position_embeddings."""
    windows: int | None = None
    """Interval of layers with full attention (the last of each), unless layer_types says otherwise; None: all are equal."""
