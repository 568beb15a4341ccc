"""What a kernel, an operator and a group are, by name; how their time is shared out."""

from __future__ import annotations

import pytest
from bench.traces import (
    ADD,
    COPY,
    FLASH,
    FOREACH,
    GEMM,
    NVJET,
)
from hypothesis import given
from hypothesis import strategies as st

from steptime.bench.profiler_trace import kernel_names
from steptime.bench.profiler_trace.events import HostOp
from steptime.bench.profiler_trace.intervals import ORDER, PartInterval, own_time, share_out
from steptime.bench.profiler_trace.kernel_names import COMM, WORK, group_part, kernel_part, op_part

# --- names -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "part"),
    [
        (GEMM, "gemm"),
        (NVJET, "gemm"),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x3_tn", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>(Params)", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasSplitKParams<float>)", "gemm"),
        (FLASH, "attention"),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<> > >(Params)", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention)", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x", "attention"),
        (FOREACH, "optimizer"),
        (COPY, "memory_bound"),
        (ADD, "memory_bound"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float>(float*)", "memory_bound"),
        ("triton_red_fused_native_layer_norm_7", "memory_bound"),
        ("triton_poi_fused__scaled_dot_product_cudnn_attention_3", "memory_bound"),
        ("triton_tem_fused_mm_2", "gemm"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("Memcpy HtoD (Pinned -> Device)", "memory_bound"),
    ],
)
def test_kernels_by_name(name, part):
    assert kernel_part(name) == part


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("aten::mm", "gemm"),
        ("aten::addmm", "gemm"),
        ("aten::linear", "gemm"),
        ("aten::bmm", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::_flash_attention_backward", "attention"),
        ("FlashAttnFuncBackward", "attention"),
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("aten::_foreach_norm", "optimizer"),
        ("torch::autograd::AccumulateGrad", "launch"),
        ("AddmmBackward0", ""),
        ("aten::view", "launch"),
        ("aten::transpose", "launch"),
        ("c10d::allreduce_", "launch"),
        ("_c10d_functional::wait_tensor", "wait"),
        ("cudaStreamSynchronize", "wait"),
        ("aten::mul", ""),
        ("aten::max", ""),
        ("aten::t_copy", ""),
        ("aten::gelu_backward", ""),
        ("aten::native_layer_norm", ""),
        ("DistributedDataParallel.forward", ""),
    ],
)
def test_operators_by_name(name, part):
    assert op_part(name) == part


@pytest.mark.parametrize(
    ("names", "part"),
    [
        (["mesh_tp", "TENSOR_MODEL_PARALLEL_GROUP"], "tp_comm"),
        (["mesh_dp", "mesh_dp_shard_cp", "mesh_dp_replicate", "mesh_fsdp"], "dp_comm"),
        (["DATA_PARALLEL_GROUP_WITH_CP", "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP"], "dp_comm"),
        (["mesh_cp", "CONTEXT_PARALLEL_GROUP"], "cp_comm"),
        (["mesh_pp", "PIPELINE_MODEL_PARALLEL_GROUP"], "pp_comm"),
        (["EXPERT_MODEL_PARALLEL_GROUP", "mesh_ep"], "ep_comm"),
        (["EMBEDDING_GROUP", "POSITION_EMBEDDING_GROUP"], "embedding_comm"),
        (["default_pg", "mesh_default", "MODEL_PARALLEL_GROUP", ""], ""),
    ],
)
def test_groups_by_name(names, part):
    assert {group_part(name) for name in names} == {part}


def test_every_part_of_the_tables_has_its_place():
    tables = (kernel_names._OPS, kernel_names._KERNELS, kernel_names._GROUPS)
    assert {part for table in tables for _, part in table} <= {*ORDER, "wait"}


# --- properties ------------------------------------------------------------------------------------------------------------

TICKS = 40
intervals = st.lists(
    st.builds(
        lambda start, long, part, what: PartInterval(start, start + long, part, what),
        st.integers(-5, TICKS),
        st.integers(0, 20),
        st.sampled_from([part for part in ORDER if part != "idle"]),
        st.sampled_from(["a", "b"]),
    ),
    max_size=12,
)


@given(intervals)
def test_parts_sum_to_the_step(items):
    """Against a count of every tick: exposed where nothing stronger runs, covered wherever it runs."""
    found = share_out(items, 0, TICKS)
    assert sum(span.exposed for span in found.values()) == TICKS
    owners, covered = [], {}
    for tick in range(TICKS):
        active = {
            (item.part, item.what if item.part in COMM else "") for item in items if item.start <= tick < item.end
        }
        owners.append(min(active, key=lambda key: (ORDER[key[0]], key)) if active else ("idle", ""))
        for key in active:
            covered[key] = covered.get(key, 0) + 1
    for key, span in found.items():
        assert span.exposed == owners.count(key)
        assert span.exposed <= span.covered
        assert span.covered == (owners.count(key) if key[0] == "idle" else covered[key])


@given(st.lists(st.tuples(st.integers(0, TICKS), st.integers(0, 20)), max_size=12))
def test_own_time_counts_no_moment_twice(spans):
    """However operators nest, their own times are disjoint and cover what the operators cover."""
    ops = [HostOp(start, start + long, "aten::add", "op", 0, builds_graph=False) for start, long in spans]
    ticks = [tick for start, end, _ in own_time(ops, {}) for tick in range(start, end)]
    assert len(ticks) == len(set(ticks))
    assert set(ticks) == {tick for op in ops for tick in range(op.start, op.end)}


def test_children_are_not_counted_with_their_parents():
    ops = [
        HostOp(0, 100, "aten::gelu", "op", 0, builds_graph=True),
        HostOp(20, 50, "aten::empty_like", "op", 0, builds_graph=False),
    ]
    assert [(start, end, top.part) for start, end, top in own_time(ops, {})] == [
        (0, 20, "memory_bound"),
        (20, 50, "launch"),
        (50, 100, "memory_bound"),
    ]
    assert WORK[0] == "gemm"
