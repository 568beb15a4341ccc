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
