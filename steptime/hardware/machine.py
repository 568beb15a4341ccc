"""Machines: an accelerator and the network tiers around it.

Shipped: data/machines/NAME.yaml and data/accelerators/NAME.yaml, each figure with its source. A user's is one file, by path.
"""

from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import pairwise
from math import inf
from os.path import isdir, isfile
from pathlib import Path
from typing import Any, Self

from steptime.base.config import Config, ConfigError, ConfigProblem, build, near, show
from steptime.base.core_schemas import Field, model_validator
from steptime.base.defaults import no_entries, no_items
from steptime.base.document import parse_mapping, read_source, shipped, shipped_names
from steptime.base.units import BYTE_UNITS, FLOP_UNITS, Bytes, BytesPerS, FlopPerS, Seconds, read_quantity
from steptime.hardware.host_node import Host
from steptime.hardware.machine_tree import ACCELERATORS, accelerator_names, implausible, plain_tree, put_figure

_MACHINES = Path(__file__).parents[1] / "data" / "machines"


class Tier(Config):
    """One network level: `size` devices reach each other at `bytes_per_s`. Tiers are listed innermost first."""

    name: str
    size: float = Field(inf, gt=0)
    """Devices in one domain of this tier; inf for the outermost tier."""
    bytes_per_s: BytesPerS = Field(gt=0)
    """Wire rate per device in one direction [B/s]."""
    latency_s: Seconds = Field(ge=0)
    """Latency of one hop [s]."""
    efficiency: float = Field(0.8, gt=0, le=1)  # share of the wire rate that a large ring collective reaches
    pairwise_efficiency: float | None = Field(default=None, gt=0, le=1)
    """Share of the wire rate that an all-to-all reaches; else `efficiency` by `steptime.cost.comm.PAIRWISE_RATE`."""
    exchange_efficiency: float | None = Field(default=None, gt=0, le=1)  # of DeepEP and HybridEP; else `efficiency`
    nics_per_node: float | None = Field(None, gt=0)
    link_bytes_per_s: BytesPerS | None = Field(None, gt=0)
    """Meshes without a switch (xGMI, V100's cube mesh): the rate between two peers; n devices have n-1 links each."""
    in_network_reduction: bool = False  # whether the switch reduces (NVLink SHARP, SHARP): only all-reduce gains
    in_network_efficiency: float | None = Field(None, gt=0, le=1)  # of an all-reduce in the switch; else `efficiency`
    hierarchical: bool = False
    """Whether collectives over this tier may first reduce or gather inside the tier below, in a separate phase."""

    def __hash__(self) -> int:  # of a few fields, since tiers are keys of caches that every collective asks
        return hash((self.name, self.size, self.bytes_per_s))


class Kernels(Config):
    """Fixed times of kernels, measured on a device with eager torch, which has its own constants.

    They replace a profile's figures for eager torch (`torch`, `fsdp2`), and no factor fitted on published runs applies.
    """

    gemm_kernel_s: Seconds = Field(ge=0)
    move_kernel_s: Seconds = Field(ge=0)
    layer_gap_s: Seconds = Field(0.0, ge=0)
    host_kernel_s: Seconds = Field(0.0, ge=0)


class Accelerator(Config):
    """One device: dense peaks, sustained rates of long GEMMs, and memory."""

    name: str
    peak_flops: dict[str, FlopPerS] = Field(min_length=1)
    """Dense peak by dtype [FLOP/s]; never a sparse one."""
    sustained_flops: dict[str, FlopPerS] = Field(default_factory=no_entries)
    torch_gemm_share: float = Field(1.0, gt=0, le=1)
    """Median rate of GEMMs of at least 512 GFLOP by dtype, clocks and power settled [FLOP/s]; torch's share of it."""
    best_flops: dict[str, FlopPerS] = Field(default_factory=no_entries)
    """Best momentary rate of any GEMM shape by dtype [FLOP/s] (MAMF); used only for a device without sustained rates."""
    same_chip_as: str = ""
    """The accelerator with the same processor: constants fitted on runs of that one apply."""
    memory_bytes: Bytes = Field(gt=0)
    usable_memory_bytes: Bytes = Field(gt=0)
    """Memory available to a program before any context is created [B]."""
    memory_bytes_per_s: BytesPerS = Field(gt=0)
    memory_efficiency: float = Field(0.85, gt=0, le=1)
    """Share of memory_bytes_per_s that streaming kernels reach."""
    attention_forward_efficiency: float = Field(0.5, gt=0, le=1)
    """Flash attention: share of the dense peak, counting only the causal half."""
    cudnn_forward_efficiency: float | None = Field(None, gt=0, le=1)
    cudnn_backward_efficiency: float | None = Field(None, gt=0, le=1)
    fa2_forward_efficiency: float | None = Field(None, gt=0, le=1)
    """FlashAttention-2, which torch's scaled_dot_product_attention runs, and cuDNN 9.19: where a device has another kernel."""
    fa2_backward_efficiency: float | None = Field(None, gt=0, le=1)
    attention_backward_efficiency: float = Field(0.4, gt=0, le=1)
    attention_ramp_tokens: float = Field(450.0, ge=0)
    """Over s keys it runs at s / (s + this) of its asymptote, as blocks crossed by the mask are computed in full. 450 fits
    version 2 on A100 and 3 on H100 (causal, head size 128; Dao-AILab/flash-attention README; arXiv 2407.08608 figure 5)."""
    gemm_overhead_k: float | None = Field(None, ge=0)
    """A GEMM of depth k runs at k / (k + this) of its asymptote; the cost model's default where not set."""
    host_bytes_per_s: BytesPerS | None = Field(None, gt=0)
    """Copy rate between device and host memory, in one direction [B/s]."""
    context_bytes: Bytes | None = Field(None, ge=0)
    """Memory of a process outside the allocator (CUDA context, kernels); the model's default where not set."""
    kernels: Kernels | None = None
    microscaling: bool = False
    """Whether tensor cores apply block scales (MXFP8, NVFP4) and take fp8 operands in any layout."""
    compute_capability: float | None = Field(None, ge=1)
    """NVIDIA's compute capability, which decides kernels and workspaces: 8.0 is A100, 9.0 is H100."""
    sm_count: int | None = Field(None, ge=1)
    """Multiprocessors (NVIDIA), compute units (AMD), Xe cores (Intel), among which a GEMM's output tiles are divided."""
    power_w: float | None = None
    inferred: bool = False
    """Whether its use is inferred from step times only, not stated by a source. Intervals are wider then."""
    note: str = ""


