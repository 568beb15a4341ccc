"""FSDP's parameter groups and the buffers that each of them allocates.

Source: torch 2.13, torch/distributed/fsdp/_fully_shard/ (_fsdp_param_group.py, _fsdp_collectives.py). Groups are one per
block and the root with the embedding, final norm and head; with wrap "model" all is one group. Experts on separate ranks are a
second group of their block (pytorch/torchtitan@b5bcd76c torchtitan/distributed/fsdp.py, apply_fsdp_to_decoder).
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

from steptime.base.num import Num, maximum, same, where
from steptime.fsdp.of_job import by_torch, ends_alike, reduced_in
from steptime.fsdp.plus_plus import flat_bytes, reduction_bytes
from steptime.job.assembly import Assembly, Chunk
from steptime.job.job import Job
from steptime.job.mesh import Fsdp
from steptime.job.parts import Part
from steptime.memory.states import shard_ranks
from steptime.model.ops import Param
from steptime.software.performance import ITEMSIZE


class ParamGroup(NamedTuple):
    """One FSDP parameter group on one device.

    `padded`: elements with every parameter's rows rounded up to the shard ranks; `elements`: without.
    """

    padded: Num
    elements: Num
    ranks: Num
    last: Num
    """Elements of its last trained parameter."""
    quantized: Num = 0.0
    """Weights that a recipe quantizes."""
    turned: Num = 0.0
    """Elements of parameters that are cut along dimension 1."""
    chunked: Num = 0.0
    """Elements of the last matrix that is cut along dimension 1."""
    kind: str = "dense"
    """The parameter group, which decides the ranks that share it (`Param.group`)."""
    frozen: Num = 0
    """Of `elements` those of frozen parameters, which have no gradient; `frozen_padded` likewise of `padded`."""
    frozen_padded: Num = 0
    plain: bool = False  # parameters that FSDP ignores
    matrices: Num = 0
    """Its trained tensors of two dimensions."""
    experts: ParamGroup | None = None
    """A second group, of the experts; it is gathered after this one and reduced before it."""

    @property
    def all(self) -> list[ParamGroup]:
        """This group, and the experts' where there is one."""
        return [self] if self.experts is None else [self, self.experts]

    @property
    def shard(self) -> Num:
        """Padded elements of trained parameters on one rank, the experts' included."""
        return sum([of.trained_shard for of in self.all])

    @property
    def trained_shard(self) -> Num:
        """The same without the experts."""
        return (self.padded - self.frozen_padded) / self.ranks


class Buffers(NamedTuple):
    """Bytes of a group's buffers, in the order in which torch allocates them."""

    sent: Num
    """The shard in the dtype that is gathered, where it is stored in another dtype."""
    gathered: Num
    unsharded: Num
    gradients: Num
    reduce_input: Num
    reduce_output: Num
    reduced: Num
    """Replaces the gradients once they are copied in: the output, its copy in the stored dtype where that differs, and the last
    parameter's gradient, which a loop variable still references (_fsdp_collectives.py, foreach_reduce)."""
    turned: Num
    """Copies of gathered parameters that are split along dimension 1, made while they are assembled
    (foreach_all_gather_copy_out)."""
    last: Num
    """The gradient of its last parameter."""
    sums: Num
    """Gradients of several micro-batches, added up whole: in the dtype of the reduction, or flat."""
    stored: Num = 0.0
    """The gradients' shards in their stored dtype."""
    chunked: Num = 0.0
    """The gradient of the last matrix that is cut along dimension 1: a loop variable references it beside the copy that is
    reduced (foreach_reduce, chunks)."""

    @property
    def reducing(self) -> Num:
        """The gradients when their reduction's input is allocated."""
        return self.gradients + self.chunked


class Groups(NamedTuple):
    """The groups of a model chunk: the root, and one per layer in depth order (none where the chunk is one group)."""

    root: ParamGroup
    layers: list[ParamGroup]


def options(assembly: Assembly) -> Fsdp:
    """The job's FSDP settings; where it only sets ZeRO-3, torch's defaults. The dtype of reductions: `reduced_in`."""
    job = assembly.job
    return job.parallelism.fsdp or _defaults(reshard=job.zero_level == 3)


def ends_wrapped(assembly: Assembly) -> str:
    """How embedding and head are wrapped (`Fsdp.ends`); tied, they are one group, as in the root."""
    job = assembly.job
    return "root" if ends_alike(job) else options(assembly).ends or job.software.layout.fsdp_ends


