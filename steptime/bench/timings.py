"""Measurements of the benchmark: plain rows, raw SI. `to_dict` of each goes into results.json (schema "3dtrn-bench/1")."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from steptime.bench.runs.clock import Timing

SCHEMA = "3dtrn-bench/1"
ITEMSIZE = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes of an element."""
Direction = Literal["forward", "dgrad", "wgrad", "backward"]


class GemmTiming(NamedTuple):
    """One matrix product m x k by k x n; a projection of the config, or one of the sweep ("sweep")."""

    name: str
    direction: Direction
    dtype: str
    """fp32, tf32, bf16, fp16, fp8."""
    m: int
    n: int
    k: int
    timing: Timing

    @property
    def flops(self) -> float:
        """FLOPs: 2 m n k."""
        return 2.0 * self.m * self.n * self.k

    @property
    def flops_per_s(self) -> float:
        """Achieved rate, from the median [FLOP/s]."""
        return self.flops / self.timing.median_s


class AttentionTiming(NamedTuple):
    """scaled_dot_product_attention of one back end."""

    backend: str
    """flash, efficient, cudnn, math; "default" is what torch chooses."""
    direction: Direction
    dtype: str
    batch: int
    seqlen: int
    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    causal: bool
    timing: Timing

    @property
    def flops(self) -> float:
        """Matrix products, two forward and five backward, half of the scores where causal (Dao 2023, section 3.1)."""
        products = 2.0 if self.direction == "forward" else 5.0
        share = 0.5 if self.causal else 1.0
        return products * 2.0 * self.batch * self.n_q_heads * self.seqlen**2 * self.head_dim * share

    @property
    def flops_per_s(self) -> float:
        """Achieved rate, from the median [FLOP/s]."""
        return self.flops / self.timing.median_s


class MoveTiming(NamedTuple):
    """A memory-bound piece of work: copy, norm, activation, optimizer."""

    name: str
    direction: Direction
    dtype: str
    bytes: float
    """Bytes read and written, each tensor once per kernel that accesses it."""
    timing: Timing

    @property
    def bytes_per_s(self) -> float:
        """Achieved rate, from the median [B/s]."""
        return self.bytes / self.timing.median_s


class LaunchTiming(NamedTuple):
    """Fixed time of a kernel."""

    name: str
    """gemm, move: a tiny kernel among many queued ones (the device's own time and gap); host: the host's time to launch one."""
    timing: Timing
    """Seconds of one kernel."""


class CollectiveTiming(NamedTuple):
    """One collective over the ranks of a mesh axis; the slowest rank in each repetition counts."""

    kind: str
    """As `steptime.model.ops.Kind`: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, send_recv."""
    axis: str
    ranks: int
    bytes: int
    """The full tensor of one call: output of all-gather, input of reduce-scatter and all-reduce."""
    timing: Timing


def to_dict(row: Any) -> dict[str, Any]:
    """A row as JSON: its fields, the rates it has, its timing's fields in place."""
    fields = dict(row._asdict())
    timing = fields.pop("timing", None)
    for rate in ("flops", "flops_per_s", "bytes_per_s"):
        if hasattr(row, rate):
            fields[rate] = getattr(row, rate)
    return fields if timing is None else fields | timing._asdict() | {"spread": timing.spread}
