"""What backward gathers again: parameters that were freed after forward, from all shards or from neighbors, and when.

Source for checkpoints: torch 2.13, torch/distributed/fsdp/_runtime_utils.py. A reentrant checkpoint runs a layer's first forward
without autograd, so that no hook is set for its backward (_register_pre_backward_hooks) and nothing gathers its parameters
ahead (_get_handle_to_prefetch). Its second forward gathers them and frees them, and its backward gathers them again.
"""

from __future__ import annotations

from steptime.base.num import Num
from steptime.fsdp.groups import Buffers, options
from steptime.job.assembly import Assembly


def reentrant_checkpoints(assembly: Assembly) -> bool:
    """Whether the layers of FSDP 1 are under reentrant checkpoints."""
    job = assembly.job
    return options(assembly).version == 1 and job.recompute.granularity == "full" and job.software.activations.reentrant


def gathered_ahead(assembly: Assembly) -> bool:
    """Whether each layer is gathered before its own backward starts: not in `reentrant_checkpoints`, nor without BACKWARD_PRE."""
    said = options(assembly)
    return not reentrant_checkpoints(assembly) and said.prefetch > 0 and said.backward_prefetch == "pre"


def gathers_after(assembly: Assembly) -> bool:
    """Whether a layer's backward ends with the gather of the next one (BACKWARD_POST): the last layer gathers for itself."""
    return options(assembly).backward_prefetch == "post" and not reentrant_checkpoints(assembly)


def backward_gathers(assembly: Assembly) -> float:
    """How often the backward of a layer gathers its parameters."""
    if not options(assembly).reshard_after_forward:
        return 0.0
    return 2.0 if reentrant_checkpoints(assembly) else 1.0


def to_fewer_ranks(assembly: Assembly) -> bool:
    """Whether layers are resharded to some of the shards after forward (`reshard_after_forward` is a number of ranks)."""
    return not isinstance(options(assembly).reshard_after_forward, bool)


def kept_bytes(assembly: Assembly, of: Buffers) -> Num:
    """Bytes of a layer's parameters between its forward and its backward, beside the shard that is always there.

    None where they are freed, all where they stay gathered. Resharded to n ranks: a copy of 1/n of the unsharded parameters,
    padding included, in the dtype of compute. It is made before they are freed and freed when backward has copied its gather out
    (torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_param.py, to_sharded_post_forward and to_unsharded).
    """
    said = options(assembly).reshard_after_forward
    if said is True:
        return 0.0
    return of.unsharded / (said or 1)
