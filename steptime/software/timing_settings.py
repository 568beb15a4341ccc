"""The switches of a software profile that decide what launches kernels, and fixed times of kernels and launches."""

from typing import Literal, Self, TypeAlias

from steptime.base.records import Switches
from steptime.base.units import Seconds

GraphModule: TypeAlias = Literal["attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"]
"""Megatron-Core's names (megatron/core/transformer/enums.py, CudaGraphScope)."""
Graphs: TypeAlias = bool | tuple[GraphModule, ...]
"""Whether CUDA graphs launch the kernels of a step, or the modules of a layer for which they do (`model.graphs`)."""
StepGraph: TypeAlias = Literal["none", "traced", "simplified"]
"""Whether the host runs one traced graph of forward, loss and backward node by node (torchtitan's GraphTrainer, `cost.nodes`): as
traced, or after the passes that remove nodes without effect. CUDA graphs take its place where they launch the kernels."""


class TimingSettings(Switches):
    """Fixed times of kernels and launches."""

    gemm_kernel_s: Seconds
    """Fixed time of one GEMM kernel: launch, prologue, drain [s]."""
    move_kernel_s: Seconds
    """Fixed time of one memory-bound kernel [s]."""
    layer_gap_s: Seconds
    """Gaps between kernels of a layer, both passes of one micro-batch: late launches, and kernels too small to be listed [s]."""
    move_rate: float
    """Rate of memory-bound kernels / that of a long copy."""
    host_kernel_s: Seconds
    """Time of the host to launch a kernel: Python, autograd, driver [s]. A block whose kernels are shorter is host-bound."""
    step_host_s: Seconds
    """Time of the host in a step outside its micro-batches, while the device waits [s]."""
    blocking_launches: bool
    """The host waits for every kernel (CUDA_LAUNCH_BLOCKING=1), so that its own time adds to the device's."""
    cuda_graphs: Graphs
    """Kernels of a step, or of some modules of a layer, are launched from CUDA graphs, which shrinks the gaps."""
    compute_factor: float
    """Factor on the modeled time of kernels and launches, by framework and release."""
    step_graph: StepGraph = "none"
    node_s: Seconds = 0.0
    """Time of the machine's host for a node of `step_graph`, 0 where it was not measured; set by `Software.on` [s]."""
    measured: bool = False
    """Whether the kernel times were measured on the device, not taken from the profile; set by `Software.on`."""

    def on_host(self, factor: float, node_s: float) -> Self:
        """The same on hosts whose launches take `factor` times as long, and that run a node of a graph in `node_s`."""
        kernel_s, step_s = self.host_kernel_s * factor, self.step_host_s * factor
        return self.replace(host_kernel_s=kernel_s, step_host_s=step_s, node_s=node_s)


OF_MACHINE = frozenset({"measured", "node_s"})
"""What a machine sets, not a profile or a plan."""
