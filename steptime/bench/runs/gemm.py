"""Matrix products: a config's projections and a sweep of shapes, in the layouts that torch's linear layers run.

A linear layer of weight W [n, k] multiplies x [m, k] by W transposed (torch.nn.functional.linear); its backward multiplies the
gradient by W, and the gradient transposed by x. fp8 kernels take one layout only, so all three are measured in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from steptime.answer.result import estimate
from steptime.base.grouping import grouped
from steptime.bench import timings
from steptime.bench.runs import operands
from steptime.bench.runs.clock import Timing, interleaved, single
from steptime.job.job import Job
from steptime.model.ops import Gemm

SWEEP = "sweep"
SLOW = 0.5
"""A narrow dtype slower than this share of fp32 is emulated, and not used for training on such a device."""
SHARE = 0.25
"""Share of the free memory for the operands of one product."""


ROUNDS, TURNS = 100, 10
"""Most rounds, and samples per round."""
CALLS = 5
"""Least calls of each product: two to warm up, one of them timed, and three samples."""


class GemmShape(NamedTuple):
    """One product m x k by k x n."""

    name: str
    direction: Literal["forward", "dgrad", "wgrad"]
    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        """FLOPs: 2 m n k."""
        return 2.0 * self.m * self.n * self.k

    @property
    def elements(self) -> int:
        """Elements of both operands and the result."""
        return self.m * self.k + self.k * self.n + self.m * self.n


def projections(job: Job) -> list[GemmShape]:
    """The products of a config's linear layers and its head on one device, each shape and direction once.

    Products of two activations (unfused attention's scores) are batched ones and no projections.
    """
    found = estimate(job)
    parts = (*found.assembly.kinds, found.assembly.head)
    linear = {op.name for part in parts for op in part.ops if isinstance(op, Gemm) and op.params}
    shapes = [GemmShape(r.name, r.pass_, int(r.m), int(r.n), int(r.k)) for r in found.gemms if r.name in linear]
    return list(dict.fromkeys(shapes))


def sweep_shapes(device: torch.device) -> list[GemmShape]:
    """Squares, and layers of Llama-like widths over a batch of tokens: smallest first."""
    sizes: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    tokens, widths = 8192, [(6144, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192), (8192, 28672)]
    if device.type == "cpu":
        sizes, tokens, widths = (256, 512, 1024, 2048), 1024, [(1024, 1024), (3072, 1024), (1024, 4096)]
    shapes = [GemmShape(SWEEP, "forward", s, s, s) for s in sizes]
    for n, k in widths:
        shapes += [
            GemmShape(SWEEP, "forward", tokens, n, k),
            GemmShape(SWEEP, "dgrad", tokens, k, n),
            GemmShape(SWEEP, "wgrad", k, n, tokens),
        ]
    return sorted(dict.fromkeys(shapes), key=lambda shape: shape.flops)


def pair(shape: GemmShape, dtype: str, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Both operands in their memory layout: m x k and n x k (forward, and fp8 always), m x k and k x n, k x n and k x m."""
    m, n, k = shape.m, shape.n, shape.k
    if shape.direction == "forward" or dtype == "fp8":
        sizes = (m, k), (n, k)
    else:
        sizes = ((m, k), (k, n)) if shape.direction == "dgrad" else ((k, n), (k, m))
    both = operands.random(sizes[0], dtype, device), operands.random(sizes[1], dtype, device)
    return (*both, torch.ones((), device=device)) if dtype == "fp8" else both


def multiply(
    shape: GemmShape, dtype: str, left: torch.Tensor, right: torch.Tensor, *scale: torch.Tensor
) -> torch.Tensor:
    """The product as torch runs it in this direction: m x n; a weight's gradient n x m, as the weight lies.

    fp8: e4m3 by e4m3 into bf16, one scale per tensor, fast accumulation in forward only, as in TransformerEngine's recipes.
    """
    if dtype == "fp8":
        fast = shape.direction == "forward"
        scaled: torch.Tensor = torch.ops.aten._scaled_mm(  # noqa: SLF001  the kernel that torchao and torchtitan call
            left, right.t(), scale_a=scale[0], scale_b=scale[0], out_dtype=torch.bfloat16, use_fast_accum=fast
        )
        return scaled
    if shape.direction == "forward":
        return F.linear(left, right)
    return left.mm(right) if shape.direction == "dgrad" else left.t().mm(right)


@contextmanager
def precision(dtype: str) -> Iterator[None]:
    """Run fp32 products on tensor cores for tf32 only; the setting is restored afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def dtypes(device: torch.device) -> tuple[list[str], list[str]]:
    """The dtypes to measure on a device, and a note for each other one."""
    notes = []
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    probes = {"fp32": _probe("fp32", device)}
    for dtype, needs in (("tf32", (8, 0)), ("bf16", (0, 0)), ("fp16", (0, 0)), ("fp8", (8, 9))):
        if capability < needs:
            notes.append(f"{dtype}: not measured; it needs CUDA capability {needs[0]}.{needs[1]}")
            continue
        probe = _probe(dtype, device)
        try:
            probe()
        except (RuntimeError, TypeError, AttributeError) as error:
            notes.append(f"{dtype}: not measured; {operands.first_line(error)}")
        else:
            probes[dtype] = probe
    seconds = {dtype: found.min_s for dtype, found in interleaved(probes, device, rounds=10, warm=1).items()}
    slow = [dtype for dtype in ("fp16", "fp8") if seconds.get(dtype, 0.0) * SLOW > seconds["fp32"]]
    notes += [
        f"{d}: not measured; it runs at {seconds['fp32'] / seconds[d]:.2f} of fp32's rate on this device" for d in slow
    ]
    return [dtype for dtype in probes if dtype not in slow], notes


def _probe(dtype: str, device: torch.device) -> Callable[[], torch.Tensor]:
    """A small square product, its operands drawn at the first call."""
    side = 512 if device.type == "cpu" else 4096
    shape = GemmShape("probe", "forward", side, side, side)
    given: list[torch.Tensor] = []

    def run() -> torch.Tensor:
        if not given:
            given.extend(pair(shape, dtype, device))
        with precision(dtype):
            return multiply(shape, dtype, *given)

    return run


def turning(shape: GemmShape, dtype: str, device: torch.device) -> Callable[[], torch.Tensor]:
    """The product, over several copies of its operands in turn.

    Raises:
        RuntimeError: what torch says where the device cannot run it; MemoryError: its operands do not fit.
    """
    if taken(shape, dtype, device) > SHARE * operands.free_bytes(device):
        raise MemoryError(f"{taken(shape, dtype, device) / 2**30:.1f} GiB of operands do not fit")
    first = pair(shape, dtype, device)
    multiply(shape, dtype, *first)
    others = [
        tuple(x.clone() for x in first)
        for _ in range(operands.copies(shape.elements * timings.ITEMSIZE[dtype], device) - 1)
    ]
    turns = operands.rotate([first, *others])
    return lambda: multiply(shape, dtype, *turns())


def taken(shape: GemmShape, dtype: str, device: torch.device) -> float:
    """Most bytes of a product: its copies fill the cache twice, unless one copy does."""
    return max(shape.elements * timings.ITEMSIZE[dtype], 2.0 * operands.cache_bytes(device))


def time_shapes(
    shapes: Sequence[GemmShape], dtype: str, device: torch.device, seconds: float, patience: float = 1.0
) -> tuple[list[timings.GemmTiming], list[str]]:
    """All shapes in turns for `seconds`, as many at once as memory holds; equal ones are measured once.

    Those are noted that do not run, and those for which no time is left after `patience` times the `seconds`: give the short ones
    first.
    """
    alike = grouped(shapes, lambda shape: shape._replace(name=""))
    found: dict[GemmShape, Timing] = {}
    runs: dict[GemmShape, Callable[[], torch.Tensor]] = {}
    notes: list[str] = []
    used, ahead = 0.0, 0.0
    with precision(dtype):
        for i, (shape, named) in enumerate(alike.items()):
            if ahead > patience * seconds:
                left = f"{len(alike) - i} of {len(alike)} shapes not measured, time budget exceeded"
                notes.append(f"{dtype} {named[0].name}: {left}")
                break
            try:
                runs[shape] = turning(shape, dtype, device)
            except (RuntimeError, MemoryError) as error:
                where = f"{named[0].name} {shape.direction} {shape.m} x {shape.n} x {shape.k}"
                notes.append(f"{dtype} {where}: not measured; {operands.first_line(error)}")
                continue
            ahead += CALLS * single(runs[shape], device, warm=0)()
            used += taken(shape, dtype, device)
            if used > SHARE * operands.free_bytes(device):
                found |= _together(runs, device, seconds * len(runs) / len(alike))
                used, runs = 0.0, {}
        found |= _together(runs, device, seconds * len(runs) / len(alike))
    timed = [(named, timing) for shape, timing in found.items() for named in alike[shape]]
    return [timings.GemmTiming(s.name, s.direction, dtype, s.m, s.n, s.k, timing) for s, timing in timed], notes


def _together(
    runs: dict[GemmShape, Callable[[], torch.Tensor]], device: torch.device, seconds: float
) -> dict[GemmShape, Timing]:
    return interleaved(runs, device, ROUNDS, turns=TURNS, seconds=0.4 * seconds, warm=0)


def sweep(job: Job, device: torch.device, seconds: float = 10.0) -> tuple[list[timings.GemmTiming], list[str]]:
    """The config's projections and the sweep in every dtype that the device has, for about `seconds` altogether.

    Of the sweep the largest shapes are left out where time is short, projections only beyond three times their share.
    """
    names, notes = dtypes(device)
    mine = sorted(projections(job), key=lambda shape: shape.flops)
    found: list[timings.GemmTiming] = []
    for dtype in names:
        for shapes, patience in ((mine, 3.0), (sweep_shapes(device), 1.0)):
            timed, said = time_shapes(shapes, dtype, device, 0.5 * seconds / len(names), patience)
            found, notes = found + timed, notes + said
    operands.release(device)
    return found, notes


def best(found: Sequence[timings.GemmTiming]) -> dict[str, timings.GemmTiming]:
    """The best achieved rate of each dtype: the row with the highest rate, by the minimum (MAMF)."""
    by_dtype = grouped(found, lambda row: row.dtype)
    return {dtype: max(rows, key=lambda row: row.flops / row.timing.min_s) for dtype, rows in by_dtype.items()}
