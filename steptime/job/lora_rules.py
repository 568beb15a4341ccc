"""Rules for low-rank adapters."""

from __future__ import annotations

from steptime.job.limits import Rule

LORA_RULES = [
    Rule(
        "adapters of dense layers",
        "model.lora",
        "adapters are modeled only on dense layers with gqa (not with experts, mla, linear attention, mamba or mtp); remove it",
        lambda f: (
            f.lora is None
            or not (f.moe or f.patterned or f.linear or f.mtp or f.attention != "gqa" or f.kinds - {"dense"})
        ),
    ),
    Rule(
        "adapters with tp of Megatron",
        "model.lora",
        "adapters are modeled with tp > 1 only as Megatron splits them (got tp {f.tp} with {f.software}); use tp 1, or remove it",
        lambda f: (f.lora is None) | (f.tp == 1) | (f.family == "megatron-core"),
    ),
    Rule(
        "rank of split adapters",
        "model.lora.rank",
        "must be a multiple of tp {f.tp} where both matrices are split (got {f.lora.rank}); use another rank, or lora.split one",
        lambda f: f.lora is None or f.lora.split == "one" or f.lora.rank % f.tp == 0,
    ),
    Rule(
        "adapters in one precision",
        "model.lora",
        "adapters are not modeled with {f.precision}; use bf16, fp16 or fp32",
        lambda f: (f.lora is None) | (not f.recipe),
    ),
    Rule(
        "adapters with a split backward",
        "model.lora",
        "frozen weights are not modeled with schedules that split backward ({f.schedule_said}); use 1f1b",
        lambda f: (f.lora is None) | (not f.split_backward),
    ),
    Rule(
        "adapters with FSDP in a pipeline",
        "model.lora",
        "adapters are not modeled with FSDP or zero_level 3 in a pipeline (got pp {f.pp}); use pp 1",
        lambda f: (f.lora is None) | (f.pp == 1) | ((f.zero_level < 3) & (f.fsdp is None)),
    ),
    Rule(
        "adapters with FSDP 1",
        "model.lora",
        "adapters are not modeled with fsdp.version 1; use 2",
        lambda f: (f.lora is None) | (f.fsdp is None) | (f.fsdp_version == 2),
    ),
    Rule(
        "adapters of existing projections",
        "model.lora.targets",
        "the model has no gate_proj (glu is false), so nothing would be trained; add other projections",
        lambda f: f.lora is None or "glu" in f.switches or set(f.lora.targets) != {"gate_proj"},
    ),
    # bitsandbytes keeps packed weights; their shards need a storage dtype of another size
    Rule(
        "sharded nf4",
        "model.lora.base_dtype",
        "nf4 is not modeled with FSDP or zero_level 3; use bf16, or zero_level 2",
        lambda f: (f.lora is None) or (f.lora.base_dtype != "nf4") or ((f.zero_level < 3) & (f.fsdp is None)),
    ),
]
