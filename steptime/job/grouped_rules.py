"""Why the grouped products of experts cannot run in a plan's low precision.

NeMo AutoModel (experts torch_mm_mxfp8) asks for MXFP8 with weight gradients in bf16, whichever dispatcher sends the rows.

Sources: pytorch/torchtitan@b5bcd76c torchtitan/components/quantization/mx.py, float8.py and utils.py (swap_token_dispatcher);
pytorch/ao@36027d82 torchao/prototype/moe_training/fp8_grouped_mm.py; torch aten/src/ATen/native/cuda/GroupedBlas.cpp
("torch._scaled_grouped_mm is only supported on CUDA devices with compute capability = [9.0, 10.0]");
NVIDIA-NeMo/Automodel@36044ad3 nemo_automodel/components/moe/mxfp8.py (_resolve_mxfp8_grouped_mm).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.software.profiles import without_release

if TYPE_CHECKING:
    from steptime.model.model import Model
    from steptime.software.performance import Software

_WITH = {"torchtitan", "fsdp2"}


def grouped_refusal(model: Model, software: Software) -> str:
    """What is missing, said after the recipe's name; "" where it can run, or is not asked for."""
    how = software.moe
    if model.moe is None or how.grouped_precision == "none":
        return ""
    mx = how.grouped_precision != "fp8_rowwise"
    multiple, widths = (32 if mx else 16), (model.hidden_sz, model.moe.expert_inter_sz)
    name = without_release(software.name)
    automodel = name == "automodel" and how.grouped_precision == "mxfp8_torchao_wgrad_hp"
    missing = {
        f"of experts is torchtitan's (got software {software.name})": name in _WITH or automodel,
        "needs one grouped GEMM for all experts (got grouped_gemm false)": how.grouped_gemm,
        "needs a device with block scales, of compute capability 10": 10.0 <= software.compute_capability < 11.0
        or not mx,
        "needs a device of compute capability 9 or 10": 9.0 <= software.compute_capability < 11.0 or mx,
        f"needs rows padded by dispatcher alltoall, or flex with hybridep (got {how.dispatcher} with {how.flex_backend})": (
            automodel or how.dispatcher == "alltoall" or (how.dispatcher == "flex" and how.flex_backend == "hybridep")
        ),
        f"needs hidden_sz and expert_inter_sz that are multiples of {multiple} (got {widths[0]} and {widths[1]})": all(
            width % multiple == 0 for width in widths
        ),
    }
    return next((said for said, able in missing.items() if not able), "")