class Machine(Config):
    """A node type and its network."""

    name: str
    aliases: list[str] = Field(default_factory=no_items)
    description: str = ""
    accelerator: Accelerator
    devices_per_node: int = Field(ge=1)
    tiers: list[Tier] = Field(min_length=1)
    host: Host | None = None
    host_factor: float = Field(1.0, gt=0)
    """Launch time of a kernel on its hosts divided by the software profile's: depends on cores and on process binding."""
    price_per_device_hour: float | None = None  # US dollars
    measured: bool = False
    """Whether published training runs on this machine are part of the validation."""
    note: str = ""
    provenance: dict[str, str] = Field(default_factory=no_entries)
    """Dotted path of a figure -> its source; "" -> the source of figures without one."""

    @model_validator(mode="after")
    def _tiers_grow(self) -> Self:
        sizes = [tier.size for tier in self.tiers]
        if any(inner >= outer for inner, outer in pairwise(sizes)):
            raise ValueError(f"tier sizes {sizes} must increase, innermost first")
        return self

    def figures(self) -> Iterator[tuple[str, str, float]]:
        """For each figure with a unit: its kind, dotted path, and value."""
        for i, tier in enumerate(self.tiers):
            yield "tier.bytes_per_s", f"tiers.{i}.bytes_per_s", tier.bytes_per_s
            yield "tier.latency_s", f"tiers.{i}.latency_s", tier.latency_s
        device = self.accelerator
        for key in ("memory_bytes", "usable_memory_bytes", "memory_bytes_per_s"):
            yield key, f"accelerator.{key}", getattr(device, key)
        for key in ("peak_flops", "sustained_flops"):
            for dtype, value in getattr(device, key).items():
                yield key, f"accelerator.{key}.{dtype}", value

    @staticmethod
    def load(name_or_path: str, overrides: dict[str, object] | None = None) -> "Machine":
        """A machine by name, alias or path of a YAML file, with figures replaced by dotted key.

        >>> Machine.load("h100", {"tiers.1.bytes_per_s": "25 GB/s"}).tiers[1].bytes_per_s
        25000000000.0

        Raises:
            ConfigError: (a ValueError) one line per problem: unknown name with near matches, unreadable file, bad key or value.
        """
        path = _find(name_or_path)
        return _load(path) if not overrides else _plausible(_build(path, overrides))

    def source(self, path: str) -> str:
        """The source of the figure at a dotted path ("tiers.1.bytes_per_s"), or of its parent; "" if the file has none."""
        while path not in self.provenance and path:
            path = path.rpartition(".")[0]
        return self.provenance.get(path, "")


Machine.wording = Config.wording._replace(missing={"": "; give it (3dtrn show dgx-h100 prints a whole file)"})


def machine_names() -> list[str]:
    """The names of the shipped machines, sorted."""
    return list(_names())


@cache
def _names() -> tuple[str, ...]:
    return tuple(shipped_names(_MACHINES))


def shipped_name(name: str) -> str:
    """The name behind an alias of a shipped machine; a path or a name is returned unchanged."""
    path = _find(name)
    return path.stem if path.parent == _MACHINES else name


def normalize(name: str) -> str:
    """Normal form for comparing names: lower case, with "-" for blanks and underscores."""
    return "-".join(name.lower().replace("_", " ").split())


def is_shipped(name: str) -> bool:
    """Whether a machine of this name or alias is shipped, so that no user file is read for it."""
    return normalize(name) in {*_names(), *_aliases()}


