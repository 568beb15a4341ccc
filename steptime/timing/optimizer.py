"""Seconds of the optimizer step: memory traffic of what it reads and writes."""

from __future__ import annotations

from steptime.job.assembly import Assembly
from steptime.job.job import Job
from steptime.memory.states import StateBytes, local_groups, quantized_elements, shard_ranks, state_bytes


def adam_bytes_per_param(job: Job) -> float:
    """Bytes that Adam moves per parameter it owns: gradient read, master and moments read and written, parameter written.

    With fp32 gradients, master and moments and bf16 parameters: 4 + 8 + 16 + 2 = 30. The parameter is read too where it is
    its own master, or the upper half of one.
    """
    size = state_bytes(job)
    if job.software.states.optimizer_temp_copies:
        return foreach_bytes_per_param(size)
    read = 0.0 if job.software.states.master_dtype == "fp32" else size.params
    return size.gradients + read + 2.0 * size.master + 2.0 * size.moments + size.params


def foreach_bytes_per_param(size: StateBytes) -> float:
    """The same of torch's foreach AdamW, which makes temporaries and runs op by op over all parameters.

    Source: torch/optim/adam.py (2.13), _multi_tensor_adam. Weight decay reads and writes the parameter (mul), as does the last op
    (addcdiv): 4. The first moment: lerp 2, addcdiv 1. The second: mul 2, addcmul 2, sqrt 1. The temporary, in the moments' dtype:
    sqrt 1, div 2, add 2, addcdiv 1. The gradient: lerp 1, addcmul 1 (given twice, read once). 20 accesses where a fused kernel
    has 7. Rounded parameters are copied from a master.
    """
    owned = size.master or size.params
    copied = size.params if size.master else 0.0
    return 4.0 * owned + (3.0 + 5.0 + 6.0) * size.moments / 2.0 + 2.0 * size.gradients + copied


def clip_bytes_per_param(job: Job) -> float:
    """Gradient norm and scaling: the gradient read twice, written once."""
    return 3.0 * state_bytes(job).gradients if job.software.states.clip_grad else 0.0


def quantize_bytes_per_weight(job: Job) -> float:
    """Bytes that each device moves once a step to quantize a projection's weight, however few ranks own it.

    The compute dtype's weight is read (twice where the maximum comes first) and its copies written, in the first micro-batch's
    forward (TE pytorch/module/base.py, get_weight_workspace). Weights stored quantized arrive so; of tensor-scaled ones only the
    transpose is made (core fp8_utils.py, post_all_gather_processing). A bf16 gather is cast in any case.
    """
    s = job.software
    recipe = s.recipe
    if recipe is None or recipe.casts:
        return 0.0
    copies = recipe.copies * recipe.weight_itemsize
    if s.states.fp8_params and recipe.param_gather_itemsize < s.itemsize:
        return 2.0 * (recipe.copies - 1.0) * recipe.weight_itemsize
    return s.itemsize * (1.0 + recipe.amax_reads) + copies


def optimizer_s(assembly: Assembly, bytes_per_s: float) -> float:
    """Seconds of the optimizer on the stage with the most parameters, and of quantizing the updated weights."""
    job = assembly.job
    groups = [local_groups(assembly, chunks) for chunks in assembly.stages]
    ranks = {of: shard_ranks(job, of) if job.zero_level >= 1 else 1 for stage in groups for of in stage}
    held = max(sum(stage.values()) for stage in groups)
    owned = max(sum(n / ranks[of] for of, n in stage.items()) for stage in groups)
    kept = owned if job.zero_level >= 2 else held
    quantized: float = max(sum(quantized_elements(assembly, c) for c in chunks) for chunks in assembly.stages)
    update: float = update_s(job, owned, kept, bytes_per_s)
    return update + quantized * quantize_bytes_per_weight(job) / bytes_per_s


def update_s(job: Job, owned: float, held: float, bytes_per_s: float) -> float:
    """Seconds of one update.

    `owned` parameters are updated on this device, `held` have their gradient zeroed. Source: the list of passes in
    megatron/core/optimizer/optimizer.py (prepare_grads, clip_grad_norm, step) and DistributedDataParallel.zero_grad_buffer.
    """
    size = state_bytes(job)
    zeroed = held * size.gradients if job.software.states.gradients_persist else 0.0
    return (owned * (adam_bytes_per_param(job) + clip_bytes_per_param(job)) + zeroed) / bytes_per_s
