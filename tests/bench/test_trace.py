"""`3dtrn explain CONFIG --trace`: real traces of a CPU and of two gloo ranks, and handwritten ones of a GPU."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from bench.launch import fork, fork_ranks
from hypothesis import given
from hypothesis import strategies as st

from steptime import Job, estimate
from steptime.bench.trace import names
from steptime.bench.trace.attribution import attribute
from steptime.bench.trace.events import HostOp, read, read_all
from steptime.bench.trace.intervals import ORDER, PartInterval, own_time, share_out
from steptime.bench.trace.names import COMM, WORK, group_part, kernel_part, op_part
from steptime.commands import cli

ROOT = Path(__file__).parents[2]
STEP = Path(__file__).with_name("traced_step.py")
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


@pytest.fixture
def explain(capsys, tmp_path):
    """Run `3dtrn explain` on a config of this layout: (exit code, stdout, stderr)."""

    def call(*args, **layout):
        path = tmp_path / "plan.yaml"
        path.write_text(yaml.safe_dump(CONFIG | {"parallelism": CONFIG["parallelism"] | layout}), encoding="utf-8")
        code = cli.main(["explain", str(path), "--trace", *map(str, args)])
        return (code, *capsys.readouterr())

    return call


# --- real traces -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """A DDP step of two gloo ranks, one trace each."""
    where = tmp_path_factory.mktemp("ddp")
    done = fork_ranks(STEP, 2, where)
    assert done.returncode == 0, done.stderr
    return [str(where / f"rank{rank}.json") for rank in (0, 1)]


@pytest.fixture(scope="module")
def recomputed(tmp_path_factory):
    """One process, both blocks recomputed."""
    where = tmp_path_factory.mktemp("alone")
    done = fork(STEP, where, "recompute")
    assert done.returncode == 0, done.stderr
    return str(where / "rank0.json")


def test_two_gloo_ranks(two_ranks):
    job = job_of(dp=2)
    traces = read_all(two_ranks[::-1])
    assert [(trace.rank, trace.world_size, trace.on_cpu) for trace in traces] == [(0, 2, True), (1, 2, True)]
    assert [step.number for step in traces[0].steps] == [1, 2, 3]
    found = attribute(traces, job, estimate(job).time)
    for rank, trace in zip(found.ranks, traces, strict=True):
        spans = {step.number: step.end - step.start for step in trace.steps}
        assert spans[rank.step] == sorted(spans.values())[1]  # the median of three
        assert rank.step_s == pytest.approx(spans[rank.step] * 1e-9, rel=1e-12)
        assert sum(rank.parts_s.values()) == pytest.approx(rank.step_s, rel=1e-12)
        assert {"gemm", "attention", "memory_bound", "optimizer", "launch", "idle"} <= set(rank.parts_s)
        assert set(rank.parts_s) <= set(ORDER)
        assert "recompute" not in rank.parts_s
        # DDP reduces its buckets (4 of 0.5 MB and less) on threads of gloo's own
        reduced = next(call for call in rank.collectives if call.kind == "all_reduce")
        assert (reduced.part, reduced.calls >= 3) == ("dp_comm", True)
        assert reduced.total_s > 0
        assert reduced.hidden_s + reduced.exposed_s == pytest.approx(reduced.total_s)
        assert reduced.total_s <= rank.step_s
    assert found.notes[0] == "collectives of default_pg (2 ranks) count as data-parallel: the config's only axis"


def test_two_gloo_ranks_on_the_command_line(two_ranks, explain):
    code, out, _ = explain(*two_ranks, dp=2)
    assert code == 0
    assert all(
        part in out for part in ("matrix multiplies", "data-parallel communication", "all-reduce", "over 2 ranks")
    )
    document = json.loads(explain(*two_ranks, "--json", dp=2)[1])
    assert document["schema"] == "3dtrn-trace/1"
    assert sum(row["measured_s"] for row in document["rows"]) == pytest.approx(
        document["measured"]["step_s"], rel=1e-12
    )
    assert sum(row["predicted_s"] for row in document["rows"]) == pytest.approx(
        document["predicted"]["step_s"], rel=1e-12
    )
    widths = [abs(row["difference_s"]) for row in document["rows"]]
    assert widths == sorted(widths, reverse=True)
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]


def test_recomputation_is_told_by_autograd(recomputed):
    job = job_of()
    trace = read(recomputed)
    assert (trace.rank, trace.world_size, trace.transfers) == (0, None, [])
    found = attribute([trace], job, estimate(job).time)
    parts = found.busiest.parts_s
    assert sum(parts.values()) == pytest.approx(found.busiest.step_s, rel=1e-12)
    assert parts["recompute"] > 0
    # of three passes over the blocks' products one repeats forward, beside the head's: recomputation is the smaller
    assert parts["recompute"] < parts["gemm"] + parts["attention"] + parts["memory_bound"]
    assert not set(parts) & set(COMM)


def test_a_packed_trace_reads_the_same(two_ranks, tmp_path):
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(Path(two_ranks[1]).read_bytes()))
    assert read(str(packed))._replace(path="") == read(two_ranks[1])._replace(path="")


def test_chunks_of_any_size_give_the_same_events(two_ranks, monkeypatch):
    whole = read(two_ranks[0])
    monkeypatch.setattr("steptime.bench.trace.chrome_json._CHUNK", 4099)
    assert read(two_ranks[0]) == whole


# --- handwritten traces of a GPU -------------------------------------------------------------------------------------------

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


@pytest.fixture
def written(tmp_path):
    """Write events as a rank's trace and read it back."""

    def call(*events, rank=0, world=None):
        path = tmp_path / f"rank{rank}.json"
        about = {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world}} if world else {}
        path.write_text(
            json.dumps({"schemaVersion": 1, **about, "traceEvents": events, "traceName": "x"}), encoding="utf-8"
        )
        return read(str(path))

    return call


