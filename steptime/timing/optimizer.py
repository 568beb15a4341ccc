"""Seconds of the optimizer step: memory traffic of what it reads and writes, and Muon's iterations."""

from functools import reduce
from typing import NamedTuple

from steptime.base.num import Num, maximum, where
from steptime.cost.part_seconds import Context
from steptime.job.assembly import Assembly
from steptime.job.job import Job
from steptime.job.local_params import CountedParams
from steptime.memory.on_host import follows_buckets, on_host
from steptime.memory.optimizer_moments import mean_moments
from steptime.memory.states import group_elements, quantized_elements, shard_ranks
from steptime.software.state_bytes import FP32, StateBytes
from steptime.timing.gradients_down import elements_in_turn, sums_s
from steptime.timing.host_update import HostUpdate, host_update
from steptime.timing.looped_update import launches_s
from steptime.timing.orthogonalize import orthogonalize_s

MUON_BYTES = 52.0
"""Bytes that Muon moves per element in addition to any update, without its matrix products: weight decay reads and writes the
master (8), the norm reads the momentum and the division reads it and writes (12), the casts to bf16 and back (6 + 6), two scales
read and write (16), and the update is read (4). Megatron-Core optimizer/emerging_optimizers.py; Emerging-Optimizers
orthogonalized_optimizer.py, step."""


def update_bytes_per_param(job: Job, moments: Num) -> Num:
    """Bytes that an update moves per owned parameter, which has `moments` bytes of moments on average.

    One kernel reads the gradient, reads and writes master and moments, writes the parameter: with fp32 gradients, master and
    Adam's moments and bf16 parameters 4 + 8 + 16 + 2 = 30. The parameter is read too where it is its own master, or the upper
    half of one. Where the host updates a share of the parameters, the mean over all.
    """
    share = job.performance.cpu_offload.share
    if share:
        return (1.0 - share) * (device_bytes_per_param(job, moments) + on_host(job).read_on_device)
    return device_bytes_per_param(job, moments)


def device_bytes_per_param(job: Job, moments: Num) -> Num:
    """The same of a parameter that the device updates."""
    size, states = job.software.state_bytes, job.software.states
    if states.optimizer == "adamw" and states.optimizer_impl != "fused":
        return foreach_bytes_per_param(size)
    if states.optimizer == "adafactor":
        return adafactor_bytes_per_param(size)
    read = 0.0 if states.master_dtype == "fp32" else size.params
    muon = MUON_BYTES if states.optimizer in {"muon", "dist_muon"} else 0.0
    return size.gradients + read + 2.0 * size.master + 2.0 * moments + size.params + muon


def foreach_bytes_per_param(size: StateBytes) -> float:
    """Bytes per parameter that torch's foreach AdamW moves: it makes temporaries and runs op by op over all parameters.

    Source: torch/optim/adam.py (2.13), _multi_tensor_adam. Weight decay reads and writes the parameter (mul), as does the last op
    (addcdiv): 4. The first moment: lerp 2, addcdiv 1. The second: mul 2, addcmul 2, sqrt 1. The temporary, in the moments' dtype:
    sqrt 1, div 2, add 2, addcdiv 1. The gradient: lerp 1, addcmul 1 (given twice, read once). 20 accesses where a fused kernel
    has 7; a loop over the tensors (_single_tensor_adam) has the same 20. Rounded parameters are copied from a master.
    """
    owned = size.master or size.params
    copied = size.params if size.master else 0.0
    return 4.0 * owned + (3.0 + 5.0 + 6.0) * size.moments / 2.0 + 2.0 * size.gradients + copied


def adafactor_bytes_per_param(size: StateBytes) -> float:
    """Bytes per parameter that torch's Adafactor moves, op by op over each tensor.

    Source: torch/optim/_adafactor.py (2.13), _single_tensor_adafactor. The parameter: norm 1, mul 2, add 2. The gradient: norms
    of rows and columns 2, mul 1. The estimate, in fp32: the outer product 1, div, clamp, rsqrt and mul 2 each, norm 1, add 1.
    """
    owned = size.master or size.params
    copied = size.params if size.master else 0.0
    return 5.0 * owned + 3.0 * size.gradients + 11.0 * FP32 + copied


def clip_bytes_per_param(job: Job) -> float:
    """Gradient norm and scaling: the gradient read twice, written once."""
    device = job.performance.cpu_offload.share == 0.0 or job.software.family == "megatron-core"
    return 3.0 * job.software.state_bytes.gradients if job.software.states.clip_grad and device else 0.0


def quantize_bytes_per_weight(job: Job) -> float:
    """Bytes that each device moves once a step to quantize a projection's weight, regardless of how many ranks own it.

    The compute dtype's weight is read (twice where the maximum comes first) and its copies written, in the first micro-batch's
    forward (TE pytorch/module/base.py, get_weight_workspace). Weights stored quantized arrive so; of tensor-scaled ones only the
    transpose is made (core fp8_utils.py, post_all_gather_processing). A bf16 gather is cast in any case. Fully sharded ones are
    cast by their owners, and transposed at each gather (`fsdp.groups.transposed_bytes`).
    """
    s = job.software
    recipe = s.recipe
    if recipe is None or recipe.casts or job.zero_level == 3:
        return 0.0
    copies = recipe.copies * recipe.weight_itemsize
    if s.states.fp8_params and recipe.param_gather_itemsize < s.itemsize:
        return 2.0 * (recipe.copies - 1.0) * recipe.weight_itemsize
    return s.itemsize * (1.0 + recipe.amax_reads) + copies


