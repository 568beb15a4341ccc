"""The machine file that a benchmark writes: `3dtrn PLAN --set hardware.node_type=machine.yaml` takes it.

Every figure says `measured:` and how, or names the data sheet, or says `assumed`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from steptime.bench.device import BenchDevice, known_accelerator
from steptime.hardware.machine import Accelerator, Machine, normalize

SHEET_ONLY = ("power_w", "microscaling")
"""Fields of a known accelerator that are not measured here and are copied from its file."""


class Figure(NamedTuple):
    """A figure in SI units, with its source."""

    value: float | str
    source: str


class Provenance(NamedTuple):
    """The source that all measured figures of one run share."""

    command: str
    date: str
    device: str
    torch: str

    def measured(self, what: str, spread: float | None = None) -> str:
        """The source of a measured figure; `spread` is a share of the median."""
        tail = "" if spread is None else f", spread {100.0 * spread:.0f} %"
        return f"measured: {what}; {self.command}, {self.date}, {self.device}, torch {self.torch}{tail}"


def machine_document(
    device: BenchDevice,
    figures: Mapping[str, Figure],
    tiers: Sequence[Mapping[str, Figure]],
    devices_per_node: int,
    provenance: Provenance,
) -> dict[str, Any]:
    """The mapping that a machine file holds.

    `figures`: by dotted field of the accelerator ("sustained_flops.bf16", "kernels.gemm_kernel_s"). `tiers`: innermost first, by
    field of `Tier`; empty where no network was measured.
    """
    known = known_accelerator(device)
    name = normalize(device.name.replace("(R)", "").replace("(TM)", "").replace("@", "at"))
    accelerator: dict[str, Any] = {"name": f"measured-{name}"}
    for path, figure in {**_memory(device, provenance), **_data_sheet(known), **figures}.items():
        node = accelerator
        *parents, leaf = path.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = _plain(figure)
    network = [{key: _plain(figure) for key, figure in tier.items()} for tier in tiers] or _assumed_network(known)
    return {
        "name": f"measured-{name}",
        "description": f"{devices_per_node} x {device.name}, {device.processors} "
        + ("threads" if device.kind == "cpu" else "processors"),
        "accelerator": accelerator,
        "devices_per_node": {"value": devices_per_node, "source": provenance.measured("processes on a node")},
        "tiers": network,
        "provenance": provenance.measured("ranks per node of the command"),
    }


def _plain(figure: Figure) -> Any:
    """A single word, or a number with its source; fractions get six digits, more than any clock resolves."""
    if isinstance(figure.value, str):
        return figure.value
    whole = float(figure.value).is_integer()
    return {"value": figure.value if whole else float(f"{figure.value:.6g}"), "source": figure.source}


def _memory(device: BenchDevice, provenance: Provenance) -> dict[str, Figure]:
    usable = "total of torch.cuda.mem_get_info" if device.kind == "cuda" else "memory available on the host"
    figures = {
        "memory_bytes": Figure(device.memory_bytes, provenance.measured("all memory of the device")),
        "usable_memory_bytes": Figure(device.usable_bytes, provenance.measured(usable)),
    }
    if device.kind == "cuda":
        what = "device memory in use outside torch's allocator, all processes"
        figures["context_bytes"] = Figure(device.context_bytes, provenance.measured(what))
        figures["sm_count"] = Figure(device.processors, provenance.measured("torch.cuda.get_device_properties"))
    else:
        figures["context_bytes"] = Figure(0.0, "a host has no device context")
    return figures


def _data_sheet(known: Accelerator | None) -> dict[str, Figure]:
    """Dense peaks and other data-sheet figures of a known accelerator."""
    if known is None:
        return {}
    sheet = {
        f"peak_flops.{dtype}": Figure(value, f"data sheet of {known.name}") for dtype, value in known.peak_flops.items()
    }
    for field in SHEET_ONLY:
        if value := getattr(known, field):
            sheet[field] = Figure(value, f"same as {known.name}")
    return sheet


def _assumed_network(known: Accelerator | None) -> list[dict[str, Any]]:
    """A network that was not measured: that of a shipped machine with the same accelerator, else a placeholder."""
    from steptime.hardware.machine import machine_names

    if known is not None:
        shipped = next(m for name in machine_names() if (m := Machine.load(name)).accelerator.name == known.name)
        fields = ("size", "bytes_per_s", "latency_s", "efficiency")
        source = f"assumed: same as {shipped.name}; no collective was measured"
        known_of = [{field: getattr(tier, field) for field in fields} for tier in shipped.tiers]
        return [
            {"name": tier.name}
            | {
                key: {"value": value, "source": source}
                for key, value in of.items()
                if value not in (None, float("inf"))
            }
            for tier, of in zip(shipped.tiers, known_of, strict=True)
        ]
    source = "assumed: a placeholder, no collective was measured"
    figures = {"bytes_per_s": 1e9, "latency_s": 1e-4}
    return [{"name": "assumed"} | {key: {"value": value, "source": source} for key, value in figures.items()}]


def machine_yaml(document: Mapping[str, Any]) -> str:
    """The text of a machine file."""
    return yaml.safe_dump(dict(document), sort_keys=False, width=120, allow_unicode=True)