def _find(name: str) -> Path:
    """The file of a machine: shipped under this name, under this alias, or a user's own."""
    key = normalize(name)
    if key in _names():
        return _MACHINES / f"{key}.yaml"
    if key in _aliases():
        return _MACHINES / f"{_aliases()[key]}.yaml"
    if Path(name).suffix in {".yaml", ".yml", ".json"} or isfile(name):  # noqa: PTH113  not an error for a long name
        return Path(name)
    from difflib import get_close_matches

    close = get_close_matches(key, [*_names(), *_aliases()], n=4, cutoff=0.6)
    hint = f"did you mean {' or '.join(close)}? " if close else "it is a directory; " if isdir(name) else ""  # noqa: PTH112
    raise ConfigError(f"unknown machine {show(name)}; {hint}3dtrn machines lists them")


@cache
def _aliases() -> dict[str, str]:
    return dict(shipped(_MACHINES.with_name("machine_aliases.yaml")))


def _read(path: Path) -> dict[str, Any]:
    """The mapping in a machine file; a user's file is read with all checks."""
    return dict(shipped(path)) if path.parent == _MACHINES else parse_mapping(*read_source(path))


@lru_cache(maxsize=256)
def _load(path: Path) -> Machine:
    return _plausible(_build(path, {}))


def _plausible(machine: Machine) -> Machine:
    """A machine from a file, rejected if figures lack their unit; one made in Python is in SI and not checked."""
    if lines := implausible(machine.figures()):
        raise ConfigError(ConfigProblem(line, where) for where, line in lines)
    return machine


def _build(path: Path, overrides: dict[str, object]) -> Machine:
    provenance: dict[str, str] = {}
    plain = plain_tree(_read(path), "", provenance)
    if "accelerator" in overrides:
        plain["accelerator"] = overrides["accelerator"]
    if isinstance(plain.get("accelerator"), str):
        plain["accelerator"] = _accelerator(plain["accelerator"], provenance)
    device = plain.get("accelerator")
    memory, peaks = (device.get(key) if isinstance(device, dict) else None for key in ("memory_bytes", "peak_flops"))
    peaks = dict(peaks) if isinstance(peaks, dict) else {}
    for key, value in overrides.items():
        if key != "accelerator":
            put_figure(plain, key, value)
        provenance[key] = "override"
    if "accelerator.memory_bytes" in overrides and "accelerator.usable_memory_bytes" not in overrides:
        provenance["accelerator.usable_memory_bytes"] = "override of memory_bytes, in proportion"
        return _same_share(build(Machine, {"name": path.stem, **plain, "provenance": provenance}), memory)
    dtypes = [d for d in peaks if f"accelerator.peak_flops.{d}" in overrides]
    dtypes = [d for d in dtypes if f"accelerator.sustained_flops.{d}" not in overrides]
    for dtype in dtypes:
        provenance[f"accelerator.sustained_flops.{dtype}"] = "override of peak_flops, in proportion"
    machine = build(Machine, {"name": path.stem, **plain, "provenance": provenance})
    return _same_rates(machine, {dtype: peaks[dtype] for dtype in dtypes}) if dtypes else machine


def _same_rates(machine: Machine, peaks: dict[str, Any]) -> Machine:
    """`machine` with new peaks, sustaining the same share of them as of the old `peaks`."""
    device = machine.accelerator
    sustained = dict(device.sustained_flops)
    for dtype, peak in peaks.items():
        before = _figure(peak, FLOP_UNITS)
        if dtype in sustained and before > 0:
            sustained[dtype] *= device.peak_flops[dtype] / before
    return machine.model_copy(update={"accelerator": device.model_copy(update={"sustained_flops": sustained})})


def _same_share(machine: Machine, memory: Any) -> Machine:
    """`machine` with new memory, of which the same share is usable as of the old `memory`."""
    before = _figure(memory, BYTE_UNITS)
    if before <= 0:
        return machine
    device = machine.accelerator
    usable = device.usable_memory_bytes * device.memory_bytes / before
    return machine.model_copy(update={"accelerator": device.model_copy(update={"usable_memory_bytes": usable})})


def _figure(said: Any, units: dict[str, float]) -> float:
    """The figure that an override replaces; 0 where there is none, which is not checked."""
    try:
        value = read_quantity(said, units, "")
    except ValueError:
        return 0.0
    return value if isinstance(value, int | float) else 0.0


def _accelerator(name: str, provenance: dict[str, str]) -> dict[str, Any]:
    key, known = normalize(name), accelerator_names()
    if key not in known and key in _aliases():
        key = shipped(_MACHINES / f"{_aliases()[key]}.yaml")["accelerator"]
    if key not in known:
        line = f"accelerator: unknown accelerator {name!r}{near(name, known)} (or write its figures inline)"
        raise ConfigError(ConfigProblem(line, "accelerator"))
    return dict(plain_tree(shipped(ACCELERATORS / f"{key}.yaml"), "accelerator", provenance))
