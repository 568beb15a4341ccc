"""Which kernels a device has: cuDNN's attention is NVIDIA's."""

from steptime.hardware.machine import Accelerator
from steptime.software.settings import KernelSettings


def has_cudnn(device: Accelerator) -> bool:
    """Whether cuDNN runs on a device: its file states NVIDIA's compute capability, or a rate of cuDNN's attention."""
    return device.compute_capability is not None or device.cudnn_forward_efficiency is not None


def kernels_on(kernels: KernelSettings, device: Accelerator) -> KernelSettings:
    """A profile's kernels on a device: its own best attention kernel in place of cuDNN's, where it has none."""
    if has_cudnn(device) or not kernels.attention_kernel.startswith("cudnn"):
        return kernels
    return kernels.replace(attention_kernel="best")
