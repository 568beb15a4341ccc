"""What must hold of linear attention."""

from __future__ import annotations

from steptime.job.limits import Rule

LINEAR_RULES = [
    Rule(
        "linear layers listed",
        "model.linear_attention.freq",
        "lists {f.linear_listed} layers, model.n_layers is {f.n_layers}; list each layer once",
        lambda f: (f.linear_listed is None) | (f.linear_listed == f.n_layers),
    ),
    Rule(
        "linear attention with a pattern",
        "model.linear_attention",
        "has no meaning beside model.hybrid_pattern; remove one",
        lambda f: (f.linear is None) | (not f.patterned),
    ),
    # megatron/core/transformer/transformer_config.py, __post_init__: experimental_attention_variant
    Rule(
        "key heads divide value heads",
        "model.linear_attention.n_key_heads",
        "must divide n_value_heads {f.linear_heads[1]} (got {f.linear_heads[0]})",
        lambda f: f.linear_heads[1] % f.linear_heads[0] == 0,
    ),
    Rule(
        "as many keys as values",
        "model.linear_attention.n_key_heads",
        "must equal n_value_heads {f.linear_heads[1]} with kind {f.linear} (got {f.linear_heads[0]})",
        lambda f: (f.linear in {None, "gated_delta_net"}) | (f.linear_heads[0] == f.linear_heads[1]),
    ),
    Rule(
        "tp divides linear key heads",
        "parallelism.tp",
        "must divide model.linear_attention.n_key_heads {f.linear_heads[0]} (got {f.tp})",
        lambda f: (f.linear is None) | (f.linear_heads[0] % f.tp == 0),
    ),
]
