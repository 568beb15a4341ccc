"""Host time to launch a kernel: eager Python, compiled code, DTensors, CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence

from steptime.base.num import Num, maximum, where
from steptime.cost.compute import Pass
from steptime.cost.nodes import NO_NODES, Nodes, run_by_host
from steptime.cost.work import Work
from steptime.model.graphs import captured
from steptime.model.ops import Op
from steptime.software.performance import EAGER_TORCH, Software

COMPILED_HOST = 0.47
"""Host time of a launch from compiled code divided by that of eager torch: 18.9 against 40.3 ms for the forward of a Llama 8B at
128 tokens (huggingface/accelerate@16cb6eb8 benchmarks/torch.compile)."""
DTENSOR_HOST = 2.5
"""Host time of an eager launch on DTensors divided by that of eager torch (assumed): the smallest operation takes 24 to 133 us by
release against 4.8 us (pytorch/pytorch pull requests 160580, 166371). 5 would make steps of Llama-3 8B under TP2 host-bound that
were not (torchtitan, rows marked fit)."""


def launch_host_s(software: Software, tp: Num) -> Num:
    """Seconds of host time per launch: 0 where CUDA graphs launch everything, less when compiled, more on DTensors."""
    each = software.timing.host_kernel_s
    if software.timing.cuda_graphs is True:
        return 0.0
    if software.kernels.compile != "none":
        return each * COMPILED_HOST
    return each * where(tp > 1, DTENSOR_HOST, 1.0) if software.family in EAGER_TORCH else each


def graphed_kernels(
    ops: list[Op], passes: Sequence[tuple[Pass, ...]], software: Software, which: Sequence[int] | None = None
) -> float:
    """Kernels launched by graphs that cover some modules, of all ops or of some; where graphs cover all, host time is 0."""
    if isinstance(software.timing.cuda_graphs, bool):
        return 0.0
    inside = captured(ops, software.timing.cuda_graphs)
    chosen = range(len(ops)) if which is None else which
    return sum(sum(done.kernels for done in passes[i]) for i in chosen if i in inside)


def wait_for_host(work: Work, software: Software, tp: Num = 1, nodes: Nodes = NO_NODES) -> None:
    """Add what the device waits for the host, which launches kernels, or runs `nodes` of a traced graph.

    Launches run ahead of the device, so it waits only where all of the kernels are shorter than all of the launches; with
    blocking launches the two take turns.
    """
    timing = software.timing
    if run_by_host(timing):
        work.nodes_s = nodes.time_s(timing)
    elif not timing.host_kernel_s:
        return
    host_s = work.nodes_s if run_by_host(timing) else work.kernels * launch_host_s(software, tp)
    late_s = host_s if timing.blocking_launches else maximum(0.0, host_s - work.seconds)
    work.host_s = work.host_s + late_s
    work.launch_s = work.launch_s + late_s
