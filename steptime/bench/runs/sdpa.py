"""Attention through torch's scaled_dot_product_attention, each back end, forward and backward separately."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from steptime.bench import timings
from steptime.bench.runs import operands
from steptime.bench.runs.clock import measure
from steptime.job.job import Job

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""Fast back ends first; "default" is torch's own choice."""
SHARE = 0.25
"""Share of the free memory for one call."""
PROBE = 256
"""Sequence length of the trial that shows whether a back end runs."""
MATH_COPIES = 6
"""Score matrices that the math back end may hold at once: scores, mask, softmax and their gradients, in fp32."""


class AttentionShape(NamedTuple):
    """Heads of one device over a batch of sequences."""

    batch: int
    seqlen: int
    n_q_heads: int
    n_kv_heads: int
    head_dim: int

    @property
    def score_elements(self) -> int:
        """Elements of all score matrices."""
        return self.batch * self.n_q_heads * self.seqlen**2

    @property
    def elements(self) -> int:
        """Elements of q, k, v and the output."""
        return 2 * self.batch * self.seqlen * (self.n_q_heads + self.n_kv_heads) * self.head_dim


def of_job(job: Job) -> AttentionShape:
    """One device's attention in a job: its share of the heads, the whole sequence."""
    model, tp = job.model, job.parallelism.tp
    heads = model.n_q_heads // tp, max(model.n_kv_heads // tp, 1)
    return AttentionShape(job.data.microbatch_sz, job.data.seqlen, *heads, model.head_dim)


def shapes(job: Job, device: torch.device) -> list[AttentionShape]:
    """The job's shape, and its heads over other lengths with a similar number of tokens."""
    mine = of_job(job)
    tokens, lengths = (
        (1024, (128, 256, 512, 1024)) if device.type == "cpu" else (16384, (1024, 2048, 4096, 8192, 16384))
    )
    others = [mine._replace(batch=max(tokens // length, 1), seqlen=length) for length in lengths]
    return [mine, *(other for other in others if other.seqlen != mine.seqlen)]


def only(backend: str) -> AbstractContextManager[Any]:
    """Context in which only this back end may run."""
    context: AbstractContextManager[Any] = nullcontext() if backend == "default" else sdpa_kernel(BACKENDS[backend])
    return context


def tensors(shape: AttentionShape, dtype: str, device: torch.device) -> list[torch.Tensor]:
    """q, k and v as projections leave them, [batch, heads, seqlen, head_dim] over storage [batch, seqlen, heads, head_dim].

    The last is a gradient of the output.
    """
    heads = (shape.n_q_heads, shape.n_kv_heads, shape.n_kv_heads, shape.n_q_heads)
    inputs = [
        operands.random((shape.batch, shape.seqlen, count, shape.head_dim), dtype, device).transpose(1, 2)
        for count in heads
    ]
    return [*(x.requires_grad_() for x in inputs[:3]), inputs[3]]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One causal call; where there are fewer key heads than query heads, groups of query heads share them."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def usable(backend: str, shape: AttentionShape, dtype: str, device: torch.device) -> str:
    """Why a back end cannot run forward and backward of a shape here; "" if it can."""
    size = timings.ITEMSIZE[dtype]
    needed = 3.0 * shape.elements * size + (MATH_COPIES * 4.0 * shape.score_elements if backend == "math" else 0.0)
    if needed > SHARE * operands.free_bytes(device):
        return f"{needed / 2**30:.1f} GiB do not fit"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            q, k, v, grad = tensors(shape._replace(batch=1, seqlen=min(shape.seqlen, PROBE)), dtype, device)
            with only(backend):
                torch.autograd.grad(attend(q, k, v), (q, k, v), grad)
        except RuntimeError as error:
            reasons = [str(w.message) for w in said] or [str(error)]
            return reasons[0].partition("\n")[0].partition(". ")[0].partition(" (Triggered")[0][:160]
    return ""


def time_shape(
    shape: AttentionShape, backend: str, dtype: str, device: torch.device, seconds: float
) -> list[timings.AttentionTiming]:
    """Forward, which keeps tensors for backward, and backward, of one back end."""
    first = tensors(shape, dtype, device)
    size = shape.elements * timings.ITEMSIZE[dtype]
    copies = [first] + [tensors(shape, dtype, device) for _ in range(operands.copies(size, device) - 1)]
    turns = operands.rotate(copies)

    def forward() -> torch.Tensor:
        q, k, v, _ = turns()
        return attend(q, k, v)

    with only(backend):
        ahead = measure(forward, device, seconds=0.5 * seconds, least=3)
        done = [(attend(q, k, v), (q, k, v), grad) for q, k, v, grad in copies]
        next_inputs = operands.rotate(done)
        back = measure(lambda: gradients(*next_inputs()), device, seconds=0.5 * seconds, least=3)
    forward_row = timings.AttentionTiming(backend, "forward", dtype, *shape, causal=True, timing=ahead)
    return [forward_row, forward_row._replace(direction="backward", timing=back)]


def gradients(out: torch.Tensor, inputs: tuple[torch.Tensor, ...], grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Backward alone; can be called repeatedly."""
    return torch.autograd.grad(out, inputs, grad, retain_graph=True)


def sweep(
    job: Job, device: torch.device, dtypes: Sequence[str], seconds: float = 5.0
) -> tuple[list[timings.AttentionTiming], list[str]]:
    """Every back end that runs here, causal, over the job's shape and others, for about `seconds`.

    `dtypes`: of fp32, bf16, fp16; fused kernels on GPUs take the last two. The longest sequences of a back end are left out
    where its share of the time is used up.
    """
    found: list[timings.AttentionTiming] = []
    notes: list[str] = []
    mine = shapes(job, device)
    kinds = [(dtype, backend) for dtype in dtypes for backend in ("default", *BACKENDS)]
    refused = {kind: usable(kind[1], mine[0], kind[0], device) for kind in kinds}
    notes += [f"attention {dtype} {backend}: not measured; {why}" for (dtype, backend), why in refused.items() if why]
    kinds = [kind for kind in kinds if not refused[kind]]
    share = seconds / max(len(kinds), 1)
    for dtype, backend in kinds:
        start = perf_counter()
        for i, shape in enumerate(mine):
            late = i > 0 and perf_counter() - start > share
            reason = "time budget exceeded" if late else usable(backend, shape, dtype, device)
            if reason:
                notes.append(f"attention {dtype} {backend}, {shape.seqlen} tokens: not measured; {reason}")
            else:
                found += time_shape(shape, backend, dtype, device, share / (2 * len(mine)))
    operands.release(device)
    return found, notes
