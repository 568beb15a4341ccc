"""Memory-bound work: copies, norms, activations, loss and embedding.

Bytes are those of the model's op list (steptime/model): every tensor once per kernel that reads or writes it. Eager torch runs a
composite op as several kernels, which are counted one by one; what a backward pass reads again it has saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from steptime.answer.result import estimate
from steptime.bench import timings
from steptime.bench.runs import operands
from steptime.bench.runs.clock import measure
from steptime.bench.runs.sdpa import gradients
from steptime.job.job import Job

WIDE, TOKEN_ID = 4.0, 8.0
"""Bytes of an fp32 number, of a token id."""
SHARE = 0.2
"""Share of the free memory for one piece of work."""


class LayerWidths(NamedTuple):
    """One device's share of a job."""

    tokens: int
    hidden: int
    inter: int
    vocab: int


class MoveWork(NamedTuple):
    """A piece of work: `forward` of some inputs, and the bytes that it and its backward move."""

    name: str
    forward: Callable[..., torch.Tensor]
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    forward_bytes: float
    backward_bytes: float
    """0 where there is no backward."""
    size: float
    """Bytes of inputs, outputs and kept tensors."""


def of_job(job: Job) -> LayerWidths:
    """Tokens and widths of one device of a job."""
    shard = estimate(job).assembly.shard
    model = job.model
    width = int(model.inter_sz / float(shard.tp))
    return LayerWidths(int(shard.tokens), model.hidden_sz, width, int(float(shard.vocab) / float(shard.tp)))


def rmsnorm_bytes(tokens: int, width: int, itemsize: float, *, fused: bool) -> tuple[float, float]:
    """Forward and backward of an RMSNorm of `tokens` vectors.

    One kernel each on CUDA (aten's _fused_rms_norm): input, output, weight and a fp32 statistic per vector. Elsewhere several
    (torch/_refs/nn/functional, rms_norm), in fp32: see `steptime.model.sublayers.composite_rmsnorm`.
    """
    elements = float(tokens * width)
    if fused:
        statistics = tokens * WIDE + width * 2.0
        return 2.0 * elements * itemsize + statistics, 3.0 * elements * itemsize + statistics
    forward, backward = (7.0, 17.0) if itemsize == WIDE else (10.0, 20.0)
    return forward * elements * WIDE, backward * elements * WIDE


def loss_bytes(tokens: int, vocab: int, itemsize: float) -> tuple[float, float]:
    """Forward and backward of cross entropy of the upcast logits: as `steptime.model.embedding_and_head.torch_loss`."""
    narrow, wide = tokens * vocab * itemsize, tokens * vocab * WIDE
    picked = tokens * (TOKEN_ID + WIDE)
    if itemsize == WIDE:
        return 2.0 * wide + picked, 4.0 * wide
    return narrow + 3.0 * wide + picked, narrow + 5.0 * wide


def streams(bytes_: float, dtype: str, device: torch.device) -> list[MoveWork]:
    """copy, add and triad (a + 2 b) over tensors of `bytes_`, into existing memory: the same three tensors for all."""
    size = timings.ITEMSIZE[dtype]
    elements = int(bytes_ / size)
    drawn: list[torch.Tensor] = []

    def tensors(count: int) -> tuple[torch.Tensor, ...]:
        drawn.extend(operands.random((elements,), dtype, device) for _ in range(count - len(drawn)))
        return tuple(drawn[:count])

    moved = float(elements * size)
    return [
        MoveWork("copy", lambda x, y: y.copy_(x), partial(tensors, 2), 2 * moved, 0.0, 2 * moved),
        MoveWork("add", lambda x, y, z: torch.add(x, y, out=z), partial(tensors, 3), 3 * moved, 0.0, 3 * moved),
        MoveWork(
            "triad", lambda x, y, z: torch.add(x, y, alpha=2.0, out=z), partial(tensors, 3), 3 * moved, 0.0, 3 * moved
        ),
    ]


