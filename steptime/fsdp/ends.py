"""What FSDP gathers of embedding and head: as one root, as groups of their own, or, in a traced graph, parameter by parameter."""

from __future__ import annotations

from typing import NamedTuple

from steptime.base.num import Num
from steptime.fsdp.groups import Buffers, buffers, ends_wrapped, group_of, one_group, options
from steptime.job.assembly import Assembly
from steptime.memory.chunked_loss import in_chunks
from steptime.model.ops import Param


class GatheredEnds(NamedTuple):
    """What is gathered of embedding and head while each part of a micro-batch runs."""

    first: Buffers
    """Of the embedding."""
    last: Buffers
    """Of the head."""
    between: Num
    """Bytes that stay gathered while layers run."""
    separate: bool = False
    """Whether each is gathered before its own forward, and reduced after its own backward."""
    traced: bool = False
    """Whether a graph frees what an all-gather returns once it is copied out."""
    regathered: bool = False
    """Whether the embedding is gathered once more for its backward, which reads none of it."""

    @property
    def gathered_during_head(self) -> Num:
        """Bytes that stay gathered beside the head's own parameters."""
        return self.between if self.separate else 0.0

    @property
    def regathered_bytes(self) -> Num:
        """Bytes gathered for the embedding's backward while the first layer's runs."""
        return self.first.gathered if self.regathered else 0.0

    @property
    def regathered_unsharded(self) -> Num:
        """Bytes of these parameters in the embedding's backward."""
        return self.first.unsharded if self.regathered else 0.0


def ends_of(assembly: Assembly, root: Buffers) -> GatheredEnds:
    """The root stays gathered from its forward to the end of backward; groups of their own are freed, the head's after backward.

    A graph gathers a parameter for what reads it, and the embedding's backward reads none (pytorch/torchtitan@27aa4907
    torchtitan/experiments/graph_trainer/simple_fsdp.py, ReplicateComputation); a hook of `fully_shard` gathers it all the same
    (torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_state.py, _pre_backward).
    """
    said, wrapped = options(assembly), ends_wrapped(assembly)
    traced = said.wrap == "parameter"
    if not traced and wrapped == "root":
        return GatheredEnds(root, root, root.unsharded)
    first, last = (
        buffers(assembly, one_group(assembly, params)) for params in (assembly.embedding.params, with_tied(assembly))
    )
    if traced:
        return GatheredEnds(first, last, 0.0, separate=True, traced=True)
    stays = wrapped == "head" or not said.reshard_after_forward
    return GatheredEnds(first, last, first.unsharded if stays else 0.0, separate=True, regathered=not stays)


def tied_weight(assembly: Assembly) -> list[Param]:
    """The embedding's weight where it is the head's too."""
    return [p for p in assembly.embedding.params if p.vocab and assembly.tied_here]


def with_tied(assembly: Assembly) -> list[Param]:
    """Parameters of which the head's backward makes gradients: its own, and the embedding's where it is tied."""
    return [*tied_weight(assembly), *assembly.head_params]


def head_gradients(assembly: Assembly, *, added_at_once: bool = False) -> Num:
    """Bytes of the gradients that a head in the root's group leaves allocated while the layers' backward runs.

    `added_at_once`: each is added to an existing sum, except that of a tied weight, which waits in autograd for the embedding's
    (torch 2.13, torch/csrc/autograd/engine.cpp: an InputBuffer waits for all of a node's inputs). A tied weight of 1,024 x 128
    in bf16 has 2 * 131,072 = 262,144 B of it.
    """
    params = tied_weight(assembly) if added_at_once else with_tied(assembly)
    return group_of(params, assembly.head.tp, 1).shard * assembly.job.software.itemsize


def sum_of_tied_gradients(assembly: Assembly) -> Num:
    """Bytes of the embedding's gradients and of the sum of a tied weight's two, once what the backward read is freed; 0 for none.

    The sum goes into a new tensor (torch 2.13, torch/csrc/autograd/input_buffer.cpp, accumulate). Of a weight of 1,024 x 128 in
    bf16: 2 * 262,144 B, beside the head's. Chunks of the loss have stored the head's, which the embedding's is added to in place.
    """
    tied = [] if in_chunks(assembly.job) else tied_weight(assembly)
    return (
        group_of([*assembly.embedding.params, *tied], assembly.head.tp, 1).shard * assembly.job.software.itemsize
        if tied
        else 0.0
    )
