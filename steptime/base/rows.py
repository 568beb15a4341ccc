"""The contents of an estimate: plain rows, raw SI. `to_dict` is the `--json` document (schema "3dtrn/1")."""

from importlib import import_module
from typing import Any, Literal, NamedTuple

SCHEMA = "3dtrn/1"
Verdict = Literal["fits", "tight", "does_not_fit"]


class Params(NamedTuple):
    """Parameter counts. `per_stage` is before TP and sums to total + tied_copies."""

    total: int
    active: int
    per_stage: list[int]
    tied_copies: int


class Flops(NamedTuple):
    """FLOPs of one step of the whole job."""

    model_per_step: float
    """Causal attention halved (Megatron)."""
    model_per_step_full_attention: float
    """Attention counted in full (PaLM, torchtitan)."""
    hardware_per_step: float
    """Causal halved, flash's fifth backward matmul and recomputation included."""


class StageMemory(NamedTuple):
    """Bytes of one device of a pipeline stage at its peak."""

    stage: int
    params_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    """Saved for backward, all in-flight micro-batches, logits and loss included on the last stage."""
    transient_bytes: float
    """Allocated only at the peak: temporaries, and `buffers_bytes`."""
    allocated_bytes: float
    """torch's max_memory_allocated."""
    reserved_bytes: float
    """Bytes that the caching allocator reserves then."""
    peak_op: str
    buffers_bytes: float = 0.0
    """The part of `transient_bytes` in workspaces and buffers, both permanent ones and those of a micro-batch."""
    persisting_bytes: float = 0.0
    """torch's memory_allocated between two steps."""
    first_peak_bytes: float = 0.0
    """The peak of the first step, before the optimizer's moments exist."""


class StageBuffer(NamedTuple):
    """A workspace or buffer in torch's allocator on a stage, besides states and activations."""

    name: str
    bytes: float
    stays: bool
    """Whether it is allocated between steps."""
    at_peak: bool
    """Whether it is allocated at the peak of a micro-batch."""
    source: str
    """Framework file that allocates it."""
    carried: bool = False
    """Whether it is left from the previous step and so is missing in the first one."""


class Overhead(NamedTuple):
    """Device memory that the allocator does not count."""

    context: float
    communicators: float
    receive_buffers: float
    """Buffers into which other ranks write rows of experts (HybridEP, MinimalAsyncEP)."""


class Fix(NamedTuple):
    """One change that makes the job fit."""

    set: str
    """Arguments to add to `3dtrn PLAN`: `--set key=value`, quoted for a shell; several for one change of layout."""
    peak_reserved_bytes: float
    step_s: float
    step_change: float
    """Relative change of the step time: 0.05 is 5 % slower per token."""
    verdict: Verdict = "fits"
    """The verdict with the change: tight ones are listed where no change makes it fit."""
    most_bytes: float = 0.0
    """The most that the fullest stage then needs, as in the verdict (`Memory.most_bytes`)."""


class Saving(NamedTuple):
    """A setting and what it saves."""

    name: str
    set: str
    """Arguments to add to `3dtrn PLAN`, quoted for a shell."""
    step_s: float
    step_change: float
    """Relative change of the step time: -0.05 is 5 % less."""
    verdict: Verdict
    most_bytes: float
    """The most that the fullest stage then needs (`Memory.most_bytes`)."""
    note: str = ""
    """Why the estimate is not verified, if it is not, and what else changes."""


OPEN_ENDED = 1.5
"""Times the device's memory, or the least that is needed where that is more, above which a p90 of reserved memory is not
shown as a figure: no run can reserve more than the capacity."""


