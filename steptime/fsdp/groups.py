"""FSDP2's parameter groups and the buffers each of them makes.

Source: torch 2.13, torch/distributed/fsdp/_fully_shard/ (_fsdp_param_group.py, _fsdp_collectives.py). Groups are one per
block and the root with the embedding, final norm and head; with wrap "model" all is one group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from steptime.job.assembly import Assembly
from steptime.job.job import Job
from steptime.job.mesh import Fsdp
from steptime.memory.states import States, shard_ranks, state_bytes
from steptime.model.ops import Param
from steptime.software.performance import ITEMSIZE


def applies(job: Job) -> bool:
    """Whether parameters are sharded and gathered group by group."""
    return job.zero_level == 3 or job.parallelism.fsdp is not None


@dataclass(frozen=True)
class ParamGroup:
    """One FSDP parameter group on one device.

    `padded`: elements with every parameter's rows rounded up to the shard ranks; `elements`: without.
    """

    padded: int
    elements: int
    ranks: int
    last: int
    """Elements of its last parameter."""


class Buffers(NamedTuple):
    """Bytes of a group's buffers, in torch's own order of making them."""

    gathered: float
    unsharded: float
    gradients: float
    reduce_input: float
    reduce_output: float
    reduced: float
    """What takes the gradients' place once they are copied in: the output, its copy in the stored dtype where that differs, and
    the last parameter's gradient, which a loop still names (_fsdp_collectives.py, foreach_reduce)."""


class Groups(NamedTuple):
    """The groups of a model."""

    root: ParamGroup
    block: ParamGroup
    n_blocks: int


def options(assembly: Assembly) -> Fsdp:
    """What the job says of FSDP; where it only names ZeRO-3, torch's defaults with gradients reduced in their own dtype."""
    job = assembly.job
    dtype = job.software.main_grad_dtype
    own = job.software.compute_dtype if dtype == "compute" else dtype
    return job.parallelism.fsdp or Fsdp(reshard_after_forward=job.zero_level == 3, reduce_dtype=own)


def group_of(params: list[Param], tp: int, ranks: int) -> ParamGroup:
    """Parameters of one group: dimension 0 of each is cut into `ranks` equal pieces of whole rows."""
    padded = elements = local = 0
    for p in params:
        rows = -(-p.shape[0] // tp) if column(p) else p.shape[0]
        local = -(-p.elements // tp) if p.shard else p.elements
        elements += local
        padded += -(-rows // ranks) * ranks * (local // rows)
    return ParamGroup(padded, elements, ranks, local)


def column(p: Param) -> bool:
    """Whether tp cuts the rows of this weight (row-parallel weights are cut by columns)."""
    return bool(p.shard) and not p.name.startswith(("attn.proj", "mlp.down"))


def groups(assembly: Assembly) -> Groups:
    """The model's groups."""
    tp, ranks = assembly.block.tp, shard_ranks(assembly.job)
    first, last = assembly.embedding.params, assembly.head_params
    layers = assembly.job.model.n_layers
    if options(assembly).wrap == "model":
        every = [*first, *assembly.block.params * layers, *last]
        return Groups(group_of(every, tp, ranks), ParamGroup(0, 0, ranks, 0), layers)
    return Groups(group_of([*first, *last], tp, ranks), group_of(assembly.block.params, tp, ranks), layers)


def buffers(assembly: Assembly, of: ParamGroup) -> Buffers:
    """Buffer sizes of one group."""
    job = assembly.job
    stored, used = state_bytes(job).gradients, job.software.itemsize
    reduce = ITEMSIZE[options(assembly).reduce_dtype]
    shard = of.padded / of.ranks
    copied = 0.0 if stored == reduce else stored
    return Buffers(
        gathered=of.padded * used,
        unsharded=of.padded * used,
        gradients=of.elements * used,
        reduce_input=of.padded * reduce,
        reduce_output=shard * reduce,
        reduced=shard * (reduce + copied) + of.last * used,
    )


def sharded_elements(assembly: Assembly) -> float:
    """Parameters on the fullest rank."""
    g = groups(assembly)
    return g.root.padded / g.root.ranks + g.n_blocks * g.block.padded / g.block.ranks


def states(assembly: Assembly) -> list[States]:
    """Sharded states of the fullest rank; without resharding the gathered parameters are transients of the walk, not states."""
    size, shard = state_bytes(assembly.job), sharded_elements(assembly)
    return [States(size.params * shard, size.gradients * shard, (size.master + size.moments) * shard, [])]
