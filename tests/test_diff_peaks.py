"""`3dtrn diff` of two precisions: MFU is a share of another peak, which the table says."""

from __future__ import annotations

from steptime.answer.result import estimate
from steptime.job.job import Job
from steptime.report.diff_tables import diff

PLAN = {
    "model": "llama3-8b",
    "devices": 64,
    "parallelism": {"tp": 1, "pp": 1, "fsdp": {}},
    "performance": {"software": "torchtitan", "compile": "all", "activation_checkpointing_type": "full"},
    "data": {"gbs": 128, "seqlen": 8192, "microbatch_sz": 2},
    "hardware": {"node_type": "h100"},
}


def notes_of(*jobs):
    """The notes below the table of step, throughput and MFU."""
    names = ["A", "B", "C"][: len(jobs)]
    return next(table for table in diff([estimate(job) for job in jobs], names) if table.title == "answer").notes


def test_peaks_that_differ_are_told_and_equal_ones_are_not():
    """An H100 SXM multiplies dense bf16 at 989 and fp8 at 1,979 TFLOP/s (NVIDIA's data sheet, halved for sparsity)."""
    bf16 = Job.load(PLAN)
    fp8 = bf16.replace(**{"performance.precision": "fp8_tensorwise"})
    said = "MFU and HFU are shares of each plan's own dense peak, which differ: "
    assert list(notes_of(bf16, fp8)) == [f"{said}A 989 TFLOP/s bf16, B 1.98 PFLOP/s fp8"]
    assert list(notes_of(bf16, fp8, bf16)) == [f"{said}A 989 TFLOP/s bf16, B 1.98 PFLOP/s fp8, C 989 TFLOP/s bf16"]
    assert not notes_of(bf16, bf16.replace(**{"data.gbs": 256}))
