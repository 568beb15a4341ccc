"""One rank's training loop over one fixed batch: forward and backward of all micro-batches, AdamW, gradients set to None.

Micro-batches as the profiles say: DDP reduces after the last one (no_sync before), FSDP2 after each or the last, a pipeline as
torch's schedule does.
"""

from __future__ import annotations

from contextlib import nullcontext
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from steptime.bench.runs.engines import Laid, local, optimizer
from steptime.fsdp import options, unsynced
from steptime.job.assembly import Assembly


class TokenBatch(NamedTuple):
    """This rank's share of the global batch, (gbs/dp, s) each."""

    tokens: Tensor
    targets: Tensor


class Trainer:
    """One rank's training loop over one fixed batch."""

    def __init__(self, laid: Laid, seed: int = 0) -> None:
        """Make the optimizer and the batch."""
        self.laid, self.optimizer = laid, optimizer(laid)
        self.batch = batch_of(laid, seed)

    def step(self) -> Tensor | None:
        """One whole step; the mean loss of this rank's micro-batches, on ranks that hold the head."""
        with self.laid.parallel_loss():
            loss = self.forward_backward()
        reduce_partial(self.laid)
        self.optimizer.step()
        fsdp = self.laid.job.parallelism.fsdp
        self.optimizer.zero_grad(set_to_none=fsdp is None or not fsdp.gradients_stay)
        return loss

    def forward_backward(self) -> Tensor | None:
        """All micro-batches; gradients accumulate."""
        if self.laid.schedule is not None:
            return self.pipelined()
        job, (run,) = self.laid.job, self.laid.runs
        m, size = job.microbatches, job.data.microbatch_sz
        losses = []
        for i in range(m):
            rows = slice(i * size, (i + 1) * size)
            if isinstance(run, FSDPModule) and unsynced(job):
                run.set_requires_gradient_sync(i == m - 1)
                run.set_reshard_after_backward(i == m - 1 or options(Assembly(job)).reshard_after_backward)
            with run.no_sync() if isinstance(run, DistributedDataParallel) and i < m - 1 else nullcontext():
                loss = run(self.batch.tokens[rows].clone(), self.batch.targets[rows].clone())  # as from a data loader
                (loss if m == 1 else loss / m).backward()
            losses.append(local(loss.detach()))
            del loss
        return torch.stack(losses).mean()

    def pipelined(self) -> Tensor | None:
        """The schedule's forward and backward."""
        laid, losses = self.laid, list[Tensor]()
        first = [self.batch.tokens] if laid.parts[0].tokens is not None else []
        # logits are not needed; torch before 2.10 always returns them
        less = {"return_outputs": False} if "return_outputs" in signature(laid.schedule.step).parameters else {}
        if not laid.last:
            laid.schedule.step(*first, **less)
            return None
        laid.schedule.step(*first, target=self.batch.targets, losses=losses, **less)
        return torch.stack([local(loss.detach()) for loss in losses]).mean()


def batch_of(laid: Laid, seed: int) -> TokenBatch:
    """This rank's sequences of one global batch that every layout shares; targets are the next tokens."""
    data, vocab = laid.job.data, laid.job.model.vocab_sz
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (data.gbs, data.seqlen + 1), generator=generator)
    mine = data.gbs // laid.job.parallelism.dp
    ids = ids[laid.data_rank * mine : (laid.data_rank + 1) * mine]
    return TokenBatch(ids[:, :-1].to(laid.device).contiguous(), ids[:, 1:].to(laid.device).contiguous())


def reduce_partial(laid: Laid) -> None:
    """Sum the gradients that sequence parallelism leaves partial (norms), one by one; under FSDP2 it already happened."""
    for param in laid.params:
        grad: Any = param.grad
        if grad is not None and any(place.is_partial() for place in getattr(grad, "placements", ())):
            param.grad = grad.redistribute(placements=param.placements)  # type: ignore[attr-defined]
