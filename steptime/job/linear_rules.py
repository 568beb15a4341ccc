"""Rules for linear attention."""

from __future__ import annotations

from steptime.job.limits import Rule

LINEAR_RULES = [
    Rule(
        "linear layers listed",
        "model.linear_attention.freq",
        "lists {f.linear.listed} layers, model.n_layers is {f.n_layers}; list each layer once",
        lambda f: f.linear is None or f.linear.listed in {0, f.n_layers},
    ),
    Rule(
        "linear attention with a pattern",
        "model.linear_attention",
        "has no meaning together with model.hybrid_pattern; remove one",
        lambda f: (f.linear is None) | (not f.patterned),
    ),
    # megatron/core/transformer/transformer_config.py, __post_init__: experimental_attention_variant
    Rule(
        "key heads divide value heads",
        "model.linear_attention.n_key_heads",
        "must divide n_value_heads {f.linear.n_value_heads} (got {f.linear.n_key_heads})",
        lambda f: f.linear is None or f.linear.n_value_heads % f.linear.n_key_heads == 0,
    ),
    Rule(
        "as many keys as values",
        "model.linear_attention.n_key_heads",
        "must equal n_value_heads {f.linear.n_value_heads} with kind {f.linear.kind} (got {f.linear.n_key_heads})",
        lambda f: (
            f.linear is None or f.linear.kind == "gated_delta_net" or f.linear.n_key_heads == f.linear.n_value_heads
        ),
    ),
    Rule(
        "tp divides linear key heads",
        "parallelism.tp",
        "must divide model.linear_attention.n_key_heads {f.linear.n_key_heads} (got {f.tp})",
        lambda f: True if f.linear is None else f.linear.n_key_heads % f.tp == 0,
    ),
]
