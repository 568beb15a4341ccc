"""A hand-made estimate whose figures are easy to check."""

from functools import partial
from types import SimpleNamespace

import jobs

from steptime import estimate
from steptime.answer.tables import stages_alike
from steptime.base.rows import (
    Basis,
    CollectiveRow,
    Fix,
    Flops,
    GemmRow,
    Memory,
    Overhead,
    Params,
    Pipeline,
    StageMemory,
    Throughput,
    Time,
    WeakScaling,
)

GIB = 2.0**30


job = partial(jobs.job, "llama3-70b", gbs=2048, seqlen=8192, tp=8, pp=4, dp=32)


TIMING = estimate(job()).timing
"""What explanations look up: rates, networks, ops."""


def stage(index, activations_gib):
    held = StageMemory(
        index, 4 * GIB, 8 * GIB, 3 * GIB, activations_gib * GIB, 1 * GIB, 0, 0, f"backward of mlp.down, layer {index}"
    )
    allocated = sum(held[1:6])
    return held._replace(allocated_bytes=allocated, reserved_bytes=allocated + 2 * GIB)


def gemm(stage_index, pass_, name="attn.qkv", calls=1280.0):
    # 2 * 8192 * 1280 * 8192 = 171,798,691,840 FLOPs; at 500 TFLOP/s 343.6 us; 168 MiB at 2 TB/s 88.08 us; 6 us of launch
    flops, moved = 2.0 * 8192 * 1280 * 8192, (128.0, 20.0, 20.0)
    compute = flops / 500e12
    sizes = [size * 2**20 for size in moved]
    return GemmRow(
        name,
        stage_index,
        pass_,
        calls,
        8192.0,
        1280.0,
        8192.0,
        flops,
        compute,
        *sizes,
        sum(sizes) / 2e12,
        compute + 6e-6,
    )


def made(activations=(40.0, 30.0, 20.0, 10.0), verdict="fits", **changes):
    stages = [stage(i, size) for i, size in enumerate(activations)]
    worst = max(stages, key=lambda row: row.reserved_bytes)
    parts = {
        "gemm": 10.0,
        "attention": 2.0,
        "tp_comm": 1.5,
        "bubble": 1.0,
        "dp_comm": 0.25,
        "pp_comm": 0.0,
    }
    step = sum(parts.values())  # 14.75
    fields = {
        "job": job(),
        "assumptions": ["flash attention", "a longer one " * 12],
        "devices": 1024,
        "nodes": 128,
        "params": Params(70_553_706_496, 70_553_706_496, [17_638_426_624] * 4, 0),
        "flops": Flops(7.2e18, 7.8e18, 7.4e18),
        "memory": Memory(
            stages,
            worst.allocated_bytes,
            worst.reserved_bytes,
            0.9 * worst.reserved_bytes,
            1.25 * worst.reserved_bytes,
            Overhead(0.5 * GIB, 1.5 * GIB, 0.0),
            {"fits": 79.5, "tight": 59.0, "does_not_fit": 50.0}[verdict] * GIB,
            verdict,
            verdict == "fits",
            worst.stage,
        ),
        "pipeline": Pipeline("1f1b", len(stages), 64, 1.0, 0.05, [4.0, 3.0, 2.0, 1.0]),
        "time": Time(
            step,
            parts,
            {"tp_comm": 3.0, "dp_comm": 0.5},
            13.5,
            16.25,
            Basis([], 23, ["scale: 1,024 devices, measured up to 512"]),
        ),
        "throughput": Throughput(
            2048 * 8192 / step, 2048 * 8192 / step / 1024, 476.7, 0.482, 0.522, 0.495, 989e12, "bf16"
        ),
        "gemms": [gemm(i, pass_) for i in stages_alike(TIMING.assembly) for pass_ in ("forward", "dgrad", "wgrad")]
        + [gemm(len(TIMING.assembly.stages) - 1, "forward", "head", 64.0)],
        "collectives": [
            CollectiveRow("qkv gather", "all_gather", "tp", 8, "nvlink", 2.0**27, 5120.0, 2e-5, 3e-4, 3.2e-4, 0.8),
            CollectiveRow(
                "gradients", "reduce_scatter", "dp", 32, "infiniband", 4.0 * GIB, 5.0, 1e-3, 9e-2, 9.1e-2, 0.25
            ),
        ],
        "weak_scaling": [WeakScaling(dp, 32 * dp, 64 * dp, 14 + dp / 64, 14 / (14 + dp / 64)) for dp in (1, 8, 32)],
        "fixes": [
            Fix(
                "--set performance.activation_checkpointing_type=super-selective --set parallelism.tp=16",
                61 * GIB,
                15.0,
                0.021,
                most_bytes=63 * GIB,
            )
        ],
        "savings": [],
        "run": {"days": 34.2, "checkpoint_bytes": 9.8e11, "checkpoint_write_s": 33.2, "goodput": 0.97, "note": None},
    }
    fields["host_bound"] = []
    fields["timing"] = TIMING
    fields["assembly"] = TIMING.assembly
    found = SimpleNamespace(**fields | changes)
    found.peaks = found.memory
    return found