def parts_of(trace, job=None):
    """Microseconds by part of a trace's step, and what was hidden."""
    job = job or job_of(dp=2)
    found = attribute([trace], job, estimate(job).time).busiest
    assert sum(found.parts_s.values()) == pytest.approx(found.step_s, rel=1e-12)
    return {k: round(v * 1e6, 6) for k, v in found.parts_s.items()}, {
        k: round(v * 1e6, 6) for k, v in found.hidden_s.items()
    }


TWO_STREAMS = [
    kernel(GEMM, 0, 100),
    kernel(FLASH, 100, 150),
    kernel(ADD, 150, 200),
    nccl(120, 260, "mesh_dp", 2),  # 80 beside the first stream, 60 alone
    kernel(NVJET, 260, 300),
    kernel(FOREACH, 320, 360),  # 20 of nothing before it
]


def test_an_overlapped_collective(written):
    parts, hidden = parts_of(written(*TWO_STREAMS, world=2))
    assert parts == {"gemm": 140, "attention": 50, "memory_bound": 50, "dp_comm": 60, "idle": 20, "optimizer": 40}
    assert hidden == {"dp_comm": 80}


def test_a_collective_says_its_bytes(written):
    job = job_of(dp=2)
    found = attribute([written(*TWO_STREAMS, world=2)], job, estimate(job).time)
    (call,) = found.busiest.collectives
    assert (call.part, call.kind, call.calls, call.bytes) == ("dp_comm", "all_reduce", 1, 2048)  # 1024 of 2 bytes
    assert (call.total_s, call.hidden_s, call.exposed_s) == pytest.approx((140e-6, 80e-6, 60e-6))
    assert [kernel.name for kernel in found.busiest.kernels] == [ADD]


