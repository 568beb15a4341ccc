"""How checkpoints change which parameters FSDP gathers, and when.

Source: torch 2.13, torch/distributed/fsdp/_runtime_utils.py. A reentrant checkpoint runs a layer's first forward without
autograd, so that no hook is set for its backward (_register_pre_backward_hooks) and nothing gathers its parameters ahead
(_get_handle_to_prefetch). Its second forward gathers them and frees them, and its backward gathers them again.
"""

from __future__ import annotations

from steptime.fsdp.groups import options
from steptime.job.assembly import Assembly


def runs_again(assembly: Assembly) -> bool:
    """Whether the layers of FSDP 1 are under reentrant checkpoints."""
    job = assembly.job
    return options(assembly).version == 1 and job.recompute.granularity == "full" and job.software.activations.reentrant


def gathered_late(assembly: Assembly) -> bool:
    """Whether each layer is gathered when its own backward starts: in `runs_again`, or without backward_prefetch."""
    return runs_again(assembly) or options(assembly).prefetch == 0


def backward_gathers(assembly: Assembly) -> float:
    """How often the backward of a layer gathers its parameters."""
    if not options(assembly).reshard_after_forward:
        return 0.0
    return 2.0 if runs_again(assembly) else 1.0
