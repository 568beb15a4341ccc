"""Where the time of a GPU's step goes, from traces written by hand."""

from __future__ import annotations

import json

import pytest
from bench.traces import (
    ADD,
    COPY,
    GEMM,
    NVJET,
    SEND_RECV,
    TWO_STREAMS,
    host,
    job_of,
    kernel,
    launch,
    nccl,
)

from steptime import estimate
from steptime.bench.profiler_trace.attribution import attribute
from steptime.bench.profiler_trace.events import read


def parts_of(trace, job=None):
    """Microseconds by part of a trace's step, and what was hidden."""
    job = job or job_of(dp=2)
    found = attribute([trace], job, estimate(job).time).busiest
    assert sum(found.parts_s.values()) == pytest.approx(found.step_s, rel=1e-12)
    return {k: round(v * 1e6, 6) for k, v in found.parts_s.items()}, {
        k: round(v * 1e6, 6) for k, v in found.hidden_s.items()
    }


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
    assert any("a waiting receive cannot be distinguished" in note for note in found.notes)


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
    assert any("5 of 6 kernels are classified by name only" in note for note in notes)
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