def test_a_trace_may_say_its_rank_behind_the_events(tmp_path):
    """As libkineto writes it when a running job is traced on demand (addOnDemandDistMetadata)."""
    path = tmp_path / "trace.json"
    about = {"backend": "nccl", "rank": 3, "world_size": 8, "pg_config": [{"pg_desc": "default_pg", "pg_size": 8}]}
    path.write_text(json.dumps({"traceEvents": TWO_STREAMS, "distributedInfo": about}), encoding="utf-8")
    trace = read(str(path), alone=False)
    assert (trace.rank, trace.world_size, trace.groups) == (3, 8, [("default_pg", 8)])


def test_work_on_two_streams_counts_once(written):
    """A copy beside a product (0-100) hides; its tail (100-130) does not; two collectives at once are one time."""
    trace = written(
        kernel(GEMM, 0, 100),
        kernel(ADD, 60, 130, 9),
        nccl(120, 200, "mesh_tp", 2),
        nccl(140, 220, "mesh_dp", 2),
        world=4,
    )
    parts, hidden = parts_of(trace, job_of(tp=2, dp=2))
    assert parts == {"gemm": 100, "memory_bound": 30, "tp_comm": 70, "dp_comm": 20}
    assert hidden == {"tp_comm": 10, "dp_comm": 60}


def test_sends_and_receives(written):
    """A stage waits 0-90 for its input, computes, and sends beside the next product."""
    trace = written(
        nccl(0, 90, "undefined", 2, name=SEND_RECV, collective="recv"),
        kernel(GEMM, 90, 190),
        nccl(190, 230, "PIPELINE_MODEL_PARALLEL_GROUP", 2, name=SEND_RECV, collective="send"),
        kernel(GEMM, 200, 300),
        world=2,
    )
    job = job_of(pp=2)
    parts, hidden = parts_of(trace, job)
    assert parts == {"gemm": 200, "pp_comm": 100}
    assert hidden == {"pp_comm": 30}
    predicted = estimate(job).time
    assert predicted.parts_s["bubble"] > 0
    found = attribute([trace], job, predicted)
    row = next(row for row in found.rows if row.part == "pp_comm")
    assert row.predicted_s == pytest.approx(predicted.parts_s["bubble"] + predicted.parts_s.get("pp_comm", 0.0))
    assert sorted(call.kind for call in found.busiest.collectives) == ["recv", "send"]
    assert any("a receive that waits looks like one that transfers" in note for note in found.notes)


STEPS = [
    host("user_annotation", "ProfilerStep#4", 0, 1000),
    # forward: a product, and one inside unfused attention
    host("cpu_op", "aten::linear", 10, 40, Sequence_number=1, Fwd_thread_id=0),
    host("cpu_op", "aten::addmm", 12, 38, Sequence_number=1, Fwd_thread_id=0),
    launch(1, 20),
    host("cpu_op", "aten::bmm", 40, 60, Sequence_number=2, Fwd_thread_id=0),
    launch(2, 50),
    kernel(GEMM, 100, 200, correlation=1),
    kernel(GEMM, 200, 260, correlation=2),
    # backward on a thread of its own: the forward pass again, with gradients on, then the node's own product
    host(
        "cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 400, 500, 2, Sequence_number=1, Fwd_thread_id=1
    ),
    host("cpu_op", "AddmmBackward0", 402, 498, 2, Sequence_number=1, Fwd_thread_id=1),
    host("cpu_op", "aten::addmm", 410, 430, 2, Sequence_number=3, Fwd_thread_id=0),
    host("cuda_runtime", "cudaLaunchKernel", 415, 417, 2, correlation=3),
    host("cpu_op", "aten::mm", 440, 460, 2),
    host("cuda_runtime", "cudaLaunchKernel", 450, 452, 2, correlation=4),
    kernel(GEMM, 430, 530, correlation=3),
    kernel(GEMM, 530, 630, correlation=4),
    # an optimizer whose kernels are plain ones, then a copy by foreach that is none
    host("user_annotation", "Optimizer.step#AdamW.step", 600, 700),
    host("cpu_op", "aten::mul_", 610, 630),
    launch(5, 620),
    kernel(ADD, 640, 700, correlation=5),
    host("cpu_op", "aten::_foreach_copy_", 710, 730),
    launch(6, 720),
    kernel(COPY, 730, 760, correlation=6),
    # the host waits for the device: not launching
    host("cuda_runtime", "cudaDeviceSynchronize", 740, 990),
    host("user_annotation", "ProfilerStep#5", 1000, 1900),
    host("cpu_op", "aten::mm", 1010, 1030),
    launch(7, 1020),
    kernel(NVJET, 1100, 1800, correlation=7),
]


