"""Model states in the host's memory, updated by its processors: what a plan says of them."""

from steptime.base.config import Config
from steptime.base.core_schemas import Field


class CpuOffload(Config):
    """Megatron-Core's HybridDeviceOptimizer, FSDP's CPU offload, DeepSpeed's ZeRO-Offload."""

    optimizer: float | None = Field(default=None, ge=0, le=1)
    """Share of the parameters that the host updates; it holds their optimizer states (--optimizer-offload-fraction, ratio)."""
    params: bool = False
    """Sharded parameters are in host memory too, and are copied to the device before each all-gather."""
    overlap: bool = False
    """Copies of one tensor overlap the update of another (--overlap-cpu-optimizer-d2h-h2d)."""
    keep_masters: bool = False
    """The device keeps the fp32 masters of these parameters too (Megatron-Core without use_precision_aware_optimizer)."""
    round_robin: bool = False
    """Each rank owns tensors from all over the model, so that all copy gradients at once (DeepSpeed's round_robin_gradients)."""
    threads: int = Field(default=1, ge=1)
    """OMP_NUM_THREADS of each process; torchrun sets 1 where several run on a node (torch/distributed/run.py)."""

    @property
    def share(self) -> float:
        """Share of the parameters that the host updates: as set, else all or none, as with the parameters."""
        return float(self.params) if self.optimizer is None else self.optimizer
