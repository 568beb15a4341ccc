"""The step kernels: every op of a stage with the function that prices it, and that function's docstring."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import NamedTuple

from steptime import fsdp
from steptime.answer.result import Estimate
from steptime.answer.tables import kind_label, layer_counts
from steptime.cost import comm, compute, overlap
from steptime.cost.part_seconds import part_time
from steptime.job.parts import Part
from steptime.memory import overhead
from steptime.model.ops import Attention, Comm, Gemm, Op
from steptime.model.scans import Chunked
from steptime.report.format import column, number, percent, whole
from steptime.report.table import Table
from steptime.schedule import walk
from steptime.timing import data_parallel, optimizer
from steptime.timing.step_time import StepTime, straggler_s


class KernelTime(NamedTuple):
    """One op of the busiest stage; seconds are those of one call."""

    name: str
    priced_by: str
    part: str
    """Part of the step that includes it: gemm, attention or memory_bound."""
    times: float
    forward_flops: float
    forward_bytes: float
    """Bytes that forward moves to and from memory."""
    forward_s: float
    backward_s: float
    backward_bytes: float = 0.0
    kernels: float = 1.0
    op: Op | None = None
    """None of copies that belong to no op."""

    @property
    def step_s(self) -> float:
        """Seconds per step, without recomputation."""
        return self.times * (self.forward_s + self.backward_s)


def op_times(estimate: Estimate) -> list[KernelTime]:
    """Every compute op of the busiest stage, in the order of the model."""
    timing = estimate.timing
    rows = [row for part, times in _parts(timing) for op in part.ops for row in _timed(op, part, times, timing)]
    return [*rows, *_copies(timing)]


def _copies(timing: StepTime) -> Iterator[KernelTime]:
    """FSDP's copies between its flat buffers and the parameters, of all groups of a micro-batch."""
    if timing.fsdp is None:
        return
    forward, backward = timing.fsdp.forward.copies_s, timing.fsdp.backward.copies_s
    times = float(timing.job.microbatches)
    yield KernelTime("fsdp.copies", fsdp.group_seconds.__name__, "memory_bound", times, 0.0, 0.0, forward, backward)


def _parts(timing: StepTime) -> Iterator[tuple[Part, float]]:
    """The kinds of part on the busiest stage and how often a step runs each."""
    chunks, assembly = timing.assembly.stages[timing.busiest], timing.assembly
    counts = (
        (assembly.embedding, sum(chunk.embedding for chunk in chunks)),
        *layer_counts(chunks).items(),
        (assembly.head, sum(chunk.head for chunk in chunks)),
    )
    return ((part, float(count * timing.job.microbatches)) for part, count in counts if count)


PRICES: dict[type[Op], Callable[..., compute.Pass]] = {
    Gemm: compute.gemm_pass,
    Attention: compute.attention_pass,
    Chunked: compute.chunked_pass,
}
"""The function that prices each kind of compute op."""


def _timed(op: Op, part: Part, times: float, timing: StepTime) -> Iterator[KernelTime]:
    """One op, priced as in the step: its kernels, and those that finish a projection's gradients; no collectives."""
    if isinstance(op, Comm):
        return
    name = kind_label(timing.assembly, part) + op.name
    forward, backward, _ = part_time([op], part.sizes, timing.context, [])
    done = compute.forward(op, timing.rates, part.sizes)
    work = (float(done.flops), float(done.bytes))
    if isinstance(op, Gemm | Attention | Chunked):
        price = PRICES[type(op)]
        seconds = float(forward.gemm_s + forward.attention_s), float(backward.gemm_s + backward.attention_s)
        yield KernelTime(
            name, price.__name__, "attention" if backward.attention_s else "gemm", times, *work, *seconds, op=op
        )
        if backward.memory_s:
            function, casts_s = compute.parameter_gradients.__name__, float(forward.memory_s)
            yield KernelTime(name, function, "memory_bound", times, 0.0, 0.0, casts_s, float(backward.memory_s), op=op)
    elif forward.seconds or backward.seconds:
        kind = "attention" if forward.attention_s else "memory_bound"
        seconds = float(forward.attention_s + forward.memory_s), float(backward.attention_s + backward.memory_s)
        back = float(sum(one.bytes for one in compute.backward(op, timing.rates, part.sizes)))
        kernels = float(done.kernels)
        yield KernelTime(name, compute.move_pass.__name__, kind, times, *work, *seconds, back, kernels, op)


def table(estimate: Estimate) -> Table:
    """All ops, largest first."""
    rows = sorted(op_times(estimate), key=lambda row: -row.step_s)
    forward, backward = column([r.forward_s for r in rows], 1e-6), column([r.backward_s for r in rows], 1e-6)
    step = column([r.step_s for r in rows], 1e-3, 4)
    cells = []
    for r, *times in zip(rows, forward, backward, step, strict=True):
        priced_by = r.priced_by.removesuffix("_pass").removeprefix("parameter_")
        work = [number(r.forward_flops / 1e9), number(r.forward_bytes / 2.0**20)]
        cells.append([r.name, priced_by, whole(r.times), *work, *times, percent(r.step_s / estimate.step_s)])
    notes = [
        f"stage {estimate.timing.busiest}, the busiest; GFLOP and MiB are forward's, forward and backward us of one call",
        "time from gemm_pass, attention_pass, move_pass and parameter_gradients, shown under formulas",
        "a projection's backward is dgrad and wgrad; recomputation is a separate part of the step",
    ]
    header = ["", "priced by", "calls", "GFLOP", "MiB", "forward", "backward", "ms", "share"]
    return Table("kernels", header, cells, notes, left=2)


def formulas(estimate: Estimate) -> Table:
    """Docstrings of the pricing functions: formula and source."""
    functions = [
        (compute.gemm_pass, True),
        (compute.shape_efficiency, True),
        (compute.depth_overhead, estimate.job.software.recipe is not None),
        (compute.gemm_backward, True),
        (compute.parameter_gradients, True),
        (compute.attention_pass, True),
        (compute.move_pass, True),
        (comm.collective, bool(estimate.collectives)),
        (comm.route, bool(estimate.collectives)),
        (overlap.hidden_s, bool(estimate.collectives)),
        (overlap.in_pieces_s, bool(estimate.collectives)),
        (walk, estimate.pipeline.stages > 1),
        (data_parallel.data_parallel, estimate.timing.dp is not None),
        (fsdp.group_seconds, estimate.timing.fsdp is not None),
        (optimizer.update_s, True),
        (straggler_s, True),
        (overhead.overhead, True),
        (overhead.reserved_bytes, True),
    ]
    rows = [[f"{_place(function)}: {said(function)}"] for function, used in functions if used]
    return Table("formulas", [], rows)


def _place(function: object) -> str:
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    return f"{module.removeprefix('steptime.')}.{name}"


def said(function: object) -> str:
    """A function's docstring on one line, without its sections and examples."""
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    return " ".join(" ".join(text.split()) for text in paragraphs if not text.startswith(("Args:", "Raises:", ">>>")))
