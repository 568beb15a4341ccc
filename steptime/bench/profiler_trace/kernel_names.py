"""Meaning of names in a profiler's trace: the only place where a name decides a part of the step.

Parts are those of `Estimate.time.parts_s`, and `idle`. The first pattern that is found decides.
"""

from __future__ import annotations

import re
from functools import cache

WORK = ("gemm", "attention", "recompute", "memory_bound", "optimizer")
"""Parts that a device computes. Where several run at once (streams, threads), the first of them gets the time."""
COMM = ("tp_comm", "cp_comm", "ep_comm", "pp_comm", "dp_comm", "embedding_comm", "other_comm")
"""Communication, which gets the time in which no work runs."""

DEVICE_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
"""Categories of device work (libkineto/src/ActivityType.cpp, as is every category that is read)."""

BYTES = {
    # c10::toString(ScalarType), c10/core/ScalarType.h: how record_param_comms writes "dtype"
    name: size
    for size, names in {
        1: ("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2"),
        2: ("Half", "BFloat16"),
        4: ("Float", "Int"),
        8: ("Double", "Long"),
    }.items()
    for name in names
}

TRANSFERS = re.compile(r"(?:gloo|mpi):(\w+)")
"""Collectives of the host's own: ProcessGroupGloo.cpp names its works "gloo:all_reduce", ProcessGroupMPI.cpp "mpi:all_reduce"."""

_NO_DATA = (
    "alias|as_strided|chunk|contiguous|detach|detach_|empty|empty_like|empty_strided|expand|expand_as|flatten|lift_fresh"
    "|matmul|narrow|new_empty|permute|reshape|resize_|resolve_conj|resolve_neg|result_type|select|set_|slice|split"
    "|split_with_sizes|squeeze|t|to|transpose|unbind|unflatten|unsqueeze|view|view_as|_reshape_alias|_unsafe_view"
)

_OPS = (
    # torch/optim/optimizer.py, profile_hook_step: "Optimizer.step#AdamW.step", "Optimizer.zero_grad#AdamW.zero_grad"
    (r"Optimizer\.", "optimizer"),
    # torch/nn/utils/clip_grad.py; torch/amp/grad_scaler.py; aten's fused optimizers
    (r"aten::(_foreach_norm|_foreach_mul_|linalg_vector_norm|_amp_|_fused_(adam|sgd|adagrad))", "optimizer"),
    # aten/src/ATen/native/transformers/attention.cpp, and the backward of each back end
    (r"aten::_?scaled_dot_product|aten::_(flash|efficient|cudnn)_attention|ScaledDotProduct\w*Backward", "attention"),
    # autograd functions of flash-attn and TransformerEngine
    (r"_?(FlashAttn|FusedAttn|FlashAttention|UnfusedDotProduct)|flash_attn", "attention"),
    # batched products: the scores and the weighted sum of unfused attention; linear layers fold their batch into mm, addmm
    (r"aten::(bmm|baddbmm)", "attention"),
    # native_functions.yaml: products of linear layers, low precision and grouped ones among them
    (r"aten::(linear|_?addmm|_?mm|addmv|mv|mkldnn_linear|_scaled_mm|_grouped_mm|_scaled_grouped_mm)", "gemm"),
    # autograd functions of Megatron-LM (tensor_parallel/layers.py) and TransformerEngine (pytorch/module)
    (r"LinearWithGradAccumulation|_(LayerNorm)?(Linear|MLP)(Backward)?$", "gemm"),
    # torch/distributed/_functional_collectives.py: blocks until the collective is done
    (r"_c10d_functional::wait_tensor", "wait"),
    # torch/utils/data/dataloader.py: "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    (r"enumerate\(DataLoader\)", "wait"),
    # CUDA runtime and driver, HIP: calls that wait for the device
    (r"(cuda|hip|cu)(Stream|Device|Event|Ctx)Synchronize", "wait"),
    # torch/csrc/distributed/c10d/Ops.cpp, ParamCommsUtils.hpp: the host hands a collective over
    (r"(_?c10d\w*|symm_mem)::|record_param_comms", "launch"),
    # torch/csrc/autograd/engine.cpp; accumulate_grad.h
    (r"autograd::engine::|torch::autograd::", "launch"),
    # views and allocations: no data is touched (native_functions.yaml, tagged as views; TensorFactories.cpp)
    (rf"(aten::)?({_NO_DATA})$", "launch"),
)
"""Operators and ranges of the host (cpu_op, user_annotation, cuda_runtime)."""