def test_steps_of_a_device_that_lags_behind_its_host(written):
    """Step 4 is 100-1100 (first kernel to the next step's first), step 5 is 1100-1900 (its host's end); the faster is shown."""
    trace = written(*STEPS)
    job = job_of()
    found = attribute([trace], job, estimate(job).time).busiest
    assert (found.step, found.steps, found.step_s) == (5, 2, pytest.approx(800e-6))
    assert found.parts_s == pytest.approx({"gemm": 700e-6, "idle": 100e-6})


def test_the_operator_that_launched_a_kernel_says_what_it_is(written):
    # a longer step 5 (to 2200) makes step 4, 100-1100, the shown one
    trace = written(*STEPS, kernel(ADD, 1800, 2200, correlation=7))
    parts, _ = parts_of(trace, job_of())
    # with the device idle: 400-430 backward's operators, 630-640 the optimizer's range, 710-730 the foreach copy's operator and
    # 1010-1030 the next step's are launching; the rest is nothing, or waiting (740-990)
    assert parts == {
        "gemm": 200,  # 100-200 and 530-630
        "attention": 60,  # 200-260, a product by its name
        "recompute": 100,  # 430-530, told by its operator's sequence number
        "optimizer": 60,  # 640-700, an elementwise kernel by its name
        "memory_bound": 30,  # 730-760, multi_tensor_apply by its name
        "launch": 30 + 10 + 20 + 20,
        "idle": 140 + 10 + 250 + 70,
    }


def test_without_operators_names_alone_decide(written):
    job = job_of(dp=2)
    notes = attribute([written(*TWO_STREAMS, world=2)], job, estimate(job).time).notes
    assert any("5 of 6 kernels are sorted by name alone" in note for note in notes)
    assert any("no ProfilerStep in the trace" in note for note in notes)
    assert any("traces of 1 of 2 ranks" in note for note in notes)


def test_loading_data_is_idle(written):
    loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    trace = written(
        host("user_annotation", "ProfilerStep#1", 0, 100),
        host("user_annotation", loader, 0, 60),
        host("cpu_op", "aten::stack", 10, 30),
        host("cpu_op", "aten::mm", 60, 90),
    )
    assert parts_of(trace, job_of())[0] == {"idle": 70, "gemm": 30}


def test_copies_inside_a_host_collective_are_its_own(written):
    """gloo's all-gather copies on its own thread; a receive only starts on the caller's, whose product hides 50 of it."""
    trace = written(
        host("user_annotation", "ProfilerStep#1", 0, 300),
        host("user_annotation", "gloo:all_gather", 0, 100, 9),
        host("cpu_op", "aten::copy_", 10, 60, 9),
        host("user_annotation", "gloo:recv", 100, 200),
        host("cpu_op", "aten::mm", 150, 250),
    )
    parts, hidden = parts_of(trace, job_of(dp=2))
    assert parts == {"dp_comm": 150, "gemm": 100, "idle": 50}
    assert hidden == {"dp_comm": 50}


def backward(*ops):
    """Operators inside a backward node, 10-90; those with gradients on have a sequence number and no forward thread."""
    return [
        host("user_annotation", "ProfilerStep#1", 0, 100),
        host("cpu_op", "autograd::engine::evaluate_function: XBackward", 10, 90, Sequence_number=1, Fwd_thread_id=1),
        *ops,
    ]