class Memory(NamedTuple):
    """Device memory by stage, compared with the device's capacity."""

    stages: list[StageMemory]
    peak_allocated_bytes: float
    peak_reserved_bytes: float
    peak_reserved_bytes_p10: float
    peak_reserved_bytes_p90: float
    """Memory is between these two in 80 of 100 cases, judging by the errors of measured runs."""
    overhead_bytes: Overhead
    capacity_bytes: float
    verdict: Verdict
    fits: bool
    worst_stage: int
    host_bytes: float = 0.0
    """States in the memory of a node's host."""
    host_capacity_bytes: float | None = None
    """Memory of a node's host, where the machine's file states it."""

    @property
    def host_overflows(self) -> bool:
        """Whether the host has less memory than the states need."""
        return self.host_capacity_bytes is not None and self.host_bytes > self.host_capacity_bytes

    @property
    def least_bytes(self) -> float:
        """Least bytes that the device needs: allocated memory, context and communicators. Above the capacity: does_not_fit."""
        return self.least_of(self.peak_allocated_bytes)

    @property
    def most_bytes(self) -> float:
        """Most bytes that it needs in 9 of 10 cases: the p90 of reserved memory plus the same. Within the capacity: fits."""
        return self.most_of(self.peak_reserved_bytes)

    @property
    def open_ended(self) -> bool:
        """Whether the p90 of reserved memory is so far above capacity and need that no measured run bounds it."""
        return self.most_bytes > OPEN_ENDED * max(self.capacity_bytes, self.least_bytes)

    def least_of(self, allocated_bytes: float) -> float:
        """`least_bytes` of a stage with this allocated memory."""
        return allocated_bytes + sum(self.overhead_bytes)

    def most_of(self, reserved_bytes: float) -> float:
        """`most_bytes` of a stage with this reserved memory; the interval is the same share of every stage's."""
        widest = max(1.0, self.peak_reserved_bytes_p90 / self.peak_reserved_bytes)
        return reserved_bytes * widest + sum(self.overhead_bytes)


class GemmRow(NamedTuple):
    """One projection on one stage in one pass; bytes and seconds are per call."""

    name: str
    stage: int
    pass_: Literal["forward", "dgrad", "wgrad"]
    count_per_step: float
    m: float
    n: float
    k: float
    flops: float
    compute_s: float
    input_bytes: float
    weight_bytes: float
    output_bytes: float
    bandwidth_s: float
    time_s: float


class CollectiveRow(NamedTuple):
    """One kind of collective; `bytes` is the full tensor of one call, `exposed_s` is per step.

    Those of an axis are exposed in the part of its name; Muon's, whatever their axis, in the optimizer's.
    """

    name: str
    kind: str
    axis: str
    ranks: int
    tier: str
    bytes: float
    count_per_step: float
    latency_s: float
    bandwidth_s: float
    time_s: float
    exposed_s: float


class Pipeline(NamedTuple):
    """The pipeline's walk."""

    schedule: str
    stages: int
    microbatches: int
    bubble_s: float
    bubble_fraction: float
    """Idle share of the makespan, mean over stages."""
    in_flight: list[float]
    """Most micro-batches held at once, per stage, in units of the stage's whole set of chunks."""


class Basis(NamedTuple):
    """The evidence for an interval."""

    nearest: list[dict[str, Any]]
    """The nearest measured cells, one run each: id, distance, measured_over_predicted, and differs: its settings that differ."""
    n: int
    """Measured cells nearby: at most one doubling of the hidden size away, or an equivalent distance."""
    extrapolation: list[str]
    """What was not measured, in words."""
    evidence: str = "extrapolated"
    """measured nearby, interpolated, or extrapolated."""


class Time(NamedTuple):
    """Seconds of one step; the parts follow the busiest stage and sum to the step."""

    step_s: float
    parts_s: dict[str, float]
    hidden_s: dict[str, float]
    """Communication overlapped with compute, by part (not in the step)."""
    step_s_p10: float = 0.0
    step_s_p90: float = 0.0
    """The measured step is between these two in 80 of 100 cases. The estimate is one of them where similar runs were all
    slower, or all faster, than estimated."""
    basis: Basis = Basis([], 0, [])


class Throughput(NamedTuple):
    """Rates. MFU counts causal attention halved unless it says full attention."""

    tokens_per_s: float
    tokens_per_s_per_device: float
    model_tflops_per_device: float
    mfu: float
    mfu_full_attention: float
    hfu: float
    peak_flops_used: float
    peak_dtype: str


class WeakScaling(NamedTuple):
    """One row of weak scaling: fixed work per device."""

    dp: int
    devices: int
    gbs: int
    step_s: float
    efficiency: float
    verdict: str = "fits"
    """fits, tight or does_not_fit."""


def frame(rows: Any) -> Any:
    """A pandas DataFrame of rows as mappings, or of columns by name.

    Raises:
        ImportError: pandas is not installed.
    """
    try:
        pandas = import_module("pandas")
    except ModuleNotFoundError:
        raise ImportError("to_frame: needs pandas; pip install pandas") from None
    return pandas.DataFrame(rows)
