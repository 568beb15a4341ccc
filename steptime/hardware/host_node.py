"""A node's host: the memory that its devices share, and how fast its processors read and write it."""

from steptime.base.config import Config
from steptime.base.core_schemas import Field
from steptime.base.units import Bytes, BytesPerS, Seconds


class Host(Config):
    """The host of one node."""

    memory_bytes: Bytes | None = Field(None, gt=0)
    """Memory of the node's processors, shared by its devices [B]."""
    memory_bytes_per_s: BytesPerS = Field(gt=0)
    """Rate at which all cores of the node stream through it, reads and writes together [B/s]."""
    node_s: Seconds = Field(0.0, ge=0)
    """Time to run a node of a traced graph (`performance.step_graph`), 0 where it was not measured [s]."""
    core_bytes_per_s: BytesPerS = Field(12e9, gt=0)
    """The same of one core [B/s]. 12 GB/s: STREAM triad of one thread on Skylake-SP (anandtech.com/show/11544)."""

    def device_bytes_per_s(self, devices: int, threads: int) -> float:
        """Rate of one device's process among the `devices` of the node, with `threads` threads [B/s].

        >>> Host(memory_bytes_per_s=480e9, core_bytes_per_s=12e9).device_bytes_per_s(8, 2) / 1e9
        24.0
        """
        return min(self.memory_bytes_per_s / devices, threads * self.core_bytes_per_s)
