"""The rules: each with a job that breaks it, and each as a mask over columns."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime.base.config import ConfigError
from steptime.job.job import Job, facts
from steptime.job.limits import BOUNDS, MODELED, NOT_MODELLED, SANE
from steptime.job.rules import LAYOUT_RULES, RULES, mask, problems
from steptime.software.frameworks import FRAMEWORKS
from steptime.software.performance import load_software, software_names

BASE = Job(
    model={"n_layers": 80, "hidden_sz": 8192, "inter_sz": 28672, "n_q_heads": 64, "n_kv_heads": 8, "vocab_sz": 128256},
    parallelism={"tp": 8, "pp": 2, "dp": 64},
    data={"gbs": 2048, "seqlen": 2048, "microbatch_sz": 1},
    hardware="dgx-h100",
)
MOE = {"n_experts": 8, "expert_inter_sz": 2048, "experts_per_token": 2}
FSDP2_MOE = {"model.moe": MOE, "performance.software": "fsdp2", "parallelism.pp": 1, "parallelism.zero_level": 3}

# rule -> (changes, the lines they give)
BROKEN = {
    "moe framework": (
        {"model.moe": MOE, "performance.software": "torch", "parallelism.sp": True},
        [
            (
                "performance.software: a mixture of experts is modeled for Megatron-Core and FSDP2 alone (got torch); "
                "use megatron-core, torchtitan or a profile of their kind"
            )
        ],
    ),
    "replicas of experts": (
        {"model.moe": MOE, "parallelism.tp": 1, "parallelism.dp": 8, "parallelism.ep": 8, "parallelism.replicas": 2},
        ["parallelism.replicas: must divide edp = dp*cp*tp / (ep*etp) (got 2); lower it, or ep 8"],
    ),
    "experts of Megatron": (
        FSDP2_MOE | {"model.moe": MOE | {"capacity_factor": 1.0}},
        [
            (
                "model.moe: capacity, balancing losses, gated or overlapped shared experts, norms after experts and dispatch by "
                "all-gather are not modeled yet with FSDP2 (got capacity_factor); remove it, or use megatron-core"
            )
        ],
    ),
    "etp with FSDP2": (
        FSDP2_MOE | {"parallelism.ep": 2, "parallelism.etp": 2},
        ["parallelism.etp: FSDP2 splits experts over ep or over tp, not both (got etp 2 with ep 2); remove it"],
    ),
    "experts cut by FSDP2": (
        FSDP2_MOE | {"model.moe": MOE | {"expert_inter_sz": 1000}},
        [
            (
                "parallelism.ep: where a stage has more ranks (512) than experts (8) FSDP2 cuts their weights by rows, and the "
                "ranks of one expert must divide expert_inter_sz 1000 and hidden_sz 8192; change ep or dp"
            )
        ],
    ),
    "moe without sp": (
        {"model.moe": MOE, "parallelism.sp": False},
        [
            (
                "parallelism.sp: Megatron-Core trains experts with tp > 1 only under sequence parallelism (got tp 8); "
                "set sp, or use tp 1"
            )
        ],
    ),
    "flex with capacity": (
        {
            "model.moe": MOE | {"capacity_factor": 1.0},
            "performance.moe.dispatcher": "flex",
            "parallelism.ep": 8,
        },
        [
            (
                "performance.moe.dispatcher: flex with a capacity factor is not modeled yet; use alltoall, "
                "or remove model.moe.capacity_factor"
            )
        ],
    ),
    "listed experts need moe": (
        {"model.layers": [{"kind": "moe", "repeat": 80}]},
        ["model.moe: missing: model.layers lists layers with experts"],
    ),
    "experts over ranks": (
        {"model.moe": MOE | {"n_experts": 12}, "parallelism.ep": 12},
        [
            (
                "parallelism.ep: dp*cp*tp = ep*etp*edp: the 512 devices of a stage (dp 64 * cp 1 * tp 8) are no multiple of "
                "ep 12 * etp 1 = 12"
            )
        ],
    ),
    "ep divides experts": (
        {"model.moe": MOE | {"n_experts": 12}, "parallelism.ep": 8},
        ["parallelism.ep: must divide n_experts 12 (got 8); possible: 1, 2, 3, 4, 6, 12"],
    ),
    "etp divides expert_inter_sz": (
        {"model.moe": MOE | {"expert_inter_sz": 1001}, "parallelism.ep": 8, "parallelism.etp": 8},
        ["parallelism.etp: must divide expert_inter_sz 1001 (got 8)"],
    ),
    "etp with ep 1": (
        {"model.moe": MOE, "parallelism.etp": 1},
        [
            (
                "parallelism.etp: must be tp 8 where ep is 1 (got 1): Megatron-Core reduces such experts over dp alone; "
                "remove it, or raise ep"
            )
        ],
    ),
    "flex with one rank": (
        {"model.moe": MOE, "performance.moe.dispatcher": "flex", "parallelism.tp": 1},
        ["performance.moe.dispatcher: flex wants ep*etp > 1; raise ep, or use alltoall"],
    ),
    "expert_tp_degree": (
        {"model.moe": MOE | {"expert_tp_degree": 2}, "parallelism.ep": 8},
        ["model.moe.expert_tp_degree: must equal parallelism.etp 1 (got 2); set one of them"],
    ),
    "tp divides shared experts": (
        {"model.moe": MOE | {"shared_expert_inter_sz": 1001}, "parallelism.ep": 8},
        ["parallelism.tp: must divide shared_expert_inter_sz 1001 (got 8)"],
    ),
    "top k": (
        {"model.moe": MOE | {"experts_per_token": 9}, "parallelism.ep": 8},
        ["model.moe.experts_per_token: must be at most n_experts 8 (got 9)"],
    ),
    "dense layers": (
        {"model.moe": MOE | {"n_dense_layers": 81}, "parallelism.ep": 8},
        ["model.moe.n_dense_layers: must be at most n_layers 80 (got 81)"],
    ),
    "padding needs capacity": (
        {"model.moe": MOE | {"pad_to_capacity": True}, "parallelism.ep": 8},
        ["model.moe.pad_to_capacity: needs model.moe.capacity_factor; set it, or remove pad_to_capacity"],
    ),
    "mla framework": (
        {"model.attention.kind": "mla", "performance.software": "torch", "parallelism.zero_level": 0},
        [
            (
                "model.attention.kind: mla is modeled for Megatron-Core and FSDP2 alone (got software torch); "
                "use megatron-core, torchtitan or a profile of their kind"
            )
        ],
    ),
    "window with cp": (
        {"model.attention.window": 4096, "parallelism.cp": 2},
        [
            (
                "parallelism.cp_comm_type: attention in a window is computed with cp by a2a, and by TransformerEngine's "
                "all_gather (got p2p); use a2a, or cp 1"
            )
        ],
    ),
    "sinks with cp": (
        {"model.attention.sinks": True, "parallelism.cp": 2, "parallelism.cp_comm_type": "all_gather"},
        [
            (
                "parallelism.cp_comm_type: attention with sinks or in chunks is computed with cp by a2a alone (got all_gather); "
                "use a2a, or cp 1"
            )
        ],
    ),
    "linear attention framework": (
        {"model.linear_attention": {}, "performance.software": "torch", "parallelism.pp": 1, "parallelism.tp": 1},
        [
            (
                "performance.software: linear attention is modeled for Megatron-Core alone (got torch); "
                "use megatron-core or a profile of its family"
            )
        ],
    ),
    "linear attention with ZeRO": (
        {"model.linear_attention": {}, "parallelism.pp": 1, "parallelism.zero_level": 3},
        [
            (
                "parallelism.zero_level: linear attention is not modeled with FSDP or zero_level 2 or 3 (got 3); "
                "use 0 or 1"
            )
        ],
    ),
    "linear attention with cp": (
        {"model.linear_attention": {}, "parallelism.cp": 2},
        ["parallelism.cp: not modeled yet together with model.linear_attention (got 2); use 1"],
    ),
    "linear attention with a window": (
        {"model.linear_attention": {}, "model.attention.window": 4096},
        ["model.attention.window: not modeled yet together with model.linear_attention (got 4096); remove it"],
    ),
    "linear attention with tp": (
        {"model.linear_attention": {"kind": "kda"}},
        [
            (
                "parallelism.tp: is modeled for gated_delta_net alone among model.linear_attention's kinds (got 8 with kda); "
                "use 1"
            )
        ],
    ),
    "linear layers listed": (
        {"model.linear_attention": {"freq": [1, 0]}},
        ["model.linear_attention.freq: lists 2 layers, model.n_layers is 80; list each layer once"],
    ),
    "linear attention with a pattern": (
        {"model.linear_attention": {}, "model.hybrid_pattern": "*-" * 40},
        ["model.linear_attention: has no meaning together with model.hybrid_pattern; remove one"],
    ),
    "key heads divide value heads": (
        {"model.linear_attention": {"n_key_heads": 24}},
        ["model.linear_attention.n_key_heads: must divide n_value_heads 32 (got 24)"],
    ),
    "as many keys as values": (
        {"model.linear_attention": {"kind": "kda", "n_key_heads": 16}, "parallelism.tp": 1},
        ["model.linear_attention.n_key_heads: must equal n_value_heads 32 with kind kda (got 16)"],
    ),
    "tp divides linear key heads": (
        {"model.linear_attention": {"n_key_heads": 4}},
        ["parallelism.tp: must divide model.linear_attention.n_key_heads 4 (got 8)"],
    ),
    "mtp framework": (
        {"model.mtp": 1, "performance.software": "torch", "parallelism.pp": 1, "parallelism.tp": 1},
        [
            (
                "performance.software: multi-token prediction is modeled for Megatron-Core alone (got torch); "
                "use megatron-core or a profile of its family"
            )
        ],
    ),
    "mtp with ZeRO": (
        {"model.mtp": 1, "parallelism.pp": 1, "parallelism.zero_level": 3},
        [
            (
                "parallelism.zero_level: multi-token prediction is not modeled with FSDP or zero_level 2 or 3 (got 3); "
                "use 0 or 1"
            )
        ],
    ),
    "mtp after a transformer layer": (
        {"model.mtp": 1, "model.hybrid_pattern": "*-" * 40, "model.moe": None},
        [
            "model.mtp: repeats the last layer, which must have attention and an MLP or experts (it is mlp); use 0",
        ],
    ),
    "mtp with window_pattern": (
        {"model.mtp": 1, "model.attention.window": 4096, "model.attention.window_pattern": 2},
        ["model.mtp: not modeled yet together with model.attention.window_pattern (got 1); use 0"],
    ),
    "mtp with recomputation by groups": (
        {"model.mtp": 1, "performance.recompute": {"granularity": "full", "method": "uniform", "n_layers": 2}},
        [
            (
                "performance.recompute.n_layers: must be 1 with model.mtp (got [2]): Megatron-Core recomputes its layers "
                "one by one"
            )
        ],
    ),
    "delayed weight gradients": (
        {
            "model.moe": {"n_experts": 4, "expert_inter_sz": 64, "experts_per_token": 2},
            "performance.moe.delay_wgrad_compute": True,
        },
        [
            (
                "performance.moe.delay_wgrad_compute: needs performance.overlap.ep, whose schedule it belongs to; add "
                "overlap: {ep: true}, or remove it"
            )
        ],
    ),
    "mtp with exchange overlapped": (
        {"model.mtp": 2, "performance.overlap": {"ep": True}},
        [
            (
                "performance.overlap.ep: with model.mtp 2 Megatron-Core overlaps the exchange of experts for one depth in a "
                "pipeline alone (pp 2); use mtp 1 and pp > 1, or remove the overlap"
            )
        ],
    ),
    "resharded parameters of split backwards": (
        {
            "performance.software": "fsdp2",
            "parallelism.fsdp": {"reshard_after_forward": True},
            "parallelism.zero_level": None,
            "parallelism.schedule": "zero_bubble",
            "performance.activation_checkpointing_type": "none",
            "performance.recompute": None,
        },
        [
            (
                "parallelism.fsdp.reshard_after_forward: not modeled yet with schedule zero_bubble; "
                "use false, torchtitan's default with pp > 1"
            )
        ],
    ),
    "stages and experts under the first FSDP": (
        {"performance.software": "fsdp2", "parallelism.fsdp": {"version": 1}, "parallelism.zero_level": None},
        ["parallelism.fsdp.version: 1 is not modeled yet with pp or ep over 1 (got pp 2, ep 1); use 2"],
    ),
    "tied embeddings of FSDP stages": (
        {
            "performance.software": "fsdp2",
            "parallelism.fsdp": {},
            "parallelism.zero_level": None,
            "model.tie_embeddings": True,
        },
        [
            (
                "model.tie_embeddings: torch's pipeline stages share no weights, so not with FSDP and pp > 1 (got pp 2); "
                "use false"
            )
        ],
    ),
    "too many devices": (
        {"parallelism.dp": 1_000_000, "data.gbs": 1_000_000},
        ["parallelism: tp*cp*pp*dp must be at most 10,000,000 devices (got 16000000)"],
    ),
    "too many micro-batches": (
        {"parallelism.dp": 1, "data.gbs": 200_000},
        ["data.gbs: more than 100,000 micro-batches per step (got 200000); raise microbatch_sz or dp"],
    ),
    "schedule too long": (
        {"parallelism.pp": 80, "parallelism.vpp": 100, "parallelism.dp": 1, "data.gbs": 80_000},
        ["parallelism: pp*vpp*micro-batches must be at most 10,000,000 (got 8000 chunks, 80000 micro-batches)"],
    ),
    "tp divides n_q_heads": (
        {"model.n_q_heads": 60, "model.n_kv_heads": 4, "model.head_dim": 128, "data.seqlen": 2048},
        ["parallelism.tp: must divide n_q_heads 60 (got 8); valid: 1, 2, 4"],
    ),
    "tp against n_kv_heads": (
        {"model.n_q_heads": 48, "model.n_kv_heads": 12, "model.head_dim": 128},
        ["parallelism.tp: must divide n_kv_heads 12 or be a multiple of it (got 8)"],
    ),
    "framework has cp": (
        {"performance.software": "megatron-2021", "parallelism.cp": 2},
        ["parallelism.cp: megatron-2021 does not support context parallelism (got 2); use 1"],
    ),
    "framework has cp_comm_type": (
        {
            "performance.software": "deepspeed",
            "parallelism.cp": 2,
            "parallelism.cp_comm_type": "p2p",
            "parallelism.pp": 1,
        },
        ["parallelism.cp_comm_type: deepspeed supports a2a (got p2p)"],
    ),
    "cp needs flash": (
        {"parallelism.cp": 2, "performance.attention_impl": "unfused"},
        [
            "parallelism.cp: unfused attention does not support context parallelism (got 2); use attention_impl flash or cp 1"
        ],
    ),
    "cp divides seqlen": (
        {"parallelism.cp": 2, "data.seqlen": 2050, "parallelism.sp": False},
        ["data.seqlen: must be a multiple of 4 with cp 2 (got 2050)"],
    ),
    "tp divides seqlen of cp": (
        {"parallelism.cp": 2, "data.seqlen": 2056},
        ["data.seqlen: must be a multiple of tp*cp with sequence parallelism and cp: 16 (got 2056)"],
    ),
    "a2a divides heads": (
        {"parallelism.cp": 2, "parallelism.cp_comm_type": "a2a"},
        ["parallelism.cp: a2a needs n_q_heads 64 and n_kv_heads 8 to be multiples of tp*cp = 16; lower cp"],
    ),
    "tp over n_kv_heads": (
        {"performance.software": "torch", "model.n_kv_heads": 4},
        ["parallelism.tp: torch does not replicate key-value heads, so tp must divide n_kv_heads 4 (got 8)"],
    ),
    "tp divides inter_sz": (
        {"model.inter_sz": 28676},
        ["parallelism.tp: must divide inter_sz 28676 (got 8); valid: 1, 2, 4"],
    ),
    "tp divides vocab_sz": (
        {"performance.software": "torch", "model.vocab_sz": 50257},
        ["parallelism.tp: must divide vocab_sz 50257, which torch does not pad (got 8)"],
    ),
    "tp divides seqlen": (
        {"data.seqlen": 2047},
        ["data.seqlen: must be a multiple of tp 8 with sequence parallelism (got 2047)"],
    ),
    "n_kv_heads divides n_q_heads": (
        {"model.n_kv_heads": 48},
        ["model.n_kv_heads: must divide n_q_heads 64 (got 48)"],
    ),
    "head_dim": (
        {"model.hidden_sz": 8200},
        ["model.hidden_sz: 8200 is not a multiple of n_q_heads 64; set model.head_dim"],
    ),
    "seqlen within positions": (
        {"model.learned_positions": True, "model.max_positions": 1024},
        ["data.seqlen: must be at most model.max_positions 1024 (got 2048)"],
    ),
    "layers listed": (
        {"model.layers": [{"repeat": 79}]},
        ["model.n_layers: must be the 79 layers that model.layers lists, repeats included (got 80)"],
    ),
    "pattern or layers": (
        {"model.layers": [{"repeat": 80}], "model.hybrid_pattern": "*-" * 40},
        ["model.hybrid_pattern: has no meaning together with model.layers; remove one"],
    ),
    "mamba layers need mamba": (
        {"model.layers": [{"repeat": 80, "kind": "mamba"}]},
        ["model.mamba: missing: model.layers lists Mamba layers"],
    ),
    "tp and cp divide mamba heads": (
        {"model.hybrid_pattern": "M-" * 40, "model.mamba": {"n_heads": 12}},
        ["parallelism.tp: tp*cp must divide the 12 Mamba heads (got 8 * 1)"],
    ),
    "tp divides mamba groups": (
        {"model.hybrid_pattern": "M-" * 40, "model.mamba": {"n_groups": 4}},
        ["parallelism.tp: must divide model.mamba.n_groups 4 (got 8)"],
    ),
    "mamba framework": (
        {"model.hybrid_pattern": "M-" * 40, "performance.software": "torch"},
        [
            (
                "performance.software: Mamba layers are modeled for Megatron-Core alone (got torch); use megatron-core or a "
                "profile of its family"
            )
        ],
    ),
    "mamba with ZeRO": (
        {"model.hybrid_pattern": "M-" * 40, "parallelism.zero_level": 2, "parallelism.pp": 1},
        ["parallelism.zero_level: Mamba layers are not modeled with FSDP or zero_level 2 or 3 (got 2); use 0 or 1"],
    ),
    "layers divide": (
        {"parallelism.pp": 3},
        [
            (
                "model.n_layers: must be a multiple of pp*vpp = 3 (got 80); "
                "or set parallelism.layers_per_stage to auto or to 3 counts"
            )
        ],
    ),
    "layers and ends divide": (
        {"parallelism.pp": 4, "parallelism.embedding_and_loss_count_as_layers": True},
        [
            (
                "model.n_layers: with embedding_and_loss_count_as_layers, n_layers + 2 must be a multiple of pp*vpp = 4 "
                "(got 80 + 2); "
                "or set parallelism.layers_per_stage to auto"
            )
        ],
    ),
    "enough layers": (
        {"model.n_layers": 1, "parallelism.layers_per_stage": "auto"},
        ["parallelism.pp: pp*vpp = 2 is more than n_layers 1; lower pp or vpp (got pp 2, vpp 1)"],
    ),
    "layers_per_stage has a count per chunk": (
        {"parallelism.layers_per_stage": [20, 40, 20]},
        ["parallelism.layers_per_stage: expected pp*vpp = 2 counts (got [20, 40, 20])"],
    ),
    "layers_per_stage sums to n_layers": (
        {"parallelism.layers_per_stage": [40, 41]},
        ["parallelism.layers_per_stage: counts must sum to n_layers 80 and be 0 or more (got [40, 41])"],
    ),
    "layers_per_stage or ends": (
        {"parallelism.layers_per_stage": [40, 40], "parallelism.embedding_and_loss_count_as_layers": True},
        ["parallelism.embedding_and_loss_count_as_layers: has no effect with layers_per_stage counts; remove one"],
    ),
    "gbs divides": (
        {"data.gbs": 2000},
        ["data.gbs: must be a multiple of dp*microbatch_sz = 64 (got 2000); nearest: 1984 or 2048"],
    ),
    "vpp needs pp": (
        {"parallelism.pp": 1, "parallelism.vpp": 2},
        ["parallelism.vpp: virtual stages need pp > 1 (got 2 with pp 1); use 1"],
    ),
    "interleaving framework": (
        {"performance.software": "deepspeed", "parallelism.vpp": 2},
        ["parallelism.vpp: deepspeed does not support the interleaved schedule (got 2); use 1"],
    ),
    "schedule with vpp": (
        {"parallelism.schedule": "gpipe", "parallelism.vpp": 2},
        ["parallelism.schedule: vpp 2 needs interleaved (got 'gpipe'); remove schedule or use vpp 1"],
    ),
    "interleaved needs vpp": (
        {"parallelism.schedule": "interleaved"},
        ["parallelism.schedule: interleaved needs vpp > 1 (got vpp 1); set vpp or use 1f1b"],
    ),
    "interleaving in groups of pp": (
        {"parallelism.vpp": 2, "data.gbs": 64 * 31},
        [
            (
                "data.gbs: the interleaved schedule needs a number of micro-batches that is a multiple of pp 2 (got 31); "
                "nearest: gbs 1920 or 2048, or set parallelism.microbatch_group_sz to 4"
            )
        ],
    ),
    "group needs interleaving": (
        {"parallelism.microbatch_group_sz": 2},
        [
            (
                "parallelism.microbatch_group_sz: only an interleaved pipeline of a Megatron profile has groups of its own; "
                "remove it"
            )
        ],
    ),
    "group within the micro-batches": (
        {"parallelism.vpp": 2, "parallelism.microbatch_group_sz": 3, "data.gbs": 64 * 31},
        [
            (
                "parallelism.microbatch_group_sz: must be from pp 2 to the 31 micro-batches, with a remainder of none or at "
                "least pp (got 3); use 4"
            )
        ],
    ),
    "schedule of the framework": (
        {"parallelism.schedule": "zero_bubble"},
        ["parallelism.schedule: megatron-core has no zero_bubble schedule; use one of gpipe, 1f1b, interleaved"],
    ),
    "schedule in a V": (
        {"performance.software": "torch", "parallelism.schedule": "zbv"},
        ["parallelism.vpp: zbv needs vpp 2 (got 1)"],
    ),
    "dualpipev micro-batches": (
        {
            "performance.software": "torch",
            "parallelism.schedule": "dualpipev",
            "parallelism.vpp": 2,
            "data.gbs": 64 * 3,
        },
        ["data.gbs: dualpipev needs at least 2 * pp = 4 micro-batches (got 3)"],
    ),
    "recomputation with split backward": (
        {
            "performance.software": "torch",
            "parallelism.schedule": "zero_bubble",
            "performance.recompute": {"granularity": "full"},
        },
        ["performance.recompute: not modeled yet with zero_bubble, zbv and dualpipev (got full); remove it"],
    ),
    "tied embeddings in a V": (
        {
            "performance.software": "torch",
            "parallelism.schedule": "zbv",
            "parallelism.vpp": 2,
            "model.tie_embeddings": True,
        },
        [
            (
                "model.tie_embeddings: not modeled yet with zbv and dualpipev, whose first stage holds both ends; use false"
            )
        ],
    ),
    "interleaving in rounds": (
        {"performance.software": "torch", "parallelism.pp": 4, "parallelism.vpp": 2, "data.gbs": 64 * 9},
        [
            (
                "data.gbs: torch's interleaved schedule needs micro-batches that divide into max(1, microbatches // pp) rounds "
                "(got 9 with pp 4); nearest: gbs 512 or 768"
            )
        ],
    ),
    "replicas divide dp": ({"parallelism.replicas": 3}, ["parallelism.replicas: must divide dp 64 (got 3)"]),
    "replicas need sharding": (
        {"parallelism.replicas": 2, "parallelism.zero_level": 0},
        [
            (
                "parallelism.replicas: replicas require sharded states, that is zero_level 1 or higher (got 2 with zero_level 0)"
            )
        ],
    ),
    "fsdp against zero_level": (
        {"parallelism.pp": 1, "parallelism.fsdp": {}, "parallelism.zero_level": 2},
        [
            (
                "parallelism.zero_level: contradicts fsdp, which is level 3 (got 2); remove zero_level, or "
                "set fsdp.reshard_after_forward"
            )
        ],
    ),
    "fsdp framework": (
        {"parallelism.pp": 1, "parallelism.fsdp": {}, "performance.software": "deepspeed"},
        ["parallelism.fsdp: options of torch FSDP2, which deepspeed does not support; use software fsdp2"],
    ),
    "zero framework": (
        {"performance.software": "megatron-2021", "parallelism.zero_level": 3},
        ["parallelism.zero_level: megatron-2021 supports levels 0, 1 (got 3)"],
    ),
    "zero with pipeline": (
        {"parallelism.zero_level": 2},
        [
            (
                "parallelism.zero_level: megatron-core supports only levels 0 and 1 with pp > 1 (got 2 "
                "with pp 2); use zero_level 1 or pp 1"
            )
        ],
    ),
    "ep needs moe": ({"parallelism.ep": 8}, ["parallelism.ep: must be 1 without model.moe (got 8)"]),
    "experts over centres": (
        {
            "model.moe": MOE | {"n_experts": 32},
            "parallelism.ep": 32,
            "parallelism.dp": 60,
            "parallelism.pp": 1,
            "data.gbs": 1920,
            "cross_dc": {"n_dcs": 2, "interconnect_bandwidth_gbps": 100, "interconnect_latency_s": 0.005},
        },
        [
            "cross_dc.n_dcs: must divide edp = dp*cp*tp / (ep*etp), so that no layer's experts lie in two centres (got 2)"
        ],
    ),
    "n_dcs divides dp": (
        {"cross_dc": {"n_dcs": 3, "interconnect_bandwidth_gbps": 100, "interconnect_latency_s": 0.005}},
        ["cross_dc.n_dcs: must divide dp 64 (got 3)"],
    ),
    "machine has the precision": (
        {"hardware.node_type": "v100"},
        ["performance.precision: dgx-1v does not support bf16; use one of fp16, fp32"],
    ),
    "framework has the recipe": (
        {"performance.software": "deepspeed", "performance.precision": "fp8", "parallelism.zero_level": 1},
        [
            "performance.precision: deepspeed does not run fp8_delayed; use software megatron-core",
        ],
    ),
    "fp8_params of torchao": (
        {
            "performance.software": "torchtitan",
            "performance.precision": "fp8_rowwise",
            "performance.fp8_params": True,
            "parallelism.pp": 1,
        },
        [
            "performance.fp8_params: FSDP gathers fp8 weights with fp8_tensorwise alone (got fp8_rowwise); remove it",
        ],
    ),
    "memory budget": (
        {"performance.recompute": {"granularity": "selective", "memory_budget": 0.9}},
        [
            (
                "performance.recompute.memory_budget: belongs to granularity selective without modules, and to "
                "performance.compile (got compile none)"
            )
        ],
    ),
    "framework compiles": (
        {"performance.compile": "blocks"},
        [
            (
                "performance.compile: torch.compile of whole blocks is modeled for torch and FSDP2 alone "
                "(got megatron-core); use none"
            )
        ],
    ),
    "recipe with ZeRO": (
        {"performance.precision": "fp8_current", "parallelism.zero_level": 2, "parallelism.pp": 1},
        [
            (
                "performance.precision: TransformerEngine's recipes are not modeled yet with zero_level 2 or 3 "
                "(got fp8_current with 2); use 0 or 1, or bf16"
            )
        ],
    ),
    "norms under delayed scaling": (
        {
            "performance.precision": "fp8",
            "performance.recompute": {"granularity": "selective", "modules": ["layernorm"]},
        },
        [
            (
                "performance: Megatron-Core does not recompute layernorm under fp8_delayed; use fp8_current, or other modules"
            )
        ],
    ),
    "fp8_params": (
        {"performance.fp8_params": True},
        ["performance.fp8_params: needs a low-precision recipe (got precision bf16); remove it"],
    ),
    "remainder of bf16": (
        {"performance.master_dtype": "remainder", "performance.precision": "fp16"},
        [
            "performance.master_dtype: remainder stores the fp32 bits that bf16 drops, so param_dtype must be bf16 (got fp16)"
        ],
    ),
    "framework has the optimizer": (
        {"performance.optimizer": "adafactor", "parallelism.zero_level": 0},
        ["performance.optimizer: megatron-core does not run adafactor; use adamw, lion, sgd, muon, dist_muon"],
    ),
    "optimizer needs whole tensors": (
        {"performance.optimizer": "adafactor", "performance.software": "torch", "parallelism.zero_level": 1},
        [
            "performance.optimizer: adafactor updates whole tensors, which zero_level 1 cuts; use parallelism.zero_level 0"
        ],
    ),
    "muon is not sharded": (
        {"performance.optimizer": "muon"},
        [
            (
                "performance.optimizer: muon updates whole matrices, which zero_level 1 cuts; "
                "use parallelism.zero_level 0, or dist_muon with 1"
            )
        ],
    ),
    "dist_muon deals out": (
        {"performance.optimizer": "dist_muon", "parallelism.zero_level": 0},
        [
            (
                "performance.optimizer: dist_muon deals out whole matrices to data-parallel ranks; "
                "use parallelism.zero_level 1 (got 0), or muon"
            )
        ],
    ),
    "dist_muon with replicas": (
        {"performance.optimizer": "dist_muon", "parallelism.replicas": 2},
        ["parallelism.replicas: dist_muon does not run with replicas (got 2); use 1"],
    ),
    "shares": (
        {"performance.overlap.tp": 1.5},
        ["performance.overlap: fractions must be between 0 and 1 (got tp 1.5)"],
    ),
    "selective keys": (
        {"performance.recompute": {"granularity": "selective", "n_layers": 2}},
        ["performance.recompute: method and n_layers belong to granularity full; selective takes modules"],
    ),
    "full keys": (
        {"performance.recompute": {"granularity": "full", "modules": ["mlp"]}},
        ["performance.recompute.modules: belong to granularity selective (got granularity full)"],
    ),
    "recompute counts": (
        {"performance.recompute": {"granularity": "full", "n_layers": [1, 2, 3]}, "parallelism.vpp": 2},
        ["performance.recompute.n_layers: expected one number, 2 (per stage) or 4 (per chunk) (got [1, 2, 3])"],
    ),
    "recompute counts positive": (
        {"performance.recompute": {"granularity": "full", "n_layers": 0}},
        ["performance.recompute.n_layers: must be at least 1, or 0 with method block (got [0])"],
    ),
    "recompute of experts": (
        {"performance.recompute": {"granularity": "selective", "modules": ["moe_act", "mlp", "moe"]}},
        ["performance.recompute.modules: require model.moe (got mlp, moe, moe_act)"],
    ),
    "offload framework": (
        {"performance.offload_modules": ["core_attn"], "performance.software": "torch", "parallelism.pp": 1},
        [
            (
                "performance.offload_modules: is Megatron-Core's (got software torch); remove it, or use megatron-core or a "
                "profile of its family"
            )
        ],
    ),
    "offload of attn_proj": (
        {"performance.offload_modules": ["attn_proj"]},
        [
            (
                "performance.offload_modules: attn_proj needs core_attn, which keeps its input too; add it, or remove attn_proj"
            )
        ],
    ),
    "offload of what runs again": (
        {"performance.offload_modules": ["core_attn"], "performance.activation_checkpointing_type": "selective"}
        | {"performance.recompute": {"granularity": "selective", "modules": ["core_attn"]}},
        [
            (
                "performance.offload_modules: what granularity full, moe or core_attn run again cannot be offloaded too; remove "
                "it from one of them"
            )
        ],
    ),
    "offload with sharded parameters or graphs": (
        {"performance.offload_modules": ["mlp_norm"], "performance.cuda_graphs": True},
        [
            (
                "performance.offload_modules: not modeled yet with zero_level 2 and 3 or with cuda_graphs; use zero_level 1 and "
                "cuda_graphs false"
            )
        ],
    ),
    "offload link": (
        {"performance.offload_modules": ["mlp_norm"], "hardware.node_type": "mi300x"},
        [
            (
                "performance.offload_modules: mi300x-node does not say how fast its host's memory is reached; set "
                "accelerator.host_bytes_per_s in hardware.overrides"
            )
        ],
    ),
    "recompute of mla": (
        {"performance.recompute": {"granularity": "selective", "modules": ["mla_up_proj"]}},
        ["performance.recompute.modules: mla_up_proj requires attention kind mla"],
    ),
}
# set together by a file only: replacing one of the two takes the other away
BOTH = {
    "one bucket size": (
        {"parallelism": {"tp": 8, "pp": 2, "dp": 64, "bucket_size_mb": 100, "n_param_buckets": 5}},
        ["parallelism: bucket_size_mb and n_param_buckets are both set; use one"],
    ),
    "one recompute": (
        {"performance": {"activation_checkpointing_type": "full", "recompute": {"granularity": "full"}}},
        ["performance.recompute: conflicts with activation_checkpointing_type 'full'; use one"],
    ),
}


@pytest.mark.parametrize("name", [*BROKEN, *BOTH])
def test_a_broken_rule_gives_its_line(name):
    changes, lines = (BROKEN | BOTH)[name]
    with pytest.raises(ConfigError) as error:
        BASE.replace(**changes)
    assert error.value.problems == lines


def test_every_rule_has_a_job_that_breaks_it():
    bounds = {f"{name} is out of range" for name in BOUNDS}
    assert {rule.name for rule in RULES} == bounds | BROKEN.keys() | BOTH.keys()


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds(name):
    path, limit = BOUNDS[name]
    absurd = facts(BASE)._replace(**{name: int(limit) + 1})
    assert problems(absurd)[0].line == f"{path}: must be at most {limit:,} (got {int(limit) + 1})"
    assert not any(
        rule.name == f"{name} is out of range" for rule in SANE if not rule.holds(facts(BASE)._replace(**{name: limit}))
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"parallelism.tp": 64, "parallelism.dp": 8},  # key-value heads are copied
        {"parallelism.tp": 1, "parallelism.sp": True},  # no effect, and dlcalc's files say so
        {"parallelism.pp": 3, "parallelism.layers_per_stage": "auto"},
        {"parallelism.vpp": 2, "parallelism.schedule": "interleaved"},
        {"parallelism.pp": 1, "parallelism.zero_level": 3},
        {"parallelism.pp": 1, "parallelism.fsdp": {}, "parallelism.zero_level": 3},
        {"parallelism.pp": 1, "parallelism.fsdp": {"reshard_after_forward": False}, "parallelism.zero_level": 2},
        {
            "performance.software": "torch",
            "parallelism.pp": 4,
            "parallelism.vpp": 2,
            "data.gbs": 64 * 10,
        },  # two rounds of five
        {"performance.recompute": {"granularity": "full", "method": "block", "n_layers": [3, 0]}},
        {"performance.master_dtype": "remainder"},
        {"hardware.node_type": "v100", "performance.precision": "fp16"},
        {"parallelism.cp": 2},
        {"parallelism.cp": 2, "model.attention.kind": "mla", "model.n_kv_heads": 64},
        {"model.moe": MOE, "parallelism.zero_level": 2, "parallelism.pp": 1},
        {"model.moe": MOE, "parallelism.zero_level": 3, "parallelism.pp": 1, "parallelism.ep": 8},
        {"parallelism.cp": 2, "parallelism.cp_comm_type": "all_gather", "model.attention.window": 4096},
        {"parallelism.cp": 4, "parallelism.cp_comm_type": "a2a", "parallelism.tp": 2},
        {
            "parallelism.cp": 3,
            "performance.software": "deepspeed",
            "parallelism.pp": 1,
            "parallelism.tp": 1,
            "model.n_q_heads": 66,
            "model.n_kv_heads": 6,
            "model.head_dim": 128,
            "data.seqlen": 2049,
        },  # one chunk a rank
        # Megatron's copies of the distributed optimizer cut dp*cp, torchtitan's dp alone
        {"parallelism.cp": 3, "data.seqlen": 6144, "parallelism.replicas": 3},
    ],
)
def test_allowed(changes):
    BASE.replace(**changes)


def test_what_is_absurd_or_not_modeled_is_told_alone():
    with pytest.raises(ConfigError) as error:
        BASE.replace(**{"model.attention.kind": "mla", "performance.software": "torch", "parallelism.tp": 7})
    assert [line.partition(":")[0] for line in error.value.problems] == ["model.attention.kind"]


def test_frameworks_are_the_profiles():
    assert sorted(FRAMEWORKS) == sorted({load_software(name).family for name in software_names()})


def test_words_not_modeled_are_paths_of_a_config():
    sections = {"model", "parallelism", "performance", "data", "hardware"}
    assert all(key.partition(".")[0] in sections for key in NOT_MODELLED)


columns = st.lists(
    st.tuples(
        st.sampled_from([1, 2, 3, 4, 7, 8, 16, 64]),  # tp
        st.sampled_from([1, 2, 3, 4, 5, 8]),  # pp
        st.sampled_from([1, 2, 3, 8, 64]),  # dp
        st.sampled_from([1, 2, 4, 5]),  # vpp
        st.sampled_from([1, 2, 3]),  # microbatch_sz
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=100, deadline=None)
@given(columns, st.sampled_from([1920, 2048, 960]))
def test_a_mask_equals_its_rows(rows, gbs):
    base = facts(BASE)._replace(gbs=float(gbs))
    names = ("tp", "pp", "dp", "vpp", "microbatch_sz")
    table = base._replace(**dict(zip(names, np.array(rows, dtype=float).T, strict=True)))
    one_by_one = [not problems(base._replace(**dict(zip(names, row, strict=True)))) for row in rows]
    assert np.broadcast_to(mask(table), len(rows)).tolist() == one_by_one
    for rule in [*SANE, *MODELED, *LAYOUT_RULES]:
        holds = np.broadcast_to(rule.holds(table), len(rows)).tolist()
        assert holds == [
            bool(rule.holds(base._replace(**dict(zip(names, map(float, row), strict=True))))) for row in rows
        ]