def test_functions_in_python_are_no_recomputation(written):
    """DTensor's redistribution carries the mark in every backward; flash attention inside a checkpoint's node is run again."""
    plain = backward(
        host("cpu_op", "RedistributeBackward", 10, 90, Sequence_number=1, Fwd_thread_id=1),
        host("cpu_op", "NestedRedistribute", 20, 60, Sequence_number=2, Fwd_thread_id=0),
        host("cpu_op", "aten::mul", 30, 40),
    )
    assert parts_of(written(*plain), job_of())[0] == {"launch": 70, "memory_bound": 10, "idle": 20}
    again = backward(
        host("cpu_op", "CheckpointFunctionBackward", 10, 90, Sequence_number=1, Fwd_thread_id=1),
        host("cpu_op", "FlashAttnFunc", 20, 60, Sequence_number=2, Fwd_thread_id=0),
        host("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 60, 80, Sequence_number=2, Fwd_thread_id=1),
        host("cpu_op", "MmBackward0", 60, 80, Sequence_number=2, Fwd_thread_id=1),
        host("cpu_op", "aten::mm", 60, 80),
    )
    assert parts_of(written(*again), job_of())[0] == {"recompute": 40, "gemm": 20, "launch": 20, "idle": 20}


def test_who_issued_a_collective_tells_its_axis(written):
    """gloo says no group: 4 x 10 of all-reduce are DTensor's, FSDP's (a reduce-scatter to c10d), DDP's and nobody's."""
    trace = written(
        host("user_annotation", "ProfilerStep#1", 0, 100),
        host("cpu_op", "_c10d_functional::all_reduce", 0, 5),
        host("cpu_op", "c10d::allreduce_", 1, 4),
        host("cpu_op", "c10d::_reduce_scatter_base_", 6, 8),
        host("cpu_op", "c10d::allreduce_", 8, 9),
        *(host("user_annotation", "gloo:all_reduce", start, start + 10, 9) for start in (20, 40, 60, 80)),
        world=4,
    )
    parts, _ = parts_of(trace, job_of(tp=2, dp=2))
    assert parts == {"tp_comm": 10, "dp_comm": 20, "other_comm": 10, "launch": 8, "idle": 52}


def test_the_busiest_rank_is_held_against_the_estimate(written):
    slow = written(kernel(GEMM, 0, 300), nccl(300, 310, "default_pg", 2), rank=1, world=2)
    fast = written(kernel(GEMM, 0, 200), nccl(200, 320, "default_pg", 2), rank=0, world=2)
    job = job_of(dp=2)
    found = attribute([fast, slow], job, estimate(job).time)
    assert found.busiest.rank == 1
    assert {row.part: row.measured_s for row in found.rows}["gemm"] == pytest.approx(300e-6)


@pytest.mark.parametrize(
    ("layout", "group", "ranks", "part"),
    [
        ({"tp": 2, "dp": 4}, "mesh_tp", 2, "tp_comm"),
        ({"tp": 2, "dp": 4}, "", 4, "dp_comm"),  # the only axis of that degree
        ({"tp": 2, "dp": 2}, "", 2, "other_comm"),  # two axes of that degree
        ({"tp": 2, "dp": 2}, "default_pg", 4, "other_comm"),
        ({"tp": 2, "cp": 2, "dp": 2}, "", 4, "dp_comm"),  # gradients of dp x cp ranks
        ({"tp": 4, "cp": 2, "dp": 2}, "", 4, "other_comm"),  # those, or tensor-parallel ones
        ({"tp": 8}, "", 0, "tp_comm"),  # the only axis
    ],
)
def test_groups_without_a_name_go_by_the_config(written, layout, group, ranks, part):
    job = job_of(**layout)
    found = attribute(
        [written(kernel(GEMM, 0, 10), nccl(10, 20, group, ranks), world=job.parallelism.devices)],
        job,
        estimate(job).time,
    )
    assert found.busiest.parts_s[part] == pytest.approx(10e-6)
    assert (found.notes[0].startswith("collectives of")) is (group != "mesh_tp")


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
    tables = (names._OPS, names._KERNELS, names._GROUPS)
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


# --- bad input -------------------------------------------------------------------------------------------------------------

EVENT = '{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.5, "dur": 2}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a trace: no traceEvents in it"),
        ("no JSON at all", "not a trace: no traceEvents in it"),
        ('{"schemaVersion": 1}', "not a trace: no traceEvents in it"),
        ('{"a": nothing, "traceEvents": [', "what stands before its events is no JSON"),
        ('{"traceEvents": [1, 2]}', "event 1 is no object"),
        (f'{{"traceEvents": [{EVENT}, {EVENT[:30]}', "event 2 is cut off or no JSON"),
        (f'{{"traceEvents": [{EVENT}, ', "event 2 is cut off or no JSON"),
        ('{"traceEvents": []}', "no operators and no kernels in it"),
        ('{"traceEvents": [{"ph": "M", "name": "process_name"}]}', "no operators and no kernels in it"),
    ],
)
def test_what_is_no_trace_is_said_in_one_line(explain, tmp_path, text, said):
    path = tmp_path / "trace.json"
    path.write_text(text, encoding="utf-8")
    code, out, err = explain(path)
    assert (code, out) == (2, "")
    assert err.startswith(f"{path}: ")
    assert said in err
    assert err.count("\n") == 1


