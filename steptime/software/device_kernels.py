"""Which kernels a device has: cuDNN's attention is NVIDIA's."""

from steptime.hardware.machine import Accelerator
from steptime.software.settings import KernelSettings


def has_cudnn(device: Accelerator) -> bool:
    """Whether cuDNN runs on a device: its file states NVIDIA's compute capability, or a rate of cuDNN's attention."""
    return device.compute_capability is not None or device.cudnn_forward_efficiency is not None


def kernels_on(kernels: KernelSettings, device: Accelerator, *, drops: bool = False) -> KernelSettings:
    """A profile's kernels on a device: its own best attention kernel in place of cuDNN's, where it has none.

    `drops`: attention has dropout, which FlashAttention-3 lacks. TransformerEngine then takes the second version where it is to
    take FlashAttention (v2.7 pytorch/attention/dot_product_attention/utils.py, get_attention_backend, "Filter: Dropout").
    """
    own = kernels.attention_kernel == "best" or kernels.attention_kernel.startswith("cudnn")
    if drops and own and kernels.attention_backend == "flash":
        return kernels.replace(attention_kernel="fa2")
    if has_cudnn(device) or not kernels.attention_kernel.startswith("cudnn"):
        return kernels
    return kernels.replace(attention_kernel="best")