def of_layer(layer: LayerWidths, dtype: str, device: torch.device) -> list[MoveWork]:
    """Residual add, RMSNorm, SiLU times up, cross entropy and embedding at a job's sizes, allocating as training does."""
    tokens, hidden, inter, vocab = layer
    size = timings.ITEMSIZE[dtype]
    x, wide = float(tokens * hidden * size), float(tokens * inter * size)
    table = float(vocab * hidden * size)

    def leaf(*shape: int) -> torch.Tensor:
        return operands.random(shape, dtype, device).requires_grad_()

    def ids(most: int) -> torch.Tensor:
        return torch.randint(most, (tokens,), device=device)

    norm = rmsnorm_bytes(tokens, hidden, size, fused=device.type == "cuda")
    loss = loss_bytes(tokens, vocab, size)
    logits = tokens * vocab * (size + 3 * WIDE)
    return [
        MoveWork("residual", torch.add, lambda: (leaf(tokens, hidden), leaf(tokens, hidden)), 3 * x, 0.0, 3 * x),
        MoveWork("rmsnorm", _rmsnorm, lambda: (leaf(tokens, hidden), leaf(hidden)), *norm, 6 * tokens * hidden * WIDE),
        MoveWork(
            "silu_mul", _silu_mul, lambda: (leaf(tokens, inter), leaf(tokens, inter)), 5 * wide, 8 * wide, 7 * wide
        ),
        MoveWork(
            "cross_entropy",
            lambda logits, ids: F.cross_entropy(logits.float(), ids),
            lambda: (leaf(tokens, vocab), ids(vocab)),
            *loss,
            logits,
        ),
        # backward: a dense gradient of the table, zeroed and added into
        MoveWork(
            "embedding", _embed, lambda: (leaf(vocab, hidden), ids(vocab)), 2 * x, 2 * x + table, 2 * table + 2 * x
        ),
    ]


def _rmsnorm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-5)


def _silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def _embed(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.embedding(ids, table)


def time_work(work: MoveWork, dtype: str, device: torch.device, seconds: float) -> list[timings.MoveTiming]:
    """Forward and, where there is one, backward, over several copies of the inputs in turn."""
    copies = [work.inputs() for _ in range(operands.copies(work.size, device))]
    turns = operands.rotate(copies)
    both = 0.5 * seconds if work.backward_bytes else seconds
    timing = measure(lambda: work.forward(*turns()), device, seconds=both, least=3)
    found = [timings.MoveTiming(work.name, "forward", dtype, work.forward_bytes, timing)]
    if work.backward_bytes:
        done = operands.rotate([_graph(work, inputs) for inputs in copies])
        timing = measure(lambda: gradients(*done()), device, seconds=both, least=3)
        found.append(timings.MoveTiming(work.name, "backward", dtype, work.backward_bytes, timing))
    return found


def _graph(
    work: MoveWork, inputs: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]:
    out = work.forward(*inputs)
    return out, tuple(x for x in inputs if x.requires_grad), torch.ones_like(out)


def sweep(
    job: Job, device: torch.device, dtypes: Sequence[str], seconds: float = 4.0
) -> tuple[list[timings.MoveTiming], list[str]]:
    """Streams of two sizes, and the job's memory-bound work in every dtype, for about `seconds`."""
    sizes = (2**26, 2**28) if device.type == "cpu" else (2**28, 2**30)
    layer = of_job(job)
    groups: list[tuple[str, Callable[[], list[MoveWork]]]] = []  # made one after another: a stream's tensors are large
    groups += [("fp32", partial(streams, bytes_, "fp32", device)) for bytes_ in sizes]
    groups += [(dtype, partial(of_layer, layer, dtype, device)) for dtype in dtypes]
    each = 0.5 * seconds / (3 * len(sizes) + 5 * len(dtypes))
    found: list[timings.MoveTiming] = []
    notes: list[str] = []
    for dtype, works in groups:
        for work in works():
            if work.size > SHARE * operands.free_bytes(device):
                notes.append(f"{work.name} {dtype}: not measured; {work.size / 2**30:.1f} GiB do not fit")
                continue
            found += time_work(work, dtype, device, each)
    operands.release(device)
    return found, notes
