"""Rules for torch's FSDP, and the facts that they read."""

from __future__ import annotations

from typing import Any

from steptime.base.num import maximum, minimum
from steptime.job.limits import Rule
from steptime.job.mesh import Fsdp, Parallelism, ReduceDtype
from steptime.software.performance import Software

_DEFAULTS = Fsdp.model_construct()  # which need no schema

FSDP_RULES = [
    Rule(
        "fsdp against zero_level",
        "parallelism.zero_level",
        "contradicts fsdp, which is level {f.fsdp} (got {f.zero_said}); remove zero_level, or set fsdp.reshard_after_forward",
        lambda f: (f.fsdp is None) | (f.zero_said is None) | (f.zero_said == f.fsdp),
    ),
    Rule(
        "reshard_after_backward false",
        "parallelism.fsdp.reshard_after_backward",
        "false needs version 2, no_sync and reshard_after_forward false; set them, or remove it",
        lambda f: (not f.stays_gathered) | ((f.fsdp_version == 2) & f.no_sync & (f.fsdp == 2)),
    ),
    Rule(
        "fsdp framework",
        "parallelism.fsdp",
        "options of torch FSDP2, which {f.software} does not support; use software fsdp2",
        lambda f: (f.fsdp is None) | f.framework.fully_shards,
    ),
    # megatron/training/arguments.py, validate_args
    Rule(
        "Megatron's layers under fully_shard",
        "parallelism.fsdp",
        "Megatron-LM refuses --use-torch-fsdp2 with pp or ep above 1, tied embeddings or fp16 (got {f.software}, pp {f.pp}, "
        "ep {f.ep}, precision {f.precision}); change them, or use software megatron-core",
        lambda f: (
            (not f.framework.fully_shards)
            | (f.family != "megatron-core")
            | (f.pp == 1) & (f.ep == 1) & (not f.tie_embeddings) & (f.precision != "fp16")
        ),
    ),
    # torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_init.py, _get_post_forward_mesh_info
    Rule(
        "resharding to fewer ranks divides the shards",
        "parallelism.fsdp.reshard_after_forward",
        "a number of ranks must divide the {f.shards} shards and be below them (got {f.fsdp_ranks}); true is all shards",
        lambda f: (f.fsdp_ranks == 0) | ((f.shards % (f.fsdp_ranks or 1) == 0) & (f.shards > f.fsdp_ranks)),
    ),
    # _fsdp_param.py, to_sharded_post_forward: not for DTensors, which tensor and expert parallelism make
    Rule(
        "resharding to fewer ranks with tp or ep",
        "parallelism.fsdp.reshard_after_forward",
        "torch supports a number of ranks only with tp 1 and ep 1 (got tp {f.tp}, ep {f.ep}); use true or false",
        lambda f: (f.fsdp_ranks == 0) | ((f.tp == 1) & (f.ep == 1)),
    ),
    # _fsdp_param.py, all_gather_inputs: not for weights with fsdp_pre_all_gather
    Rule(
        "resharding to fewer ranks with fp8_params",
        "parallelism.fsdp.reshard_after_forward",
        "torch does not support a number of ranks with performance.fp8_params (got {f.fsdp_ranks}); use true or false",
        lambda f: (f.fsdp_ranks == 0) | (not f.states.fp8_params),
    ),
    Rule(
        "a traced graph and a pipeline",
        "parallelism.fsdp.wrap",
        "parameter is modeled without a pipeline (got pp {f.pp}); use block",
        lambda f: (f.fsdp_wrap != "parameter") | (f.pp == 1),
    ),
    Rule(
        "gradients that stay in a pipeline",
        "parallelism.fsdp.gradients_stay",
        "true is modeled without a pipeline (got pp {f.pp}); use false",
        lambda f: (not f.gradients_stay) | (f.pp == 1) | f.graphs,
    ),
    # torchtitan/trainer.py, _validate_cuda_graphs, refuses graphs with a pipeline
    Rule(
        "gradients that stay for CUDA graphs in a pipeline",
        "parallelism.fsdp.gradients_stay",
        "true, which CUDA graphs of forward and backward (performance.cuda_graphs) need, is modeled without a pipeline (got pp "
        "{f.pp}), as torchtitan refuses one with them; set this and performance.cuda_graphs to false, or use pp 1",
        lambda f: (not f.gradients_stay) | (f.pp == 1) | (not f.graphs),
    ),
    Rule(
        "shard_dim layout",
        "parallelism.fsdp.shard_dim",
        "1 needs pp 1, attention gqa, one kind of layer and no fp8_params (got pp {f.pp}, attention {f.attention}); use 0",
        lambda f: (
            (f.shard_dim == 0)
            | (f.pp == 1) & (f.attention == "gqa") & (not f.kinds) & (f.linear is None) & (not f.states.fp8_params)
        ),
    ),
    # _fsdp_param.py, _init_sharded_param: no uneven pieces of a dimension other than 0
    Rule(
        "shard_dim divides columns",
        "parallelism.fsdp.shard_dim",
        "1 needs columns that the {f.shards} shards divide: hidden_sz, lora.rank, and of one tp rank inter_sz, those of shared "
        "experts and heads x head_dim; use 0",
        lambda f: (
            (f.shard_dim == 0)
            | (f.hidden_sz % maximum(f.shards, 1) == 0)
            & (f.inter_sz % (f.tp * maximum(f.shards, 1)) == 0)
            & (f.shared_inter_sz % (f.tp * maximum(f.shards, 1)) == 0)
            & (f.n_q_heads * f.head_dim % (f.tp * maximum(f.shards, 1)) == 0)
            & (f.lora is None or f.lora.rank % maximum(f.shards, 1) == 0)
        ),
    ),
    # deepspeed/runtime/engine.py, _configure_zero_optimizer: stage 3 only
    Rule(
        "zero_plus_plus framework",
        "parallelism.zero_plus_plus",
        "ZeRO++ is DeepSpeed's at stage 3 (got {f.software}, zero_level {f.zero_level}); use software deepspeed and zero_level 3",
        lambda f: (f.plus_plus is None) | ((f.family == "deepspeed") & (f.zero_level == 3)),
    ),
    Rule(
        "zero_plus_plus layout",
        "parallelism.zero_plus_plus",
        "modeled with tp 1, replicas 1 and no cpu_offload (got tp {f.tp}, replicas {f.replicas}); change them, or remove it",
        lambda f: (f.plus_plus is None) | ((f.tp == 1) & (f.replicas == 1) & (f.cpu_offload.share == 0.0)),
    ),
    # deepspeedai/DeepSpeed@edaa7221: stage3.py, invalidate_secondary_tensor, drops those of trained parameters after a step;
    # partition_parameters.py, all_gather_coalesced, asks the first parameter of a call whether all have one
    Rule(
        "hpz_partition_size with adapters",
        "parallelism.zero_plus_plus.hpz_partition_size",
        "DeepSpeed's second partition does not run with adapters: frozen parameters keep theirs, trained ones gathered in the "
        "same call have none after a step; remove it",
        lambda f: (f.plus_plus is None or f.plus_plus.hpz_partition_size <= 1) | (f.lora is None),
    ),
    # deepspeed/utils/groups.py, _create_zero_param_parallel_group
    Rule(
        "hpz_partition_size",
        "parallelism.zero_plus_plus.hpz_partition_size",
        "must divide the {f.shards} shards (got {f.plus_plus.hpz_partition_size}); use the devices of a node",
        lambda f: f.plus_plus is None or f.shards % minimum(f.plus_plus.hpz_partition_size, maximum(f.shards, 1)) == 0,
    ),
    # deepspeed/utils/groups.py, _get_local_all_to_all_group
    Rule(
        "quantized_gradients",
        "parallelism.zero_plus_plus.quantized_gradients",
        "the {f.shards} shards must fill whole nodes of {f.node_devices} devices, or less than one; change dp, or use false",
        lambda f: (
            (f.plus_plus is None or not f.plus_plus.quantized_gradients)
            | (f.shards % f.node_devices == 0)
            | (f.shards < f.node_devices)
        ),
    ),
]


