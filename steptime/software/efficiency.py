"""Constants fitted on measured training runs: what a whole step reaches of rates that were measured in isolation.

data/efficiency.yaml holds them, written by `python benchmarks/fit_constants.py` from the measured rows marked `fit`, with the
command, the rows and what is left over. What else leans on these rows is a setting of one trainer's profile, and says so in the
profile's sources (data/software: tp_comm_factor, host_kernel_s, move_rate ...), or a constant whose text says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from steptime.base.document import shipped
from steptime.software.profiles import extended

EFFICIENCY_FILE = Path(__file__).parents[1] / "data" / "efficiency.yaml"


class Efficiency(NamedTuple):
    """The constants of the file; with 1.0 every rate is the one measured in isolation, and all profiles' kernels are equal."""

    sustained_share: dict[str, dict[str, float]]
    """Accelerator -> GEMM dtype -> share of `sustained_flops` that the GEMMs of a training step reach."""
    default_share: float
    """That share where no measured run has the accelerator or the dtype."""
    recipe_gap: float
    """Launch gaps of a layer with a low-precision recipe divided by those of the layer in bf16: its casts are kernels too."""
    compute_factor: dict[str, float]
    """Software profile, or profile@release -> factor on the seconds of its kernels and launches."""


NOTHING_FITTED = Efficiency({}, 1.0, 1.0, {})

_override: list[Efficiency] = []


@cache
def _shipped() -> Efficiency:
    document = shipped(EFFICIENCY_FILE)
    return Efficiency(**{name: document[name] for name in Efficiency._fields})


def efficiency() -> Efficiency:
    """The constants in force: the shipped ones, or those of the innermost `using` block."""
    return _override[-1] if _override else _shipped()


@contextmanager
def using(constants: Efficiency) -> Iterator[None]:
    """Run a block with other constants, for a fit or an ablation."""
    _override.append(constants)
    try:
        yield
    finally:
        _override.pop()


def share_family(precision: str) -> str:
    """Precisions whose GEMMs share one constant: bf16 and fp16; the fp8 recipes scaled per tensor or by 128."""
    families = {"fp16": "bf16", "mxfp8_torchao": "mxfp8", "nvfp4_torchao": "nvfp4"}
    return families.get(precision, "fp8" if precision.startswith("fp8") else precision)


def sustained_share(accelerator: str, precision: str) -> float:
    """Share of the isolated GEMM rate that a training step reaches on an accelerator."""
    return efficiency().sustained_share.get(accelerator, {}).get(share_family(precision), efficiency().default_share)


def compute_factor(software: str) -> float:
    """Factor on the seconds of a profile's kernels.

    A release that is not listed takes its profile's, a profile that of the same trainer with FSDP, or of what it extends.
    """
    known = efficiency().compute_factor
    name = software.partition("@")[0]
    if name not in known and name.endswith("-ddp"):
        return compute_factor(software.replace("-ddp", ""))
    return known.get(software) or known.get(name) or (known.get(extended(name), 1.0) if known else 1.0)
