"""Rate of torchao's grouped products of experts on a device."""

from collections.abc import Callable

from steptime.hardware.machine import Accelerator
from steptime.software.efficiency import sustained_share
from steptime.software.grouped_precision import GROUPED, SCALED_ON_BLACKWELL
from steptime.software.performance import Software


def experts_flops(
    accelerator: Accelerator, software: Software, sustained: Callable[[Accelerator, str], float]
) -> float:
    """Rate of a long product of their operands, in MXFP8 at most the measured share of the peak; 0 in the compute dtype."""
    kernels = GROUPED.get(software.moe.grouped_precision)
    if kernels is None:
        return 0.0
    # `job.expert_rules` asks for one of them
    found = next(rate for rate in kernels.recipe.rates if rate in accelerator.peak_flops)
    chip, micro = accelerator.same_chip_as or accelerator.name, kernels.recipe.microscaling
    share = 1.0 if software.timing.measured else sustained_share(chip, "mxfp8" if micro else "fp8")
    most = accelerator.peak_flops[found] * (SCALED_ON_BLACKWELL if micro else 1.0)
    return min(most, sustained(accelerator, found)) * share
