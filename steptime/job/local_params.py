"""One device's share of a job, and the parameters of a part on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

from steptime.base.num import Num
from steptime.base.records import record
from steptime.job.job import Job
from steptime.model.ops import Param
from steptime.model.shard import Shard, padded_vocab


class LocalParam(NamedTuple):
    """A parameter, and its elements on one device; for experts, those of all experts on the device."""

    param: Param
    elements: Num
    tensors: Num = 1
    """Tensors that it has on one device: one, or one per local expert."""

    @property
    def each(self) -> Num:
        """Elements of one tensor."""
        return self.elements / self.tensors if self.param.n_experts else self.elements


class Pieces(NamedTuple):
    """Consecutive tensors of one size."""

    elements: Num
    times: Num
    alone: bool = False
    """Whether it is a tied embedding's copy of a pipeline of several stages, which gets its own bucket when sharded
    (megatron-core 0.16.1, megatron/core/distributed/param_and_grad_buffer.py:698)."""


@record
class LocalParams:
    """Trained parameters of a part on one device, in the order in which its modules register them."""

    params: list[LocalParam]

    def __iter__(self) -> Iterator[LocalParam]:
        return iter(self.params)

    @cached_property
    def elements(self) -> dict[str, Num]:
        """Their elements by parameter group."""
        found: dict[str, Num] = {}
        for p in self.params:
            group = p.param.group
            found[group] = found.get(group, 0.0) + p.elements
        return found

    @cached_property
    def backward(self) -> dict[str, list[LocalParam]]:
        """Those of each parameter group in the order of backward: the last registered first."""
        found: dict[str, list[LocalParam]] = {}
        for p in reversed(self.params):
            found.setdefault(p.param.group, []).append(p)
        return found

    @cached_property
    def pieces(self) -> dict[str, list[Pieces]]:
        """Their tensors, in the same order."""
        return {group: [Pieces(p.each, p.tensors) for p in self.backward[group]] for group in self.elements}

    @cached_property
    def by_shape(self) -> dict[object, Num]:
        """Elements of one tensor of those that projections multiply, by shape; of all over the vocabulary together."""
        every = [p for p in self.params if p.param.multiplies]
        return {"vocab" if p.param.vocab else p.param.shape: p.each for p in every}

    @cached_property
    def total(self) -> Num:
        """All of their elements."""
        return sum([p.elements for p in self.params])

    @cached_property
    def tensors(self) -> Num:
        """Tensors that they have on one device."""
        return sum([p.tensors for p in self.params])


CountedParams: TypeAlias = list[tuple[LocalParams, int]]
"""Parameters of some parts, with how often each part occurs."""


def shard_of(job: Job) -> Shard:
    """One device's share of one micro-batch of the job."""
    p, data = job.parallelism, job.data
    return Shard(
        batch=1.0 * data.microbatch_sz,
        seq=data.seqlen / p.cp,
        kv_seq=float(data.seqlen),
        tp=p.tp,
        sp=job.sp,
        vocab=padded_vocab(job.model.vocab_sz, p.tp, job.software.layout.vocab_multiple),
        software=job.software,
        cp=p.cp,
        cp_comm_type=job.cp_comm_type,
        cp_a2a=p.cp_a2a,
        ep=p.ep,
        etp=p.etp,
    )


def in_bf16_of(shard: Shard) -> Shard:
    """The share of a layer that a recipe leaves in bf16."""
    return replace(shard, software=shard.software.model_copy(update={"precision": "bf16"}))
