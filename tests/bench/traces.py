"""Traces of a GPU, written by hand: kernels, what the host does, collectives; and jobs that they could be of."""

from __future__ import annotations

import yaml

from steptime import Job

CONFIG = {
    "model": {"n_layers": 2, "hidden_sz": 128, "inter_sz": 512, "n_q_heads": 8, "vocab_sz": 512},
    "parallelism": {"tp": 1, "pp": 1, "dp": 1},
    "performance": {"software": "torch", "precision": "fp32"},
    "data": {"gbs": 32, "seqlen": 64, "microbatch_sz": 4},
    "hardware": "dgx-a100-40",
}


def job_of(**layout):
    """A job of another layout; the trace does not care what it computes."""
    config = CONFIG | {"parallelism": CONFIG["parallelism"] | layout}
    return Job.load(yaml.safe_dump(config))


# Names as cuBLAS, FlashAttention-2, PyTorch and NCCL give them on Hopper.
GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas"
NVJET = "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT"
FLASH = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, cutlass::bfloat16_t> >(Flash_fwd_params)"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16> >(int)"
FOREACH = "void at::native::<unnamed>::multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor<float> >()"
COPY = "void at::native::<unnamed>::multi_tensor_apply_kernel<TensorListMetadata<2>, Copy<float, c10::BFloat16> >()"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
HOST, DEVICE = 4000, 0


def kernel(name, start, end, stream=7, **args):
    """A kernel, times in microseconds; `args` with underscores for the spaces of Kineto's keys."""
    args = {key.replace("_", " "): value for key, value in args.items()} | {"stream": stream}
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "pid": DEVICE,
        "tid": stream,
        "ts": start,
        "dur": end - start,
        "args": args,
    }


def host(category, name, start, end, tid=1, **args):
    args = {key.replace("_", " "): value for key, value in args.items()}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": HOST,
        "tid": tid,
        "ts": start,
        "dur": end - start,
        "args": args,
    }


def launch(correlation, at):
    return host("cuda_runtime", "cudaLaunchKernel", at, at + 2, correlation=correlation)


def nccl(start, end, group, ranks, elements=1024, name=ALL_REDUCE, collective="allreduce", **args):
    about = {"Collective name": collective, "Process Group Description": group, "Group size": ranks}
    about |= {"In msg nelems": elements, "Out msg nelems": elements, "dtype": "BFloat16"}
    return kernel(name, start, end, 20, **about, **args)


TWO_STREAMS = [
    kernel(GEMM, 0, 100),
    kernel(FLASH, 100, 150),
    kernel(ADD, 150, 200),
    nccl(120, 260, "mesh_dp", 2),  # 80 beside the first stream, 60 alone
    kernel(NVJET, 260, 300),
    kernel(FOREACH, 320, 360),  # 20 of nothing before it
]