def fsdp_facts(layout: Parallelism, software: Software, node_devices: int) -> dict[str, Any]:
    """What the rules read of a plan's FSDP options, and of ZeRO++'s, whose groups are those of nodes of so many devices."""
    fsdp = layout.fsdp
    said = fsdp or _DEFAULTS
    ranks = said.reshard_after_forward
    return {
        "fsdp": None if fsdp is None else said.zero_level,
        "plus_plus": layout.zero_plus_plus,
        "node_devices": node_devices,
        "fsdp_version": said.version,
        "fsdp_wrap": said.wrap,
        "fsdp_ranks": 0 if isinstance(ranks, bool) else ranks,
        "no_sync": software.layout.no_sync if said.no_sync is None else said.no_sync,
        "stays_gathered": not said.reshard_after_backward,
        "gradients_stay": said.gradients_stay,
        "shard_dim": said.shard_dim,
    }


def reduce_dtype(said: Fsdp | None, software: Software) -> ReduceDtype:
    """Dtype in which FSDP reduces gradients: the plan's, else the profile's; without options of FSDP the gradients' own."""
    if said is not None and said.reduce_dtype is not None:
        return said.reduce_dtype
    own = software.states.main_grad_dtype if said is None else software.layout.fsdp_reduce_dtype
    return software.compute_dtype if own == "compute" else own


def resolved_fsdp(fsdp: Fsdp, software: Software) -> dict[str, Any]:
    """The options of FSDP as plain data, with nothing left to the profile."""
    return fsdp.model_copy(update={"reduce_dtype": reduce_dtype(fsdp, software)}).model_dump(exclude_none=True)
