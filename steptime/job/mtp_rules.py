"""Rules for multi-token prediction as in Megatron-Core."""

from __future__ import annotations

from steptime.job.limits import Rule

MTP_RULES = [
    Rule(
        "mtp after a transformer layer",
        "model.mtp",
        "repeats the last layer, which must have attention and an MLP or experts (it is {f.last_kind}); use 0",
        lambda f: (f.mtp == 0) | (f.last_kind in {"dense", "moe"}),
    ),
    # megatron/core/transformer/multi_token_prediction.py, _checkpointed_forward
    Rule(
        "mtp with recomputation by groups",
        "performance.recompute.n_layers",
        "must be 1 with model.mtp (got {f.recompute_words}): Megatron-Core recomputes its layers one by one",
        lambda f: (
            (f.mtp == 0)
            | (f.granularity != "full")
            | (f.recompute_method == "block")
            | (set(f.recompute_counts) <= {1})
        ),
    ),
    # megatron/core/transformer/transformer_config.py, __post_init__: overlap_moe_expert_parallel_comm
    Rule(
        "mtp with expert overlap",
        "performance.overlap.ep",
        "with model.mtp, Megatron-Core overlaps the all-to-all of experts only for mtp 1 and pp > 1 (got mtp {f.mtp}, pp "
        "{f.pp}); use these, or remove the overlap",
        lambda f: (f.mtp == 0) | (dict(f.overlap).get("ep", 0.0) == 0.0) | ((f.mtp == 1) & (f.pp > 1)),
    ),
]