class Updated(NamedTuple):
    """What one device of a stage updates."""

    owned: Num
    """Parameters."""
    moments: Num
    """Bytes of moments of each, on average."""
    on_device: Num
    """Parameters in this device's memory, owned or not."""
    tensors: Num
    """Tensors with some of the owned parameters: the shards cut the flat buffer across tensors."""


class OptimizerStep(NamedTuple):
    """Seconds of an optimizer step."""

    device_s: Num
    """The device's part."""
    host: HostUpdate
    around_s: Num
    """The host's own part, beside the optimizer's kernels: loops over parameters, results read back, logs, the next batch."""
    in_turn: Num = 0.0
    """Parameters whose gradients go to the host one after another."""

    @property
    def time_s(self) -> Num:
        """All of it, overlapped where possible."""
        return self.device_s + self.host.exposed_s + self.around_s


def updated(job: Job, counted: CountedParams) -> Updated:
    """Parameters of a stage over the ranks that share their states, group by group."""
    local, means = group_elements(counted), mean_moments(job, counted)
    owned = {of: n / (shard_ranks(job, of) if job.zero_level >= 1 else 1) for of, n in local.items()}
    total, moments = sum(owned.values()), sum([n * means[of] for of, n in owned.items()])
    tensors = 1.0 * sum([count * params.tensors for params, count in counted])
    cut = shard_ranks(job) if job.zero_level >= 1 else 1
    return Updated(total, moments / maximum(total, 1.0), sum(local.values()), tensors / cut)


def most_updated(assembly: Assembly) -> tuple[Updated, Num]:
    """What the stage with the most parameters updates, and the most quantized weights of any stage."""
    distinct = sorted(set(assembly.first_alike))
    most, *others = [updated(assembly.job, assembly.stage_params[stage]) for stage in distinct]
    for share in others:
        more = share.owned > most.owned
        moments, tensors = where(more, share.moments, most.moments), where(more, share.tensors, most.tensors)
        most = Updated(maximum(most.owned, share.owned), moments, maximum(most.on_device, share.on_device), tensors)
    return most, reduce(maximum, [quantized_elements(assembly, assembly.stages[i]) for i in distinct])


def optimizer_step(assembly: Assembly, context: Context, backward_s: Num | None = None) -> OptimizerStep:
    """Seconds of the optimizer on the stage with the most parameters, and of quantizing the updated weights.

    `backward_s`: of a micro-batch, beside which sums go to the host; without it they are left out.
    """
    job, bytes_per_s = assembly.job, context.rates.bytes_per_s
    most, quantized = assembly.once(most_updated)
    kept = most.owned if job.zero_level >= 2 else most.on_device
    params = [assembly.stage_params[stage] for stage in set(assembly.first_alike)]
    launched = reduce(maximum, [launches_s(job, counted) for counted in params])
    update = maximum(update_s(job, most.owned, kept, most.moments, bytes_per_s), launched)
    orthogonal = reduce(maximum, [orthogonalize_s(job, counted, context) for counted in params])
    update_alone_s = most.owned * update_bytes_per_param(job, most.moments) / bytes_per_s
    in_turn = elements_in_turn(assembly, most.owned) if follows_buckets(job) else None
    host = host_update(job, most.owned, most.tensors, update_alone_s, bytes_per_s, in_turn)
    if in_turn is not None and backward_s is not None:
        sums = sums_s(job, in_turn, job.microbatches, backward_s, bytes_per_s)
        host = host._replace(down_s=host.down_s + sums.copied_s, copied_s=host.copied_s + sums.exposed_s)
    quantizing = quantized * quantize_bytes_per_weight(job) / bytes_per_s
    around_s = job.software.timing.step_host_s
    return OptimizerStep(update + orthogonal + quantizing, host, around_s, 0.0 if in_turn is None else in_turn)


def update_s(job: Job, owned: Num, on_device: Num, moments: Num, bytes_per_s: float) -> Num:
    """Seconds of one update, memory traffic only.

    `owned` parameters are updated on this device, `on_device` have their gradient zeroed. Source: the list of passes in
    megatron/core/optimizer/optimizer.py (prepare_grads, clip_grad_norm, step) and DistributedDataParallel.zero_grad_buffer.
    """
    size = job.software.state_bytes
    stay = job.parallelism.fsdp is not None and job.parallelism.fsdp.gradients_stay
    zeroed = on_device * size.gradients if stay or job.software.states.gradients_persist else 0.0
    return (owned * (update_bytes_per_param(job, moments) + clip_bytes_per_param(job)) + zeroed) / bytes_per_s
