"""Rate of torchao's grouped products of experts on a device."""

from collections.abc import Callable

from steptime.hardware.machine import Accelerator
from steptime.software.efficiency import sustained_share
from steptime.software.grouped_precision import SCALED_ON_BLACKWELL, grouped_kernels
from steptime.software.performance import Software


def experts_flops(
    accelerator: Accelerator, software: Software, sustained: Callable[[Accelerator, str], float]
) -> float:
    """Rate of a long product of their operands, in MXFP8 at most the measured share of the peak; 0 in the compute dtype."""
    kernels = grouped_kernels(software.moe.grouped_precision, blackwell=accelerator.microscaling)
    found = kernels and next((rate for rate in kernels.recipe.rates if rate in accelerator.peak_flops), None)
    if not kernels or not found:
        return 0.0
    chip, micro = accelerator.same_chip_as or accelerator.name, kernels.recipe.microscaling
    share = 1.0 if software.timing.measured else sustained_share(chip, "mxfp8" if micro else "fp8")
    most = accelerator.peak_flops[found] * (SCALED_ON_BLACKWELL if micro else 1.0)
    return min(most, sustained(accelerator, found)) * share