_KERNELS = (
    # inductor's pointwise, reduction and foreach kernels carry the names of their neighbors (torch/_inductor/codegen/triton.py)
    (r"^triton_(poi|red|per|for|spl)_", "memory_bound"),
    # flash-attn 2 and 3 (flash_fwd_kernel, FlashAttnFwdSm90), xFormers' fmha_cutlassF, cuDNN's
    # cudnn_generated_fort_native_sdpa_sm90_flash_fprop, composable kernel's FmhaFwdKernel: before products, whose words they use
    (r"flash|fmha|sdpa|attention", "attention"),
    # FSDP's foreach copies: aten/src/ATen/native/cuda/ForeachBinaryOpList.cu (struct Copy), not an optimizer
    (r"multi_tensor_apply.*\bCopy<", "memory_bound"),
    # aten/src/ATen/native/cuda/MultiTensorApply.cuh and fused_adam_impl.cu; apex's and TransformerEngine's multi_tensor_apply
    (r"multi_tensor_apply|fused_?adam|adam", "optimizer"),
    # inductor's templates (prefixes: torch/_inductor/wrapper_benchmark.py); those of flex attention are above
    (r"^triton_tem_", "gemm"),
    # cuBLAS (ampere_bf16_s16816gemm, sm90_xmma_gemm_bf16bf16, nvjet_hsh_256x128, splitKreduce_kernel), CUTLASS, Tensile's Cijk_
    (r"gemm|nvjet|xmma|cublas|cutlass|gemv|splitk|^Cijk_", "gemm"),
)
"""Kernels whose launching operator does not determine their part."""

_GROUPS = (
    # megatron/core/parallel_state.py, group_desc; torch/distributed/device_mesh.py: "mesh_" + the dimension's name
    (r"embedding", "embedding_comm"),
    (r"expert_(model|tensor)|^mesh_ep$|(^|_)ep($|_)", "ep_comm"),
    (r"data_parallel|(^|_)(dp|fsdp|hsdp|ddp|data|replicate|shard)($|_)", "dp_comm"),
    (r"tensor_model|(^|_)(tp|tensor)($|_)", "tp_comm"),
    (r"context_parallel|(^|_)(cp|context|ulysses)($|_)", "cp_comm"),
    (r"pipeline_model|(^|_)(pp|pipe|pipeline|stage)($|_)", "pp_comm"),
)
"""Process groups by their description."""


def _first(table: tuple[tuple[str, str], ...], name: str, *, whole: bool) -> str:
    """The part of the first pattern that `name` begins with (or holds); "" for none."""
    look = re.search if whole else re.match
    return next((part for pattern, part in table if look(pattern, name, re.IGNORECASE if whole else 0)), "")


@cache
def op_part(name: str) -> str:
    """The part of an operator or range of the host, `launch`, `wait`, or "" for an unknown name."""
    return _first(_OPS, name, whole=False)


@cache
def kernel_part(name: str) -> str:
    """The part of a kernel by its name; everything that is no product, attention or optimizer is memory-bound."""
    return _first(_KERNELS, name, whole=True) or "memory_bound"


@cache
def group_part(name: str) -> str:
    """The communication of a process group; "" where its description does not determine it."""
    return _first(_GROUPS, name, whole=True)