@cache
def _defaults(*, reshard: bool) -> Fsdp:
    return Fsdp(reshard_after_forward=reshard)


def stays_gathered(assembly: Assembly) -> bool:
    """Whether parameters stay gathered from the first micro-batch of an unsynced step to the last.

    FSDP 1 does so where it does not free them after forward (torch/distributed/fsdp/_runtime_utils.py, _should_free_in_backward).
    """
    said = options(assembly)
    return not said.reshard_after_backward or (said.version == 1 and not said.reshard_after_forward)


def root_stays(job: Job) -> bool:
    """Whether the root is gathered once a step: Megatron-FSDP's parameters outside its units.

    megatron-core 0.16.1 run on a CPU: units are gathered twice a micro-batch, the rest once a step.
    """
    return job.software.family == "megatron-core" and job.zero_level == 3 and not by_torch(job)


def group_of(
    params: list[Param], tp: Num, ranks: Num, experts: tuple[Num, Num] = (1, 1), *, stacked: bool = True, dim: int = 0
) -> ParamGroup:
    """Parameters of one group: dimension 0 of each, or `dim` of matrices, is cut into `ranks` equal pieces.

    `experts`: ep and etp. `stacked`: their weights are one tensor, of which whole experts are cut, or dimension 1 where there are
    more ranks than experts (torchtitan, as above). Else each has its own, and their rows are consecutive in a buffer that is
    split (megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py, build_data_parallel_buffer_index).
    """
    ep, etp = experts
    padded: Num = 0
    elements: Num = 0
    last: Num = 0
    turned: Num = 0.0
    chunked: Num = 0.0
    frozen: Num = 0
    frozen_padded: Num = 0
    matrices = 0
    for p in params:
        rows = -(-p.shape[0] // tp) if p.split_dim == 0 else p.shape[0]
        local = p.local(tp, ep * etp)
        if p.n_experts:
            count, each = p.n_experts / ep, p.shape[1] / (etp if p.split_dim == 1 else 1)
            across = where(ranks > count, 1.0, 0.0) if stacked else 0.0
            rows = where(across > 0.0, each, count) if stacked else count * each
            turned = turned + across * local
        elif dim and p.multiplies:
            rows = p.shape[1] // (tp if p.split_dim == 1 else 1)
            turned, chunked = turned + local, (local if p.trained else chunked)
        elements = elements + local
        whole = -(-rows // ranks) * ranks * (local // rows)
        padded = padded + whole
        if p.trained:
            last, matrices = local, matrices + p.multiplies
        else:
            frozen, frozen_padded = frozen + local, frozen_padded + whole
    kept = {"frozen": frozen, "frozen_padded": frozen_padded}
    return ParamGroup(padded, elements, ranks, last, turned=turned, chunked=chunked, matrices=matrices, **kept)


def flat_group(assembly: Assembly, params: list[Param], tp: Num) -> ParamGroup:
    """Parameters of one group of FSDP 1 as one flat parameter.

    Each starts at a multiple of 16 bytes in the dtype of compute, with use_orig_params, and the whole is a multiple of the ranks
    (torch 2.13, torch/distributed/fsdp/_flat_param.py, _init_flat_param_and_metadata, and _get_shard).
    """
    job, p = assembly.job, assembly.job.parallelism
    ranks, aligned = shard_ranks(job), 16 // job.software.itemsize if options(assembly).original_params else 1
    elements: Num = 0
    total: Num = 0
    for param in params:
        local = param.local(tp, p.etp)  # ep is 1 (job.fsdp_rules)
        elements = elements + local
        total = -(-total // aligned) * aligned + local
    return ParamGroup(-(-total // ranks) * ranks, elements, ranks, 0.0)


def layer_group(assembly: Assembly, part: Part) -> ParamGroup:
    """The group of one layer; experts on other ranks form a second group."""
    p, job = assembly.job.parallelism, assembly.job
    if options(assembly).version == 1:
        return flat_group(assembly, part.params, part.tp)
    stacked, dim = job.software.family == "fsdp2", options(assembly).shard_dim
    found = {
        group: group_of(mine, part.tp, shard_ranks(job, group), (p.ep, p.etp), stacked=stacked, dim=dim)
        for group in ("dense", "expert")
        if (mine := [of for of in part.params if (of.group == "expert") == (group == "expert")])
    }
    alone = job.software.layout.lone_experts == "plain" and same(shard_ranks(job, "expert") == 1)
    experts = found["expert"]._replace(kind="expert", plain=alone) if "expert" in found else None
    return found["dense"]._replace(quantized=part.n_quantized, experts=experts)


@lru_cache(maxsize=8)  # states, seconds and memory all ask for those of one chunk
def groups(assembly: Assembly, chunk: Chunk) -> Groups:
    """The groups of a model chunk, each wrapped separately; the root of a chunk in the middle of a pipeline is empty."""
    first = assembly.embedding.params if chunk.embedding else []
    last = assembly.head_params if chunk.head else []
    if options(assembly).wrap == "model":
        every = [*first, *(p for part, count in chunk.runs for p in part.params * count), *last]
        nothing = ParamGroup(0, 0, shard_ranks(assembly.job), 0)
        return Groups(one_group(assembly, every), [nothing for _, count in chunk.runs for _ in range(count)])
    kinds = {part: layer_group(assembly, part) for part, _ in chunk.runs}
    layers = [kinds[part] for part, count in chunk.runs for _ in range(count)]
    return Groups(one_group(assembly, [*first, *last]), layers)


def one_group(assembly: Assembly, params: list[Param]) -> ParamGroup:
    """The root's group."""
    tp = assembly.head.tp
    if options(assembly).version == 1:
        return flat_group(assembly, params, tp)
    return group_of(params, tp, shard_ranks(assembly.job), dim=options(assembly).shard_dim)


def buffers(assembly: Assembly, of: ParamGroup) -> Buffers:
    """Buffer sizes of one group, without its experts' group."""
    job = assembly.job
    stored, used = job.software.state_bytes.gradients, job.software.itemsize
    reduce = ITEMSIZE[reduced_in(job)]
    shard, trained = of.padded / of.ranks, of.trained_shard
    copied = 0.0 if stored == reduce else stored
    gradients = (of.elements - of.frozen) * used
    if of.plain:
        return Buffers(0.0, 0.0, 0.0, gradients, 0.0, 0.0, 0.0, 0.0, 0.0, gradients)
    whole = of.padded * used - of.quantized * quantized_saving(job)
    return Buffers(
        sent=sent_bytes(job, shard),
        gathered=whole + flat_bytes(job, of.padded) - of.padded * used,
        unsharded=whole + of.quantized * transposed_bytes(job),
        gradients=gradients,
        reduce_input=reduction_bytes(job, trained * of.ranks, reduce),
        reduce_output=trained * reduce,
        reduced=trained * (reduce + copied) + maximum(of.last, of.chunked) * used,
        turned=of.turned * used,
        last=of.last * used,
        sums=whole if options(assembly).version == 1 else gradients / used * reduce,
        stored=trained * stored,
        chunked=of.chunked * used,
    )


def sent_bytes(job: Job, shard: Num) -> Num:
    """Bytes of a shard's copy on the device from which it is gathered, where it is stored in another dtype or on the host."""
    copied = job.performance.cpu_offload.params or job.software.state_bytes.params != job.software.itemsize
    return shard * job.software.itemsize if copied else 0.0


def quantized_saving(job: Job) -> float:
    """Bytes per weight that are saved where the all-gather sends quantized weights.

    torchao's fsdp_pre_all_gather; Megatron-FSDP gathers TransformerEngine's raw data, a byte each: by rows, and of MXFP8, which
    has two buffers, by columns in backward (megatron_fsdp/param_and_grad_buffer.py, _init_each_parameter_group_buffers).
    """
    software = job.software
    if software.recipe is None or not software.states.fp8_params:
        return 0.0
    return software.itemsize - (software.recipe.param_gather_itemsize if software.recipe.casts else 1.0)


def transposed_bytes(job: Job) -> float:
    """Bytes per quantized weight of the transposes of a layer that Megatron-FSDP has gathered for backward.

    Where the device's products take one layout only (megatron_fsdp.py, all_gather_and_wait_parameters_ready:
    fp8_create_transpose_cache); counted in forward too.
    """
    recipe = job.software.recipe
    if recipe is None or recipe.casts or recipe.microscaling or not job.software.states.fp8_params:
        return 0.0
    return recipe.copies - 1.0
