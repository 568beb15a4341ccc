"""Seconds of one direction of a part, by kind of work."""

from dataclasses import dataclass, field
from typing import NamedTuple

from steptime.base.num import Num
from steptime.base.records import ByFields
from steptime.cost import compute
from steptime.cost.comm import CommCost
from steptime.cost.compute import Pass
from steptime.model.ops import Axis, Gemm, Op
from steptime.model.scans import Chunked


class CommCall(NamedTuple):
    """One collective of a part, or `count` equal ones; `bytes` and `cost` are of one, `hidden_s` of all."""

    name: str
    kind: str
    bytes: Num
    cost: CommCost
    hidden_s: Num
    axis: Axis = "tp"
    count: Num = 1.0

    @property
    def exposed_s(self) -> Num:
        """Exposed seconds of all of them."""
        return self.cost.time_s * self.count - self.hidden_s


@dataclass(eq=False, repr=False)
class Work(ByFields):
    """Seconds of one direction of a part, by kind of work, and its collectives."""

    gemm_s: Num = 0.0
    attention_s: Num = 0.0
    memory_s: Num = 0.0
    launch_s: Num = 0.0
    """Seconds that the device waits for the host, or runs kernels too small to be listed."""
    host_s: Num = 0.0
    """Part of it in which the device waits for a host that launches kernels more slowly than the device runs them."""
    kernels: float = 0.0
    """Kernels launched, collectives included."""
    nodes_s: Num = 0.0
    """Seconds that the host takes to run the nodes of a traced graph."""
    flops: Num = 0.0
    weight_s: Num = 0.0
    """Part of it that computes gradients of weights: projections only; a norm's come from the kernel of its input's gradient."""
    calls: list[CommCall] = field(default_factory=list)

    @property
    def comm_s(self) -> Num:
        """Exposed communication."""
        return compute.total([call.exposed_s for call in self.calls]) if self.calls else 0.0

    @property
    def seconds(self) -> Num:
        """Compute, gaps and exposed communication together."""
        return self.gemm_s + self.attention_s + self.memory_s + self.launch_s + self.comm_s

    def add(self, op: Op, done: Pass) -> None:
        """Add one kernel to its kind. Products and softmax of unfused attention, and linear attention, count as attention."""
        if op.role == "core_attn" or isinstance(op, Chunked):
            self.attention_s += done.time_s
        elif isinstance(op, Gemm):
            self.gemm_s += done.time_s
        else:
            self.memory_s += done.time_s
        self.flops += done.flops
        self.kernels += done.kernels
