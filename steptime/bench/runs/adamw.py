"""The optimizer's step over a config's parameters, and the fixed time of a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from time import perf_counter

import torch

from steptime.answer.result import estimate
from steptime.bench import timings
from steptime.bench.runs import operands
from steptime.bench.runs.clock import measure, summary, synchronize
from steptime.job.job import Job
from steptime.model.ops import Param

FUSED_ACCESSES, FOREACH_ACCESSES = 7.0, 20.0
"""Of one parameter, states all in one dtype: the gradient is read, parameter and two moments are read and written; op by op
with temporaries as counted by `steptime.timing.optimizer.foreach_bytes_per_param`."""
SHARE = 0.3
"""Share of the free memory for parameter, gradient, moments and temporaries."""
MOST_ON_CPU = 2**24
"""Most parameters on a CPU, for a step within a tenth of a second."""
LAUNCHES = 100


def parameter_shapes(job: Job, most: float) -> list[tuple[int, ...]]:
    """Shapes of one device's parameters: embedding and head, then as many blocks as `most` elements allow, at least one."""
    assembly = estimate(job).assembly
    tp = job.parallelism.tp
    block = [_local(param, tp) for param in assembly.kinds[0].params]
    ends = [_local(param, tp) for param in (*assembly.embedding.params, *assembly.head_params)]
    size = sum(map(prod, block))
    layers = max(c.layers for c in assembly.chunks)
    blocks = int(min(max((most - sum(map(prod, ends))) // size, 0), layers))
    return [*ends, *block * blocks] if blocks else block


def _local(param: Param, tp: int) -> tuple[int, ...]:
    first, *rest = map(int, param.shape)
    return (max(first // tp, 1) if param.split_dim is not None else first, *rest)


def step(
    job: Job, device: torch.device, dtype: str, *, fused: bool = False, seconds: float = 0.5
) -> tuple[timings.MoveTiming, str]:
    """AdamW as torch runs it by default (foreach on CUDA, tensor by tensor on CPU), or its fused kernel; and its parameters.

    Gradients have the parameters' dtype, so have the moments; the gradients are not cleared.
    """
    size = timings.ITEMSIZE[dtype]
    most = SHARE * operands.free_bytes(device) / (6.0 * size)
    shapes = parameter_shapes(job, min(most, MOST_ON_CPU) if device.type == "cpu" else most)
    parameters = [operands.random(shape, dtype, device).requires_grad_() for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True if fused else None)
    timing = measure(optimizer.step, device, seconds=seconds, least=3)
    count = sum(map(prod, shapes))
    name = "adamw_fused" if fused else "adamw"
    accesses = FUSED_ACCESSES if fused else FOREACH_ACCESSES
    return timings.MoveTiming(name, "forward", dtype, accesses * size * count, timing), (
        f"{name} {dtype}: over {count:,} parameters in {len(shapes)} tensors"
    )


def steps(
    job: Job, device: torch.device, dtypes: Sequence[str], seconds: float = 2.0
) -> tuple[list[timings.MoveTiming], list[str]]:
    """Both kinds of step in every dtype."""
    found: list[timings.MoveTiming] = []
    notes: list[str] = []
    for dtype in dtypes:
        for fused in (False, True):
            try:
                row, note = step(job, device, dtype, fused=fused, seconds=0.5 * seconds / len(dtypes))
            except (RuntimeError, ValueError) as error:
                notes.append(f"adamw {dtype}{' fused' * fused}: not measured; {operands.first_line(error)}")
                continue
            found.append(row)
            notes.append(note)
    operands.release(device)
    return found, notes


def launches(device: torch.device, seconds: float = 0.5) -> tuple[list[timings.LaunchTiming], list[str]]:
    """Time of a tiny kernel: on a device behind other queued kernels (its own time and the gap), on the host to launch one.

    A CPU has no queue: its calls are timed, and there is no row for the host.
    """
    few = torch.randn(16, device=device)
    left, right = torch.randn(16, 16, device=device), torch.empty(16, 16, device=device)

    def move() -> torch.Tensor:
        return few.add_(1e-6)

    tiny = {"gemm": lambda: torch.mm(left, left, out=right), "move": move}
    found = [timings.LaunchTiming(name, measure(run, device, seconds=seconds / 3)) for name, run in tiny.items()]
    if device.type == "cpu":
        return found, ["launches: on a CPU calls are synchronous; gemm and move are whole calls"]
    samples = []
    for _ in range(20):
        synchronize(device)
        start = perf_counter()
        for _ in range(LAUNCHES):
            move()
        samples.append((perf_counter() - start) / LAUNCHES)
    return [*found, timings.LaunchTiming("host", summary(samples))], []
