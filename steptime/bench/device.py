"""The device that the benchmark runs on: name, memory, processors, and the data sheet where it is known."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from steptime.hardware.machine import Accelerator, Machine, machine_names, normalize

if TYPE_CHECKING:
    import torch


class BenchDevice(NamedTuple):
    """One device as described by torch or the operating system."""

    kind: str
    """cpu, cuda, mps."""
    name: str
    memory_bytes: float
    """Total memory; for a CPU, the host's."""
    usable_bytes: float
    """Memory available to a program: torch's total for a GPU; the host's free memory, when asked, for a CPU."""
    processors: int
    """Streaming multiprocessors of a GPU; threads that torch uses on a CPU."""
    context_bytes: float = 0.0
    """Memory of a GPU that this process holds outside torch's allocator."""

    @property
    def statistic(self) -> Literal["min_s", "median_s"]:
        """The statistic that counts: the minimum on a CPU, since other processes only add time; the median on a GPU."""
        return "min_s" if self.kind == "cpu" else "median_s"


def describe(device: torch.device) -> BenchDevice:
    """The device that a process is bound to; memory in bytes."""
    import psutil
    import torch

    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        outside = float(total - free - torch.cuda.memory_reserved(device))
        return BenchDevice("cuda", found.name, float(total), float(total), int(found.multi_processor_count), outside)
    host = psutil.virtual_memory()
    return BenchDevice(device.type, cpu_name(), float(host.total), float(host.available), torch.get_num_threads())


def cpu_name() -> str:
    """The processor's name from the system, "cpu" where there is none."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine() or "cpu"


_MAKERS = re.compile(r"^(nvidia|amd|geforce|tesla|instinct|graphics)-")


def known_accelerator(device: BenchDevice) -> Accelerator | None:
    """The included accelerator whose data sheet applies to a GPU, or None.

    Its family is the first word of torch's name that has a number ("NVIDIA H100 80GB HBM3"); of a family the form (PCIe) and then
    the nearest memory decide, and memory more than a tenth off is another part.
    """
    if device.kind != "cuda":
        return None
    words = normalize(device.name).replace("rtx-", "rtx")
    while _MAKERS.match(words):
        words = _MAKERS.sub("", words)
    family = re.match(r"[a-z]*\d+[a-z]?", words)
    shipped = {(found := Machine.load(name).accelerator).name: found for name in machine_names()}
    alike = [a for name, a in shipped.items() if family and re.match(rf"{re.escape(family[0])}(-|$)", name)]
    alike = [a for a in alike if ("pcie" in a.name) == ("pcie" in words)] or alike
    alike = [a for a in alike if "nvl" in a.name or "nvl" not in words]

    def off(accelerator: Accelerator) -> float:
        return abs(accelerator.usable_memory_bytes / device.memory_bytes - 1.0)

    nearest = min(alike, key=off, default=None)
    return nearest if nearest is not None and off(nearest) < 0.1 else None
