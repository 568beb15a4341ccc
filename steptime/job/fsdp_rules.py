"""Rules for torch's FSDP, and the facts that they read."""

from __future__ import annotations

from typing import Any

from steptime.job.limits import Rule
from steptime.job.mesh import Fsdp
from steptime.software.performance import Software

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
        lambda f: (f.fsdp is None) | (f.family == "fsdp2"),
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
]


def fsdp_facts(fsdp: Fsdp | None, software: Software) -> dict[str, Any]:
    """What the rules read of a plan's FSDP options."""
    said = fsdp or Fsdp()
    ranks = said.reshard_after_forward
    return {
        "fsdp": None if fsdp is None else said.zero_level,
        "fsdp_version": said.version,
        "fsdp_ranks": 0 if isinstance(ranks, bool) else ranks,
        "no_sync": software.layout.no_sync if said.no_sync is None else said.no_sync,
        "stays_gathered": not said.reshard_after_backward,
    }
