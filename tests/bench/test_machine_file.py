"""The device under a benchmark, and the machine file that is written of it."""

from __future__ import annotations

import pytest
import torch

from steptime import Job, Machine, estimate
from steptime.answer.assumptions import assumptions
from steptime.bench import timings
from steptime.bench.device import BenchDevice, describe, known_accelerator
from steptime.bench.machine_figures import Sweeps, figures, tiers
from steptime.bench.machine_file import Provenance, machine_document, machine_yaml
from steptime.bench.runs.clock import Timing
from steptime.cost.rates import rates

GIB = 2.0**30
PROVENANCE = Provenance("3dtrn bench x.yaml", "2026-11-21", "a CPU", "2.13.0")
CPU = BenchDevice("cpu", "AMD EPYC", 24 * GIB, 20 * GIB, 2)


def once(seconds: float) -> Timing:
    return Timing(seconds, seconds, seconds, 5)


@pytest.mark.parametrize(
    ("name", "gib", "accelerator"),
    [
        ("NVIDIA H200", 139.8, "h200-sxm5-141"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100-sxm5-80"),
        ("NVIDIA A100-SXM4-40GB", 39.5, "a100-sxm4-40"),
        ("NVIDIA A100 80GB PCIe", 79.2, "a100-pcie-80"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx4090-24"),
        ("Tesla V100-SXM2-16GB", 15.8, "v100-sxm2-16"),
        ("AMD Instinct MI300X", 191.5, "mi300x"),
        ("NVIDIA H100 NVL", 93.1, None),  # of H100s only those of 80 GB have a machine
        ("NVIDIA GeForce GTX 1080", 8.0, None),
    ],
)
def test_a_gpu_is_known_by_its_name_and_memory(name, gib, accelerator):
    found = known_accelerator(BenchDevice("cuda", name, gib * GIB, gib * GIB, 100))
    assert (found and found.name) == accelerator


def test_a_cpu_has_no_data_sheet():
    assert known_accelerator(CPU) is None
    found = describe(torch.device("cpu"))
    assert found.memory_bytes >= found.usable_bytes > 0
    assert found.processors == torch.get_num_threads()


def measured() -> Sweeps:
    """A machine of 100 GFLOP/s in fp32 and 400 in bf16, 10 GB/s, attention at half of fp32's rate."""
    gemms = [
        timings.GemmTiming("mlp.up_proj", direction, dtype, m, n, k, once(2.0 * m * n * k / rate))
        for dtype, rate in (("fp32", 100e9), ("bf16", 400e9))
        for direction, m, n, k in (("forward", 1024, 1408, 512), ("dgrad", 1024, 512, 1408))
    ]
    attention = [
        timings.AttentionTiming("default", direction, "fp32", 1, s, 8, 4, 64, causal=True, timing=once(1.0))
        for s in (512, 1024)
        for direction in ("forward", "backward")
    ]
    attention = [row._replace(timing=once(row.flops / 50e9)) for row in attention]
    moves = [timings.MoveTiming(name, "forward", "fp32", 1e8, once(0.01)) for name in ("copy", "residual", "rmsnorm")]
    launches = [timings.LaunchTiming("gemm", once(4e-6)), timings.LaunchTiming("move", once(2e-6))]
    return Sweeps(gemms, attention, moves, launches, [], [])


def written(tmp_path, device=CPU, network=()):
    found = figures(measured(), device, "fp32", PROVENANCE)
    path = tmp_path / "machine.yaml"
    path.write_text(machine_yaml(machine_document(device, found, network, 1, PROVENANCE)), encoding="utf-8")
    return Machine.load(str(path))


def test_the_file_says_what_was_measured(tmp_path):
    machine = written(tmp_path)
    device = machine.accelerator
    assert device.peak_flops == pytest.approx({"fp32": 100e9, "bf16": 400e9}, rel=0.06)  # no data sheet is known
    assert device.sustained_flops["fp32"] == pytest.approx(100e9, rel=0.06)  # wgrad's 5 % and kernels' 4 us aside
    assert device.memory_bytes_per_s * device.memory_efficiency == pytest.approx(10e9)
    assert device.kernels.model_dump() == {
        "gemm_kernel_s": 4e-6, "move_kernel_s": 2e-6, "layer_gap_s": 0.0, "host_kernel_s": 0.0
    }  # fmt: skip
    assert (device.memory_bytes, device.usable_memory_bytes) == (24 * GIB, 20 * GIB)
    assert device.attention_forward_efficiency * 100e9 == pytest.approx(
        50e9 * 64 / 64 / 0.87, rel=0.02
    )  # head size 64 counts 0.87


def test_every_figure_has_a_source(tmp_path):
    machine = written(tmp_path)
    for path in (
        "accelerator.sustained_flops.bf16",
        "accelerator.memory_bytes_per_s",
        "accelerator.kernels.gemm_kernel_s",
    ):
        source = machine.source(path)
        assert source.startswith("measured: ")
        assert "3dtrn bench x.yaml, 2026-11-21, a CPU, torch 2.13.0" in source
    assert machine.source("accelerator.peak_flops.fp32").startswith("no data sheet is known")
    assert machine.source("tiers.0.bytes_per_s").startswith("assumed")
    assert "spread 0 %" in machine.source("accelerator.best_flops.fp32")


def test_a_known_gpu_keeps_its_peak_and_its_network(tmp_path):
    machine = written(tmp_path, BenchDevice("cuda", "NVIDIA H200", 139.8 * GIB, 139.8 * GIB, 132))
    assert machine.accelerator.peak_flops["bf16"] == 989e12
    assert machine.accelerator.sm_count == 132
    assert machine.tiers[0].name == "nvlink"
    assert "no collective was measured" in machine.source("tiers.0.bytes_per_s")


def test_the_model_reads_its_own_constants_back(tmp_path):
    """A job on the written machine runs at the rates that were measured, with no factor fitted on published runs."""
    machine = written(tmp_path)
    job = Job(
        model={"n_layers": 2, "hidden_sz": 512, "inter_sz": 1408, "n_q_heads": 8, "vocab_sz": 4096},
        parallelism={"tp": 1, "pp": 1, "dp": 1},
        performance={"software": "torch", "precision": "fp32"},
        data={"gbs": 2, "seqlen": 512, "microbatch_sz": 2},
        hardware=machine,
    )
    held = rates(machine.accelerator, job.software, 1)
    assert held.gemm_flops == machine.accelerator.sustained_flops["fp32"]
    assert (held.gemm_kernel_s, held.move_kernel_s, held.slowness) == (4e-6, 2e-6, 1.0)
    row = next(g for g in estimate(job).gemms if (g.name, g.pass_) == ("mlp.up_proj", "forward"))
    assert row.time_s == pytest.approx(2.0 * 1024 * 1408 * 512 / 100e9, rel=0.06)
    assert any("no factor fitted on published runs" in line for line in assumptions(job))


def test_collectives_become_tiers():
    """Two ranks of a node at 1 GB/s, and two nodes at 0.1 GB/s: each tier gets its own."""

    def row(axis, rate, kind="broadcast"):
        return [
            timings.CollectiveTiming(kind, axis, 2, size, once(1e-4 + size / rate)) for size in (2**10, 2**18, 2**24)
        ]

    found = tiers(row("tp", 1e9) + row("dp", 1e8), frozenset({"dp"}), 2, PROVENANCE)
    assert [tier["name"].value for tier in found] == ["node", "network"]
    assert found[0]["size"].value == 2
    assert float(found[0]["bytes_per_s"].value) == pytest.approx(1e9, rel=0.1)
    assert float(found[1]["bytes_per_s"].value) == pytest.approx(1e8, rel=0.1)
    assert tiers([], frozenset(), 1, PROVENANCE) == []