def test_missing_and_broken_files_are_all_named(explain, tmp_path):
    packed = tmp_path / "rank1.json.gz"
    packed.write_bytes(gzip.compress(f'{{"traceEvents": [{EVENT}]}}'.encode())[:-12])
    code, _, err = explain("nowhere.json", tmp_path, packed, dp=2)
    assert code == 2
    assert [line.rpartition(": ")[2] for line in err.splitlines()] == [
        "cannot be read (No such file or directory)",
        "cannot be read (Is a directory)",
        "ends early; the profiler had not finished writing it?",
    ]


def test_ranks_have_to_be_told_apart(explain, tmp_path):
    for name in ("a.json", "b.json", "rank3.json", "x-rank_3.json"):
        (tmp_path / name).write_text(f"[{EVENT}]", encoding="utf-8")
    assert explain(tmp_path / "a.json")[0] == 0  # alone it is rank 0
    err = explain(tmp_path / "a.json", tmp_path / "rank3.json", tmp_path / "x-rank_3.json", dp=4)[2].splitlines()
    assert "of which rank?" in err[0]
    assert "is of rank 3, as " in err[1]


def test_a_trace_of_another_world_size(explain, written):
    trace = written(*TWO_STREAMS, world=2)
    code, _, err = explain(trace.path, dp=4)
    assert code == 2
    assert (
        err == f"{trace.path}: world size 2, but the config has 4 devices (tp cp pp dp); give the config of that run\n"
    )


def test_options_that_do_not_go_together(capsys, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
    for args, said in (
        (["mfu", "--trace", "x.json"], "--trace: not together with mfu"),
        (["--yaml", "--trace", "x.json"], "--trace: not together with --yaml"),
        (["--json"], "--json: of explain only with --trace"),
    ):
        assert cli.main(["explain", str(plan), *args]) == 2
        assert capsys.readouterr().err == said + "\n"


def test_sorting_a_trace_imports_no_torch(written):
    path = written(*TWO_STREAMS, world=2).path
    code = (
        "import sys\nimport steptime.bench.trace.attribution, steptime.report.trace_tables\n"
        "from steptime.bench.trace.events import read\n"
        f"read({path!r})\nassert not {{'torch', 'numpy'}} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
