"""Measured steps: every figure there, on one process and on two gloo ranks; no seconds are judged."""

from __future__ import annotations

import json
import math

import pytest
import torch
from bench_jobs import GPT, config, job, launch

from steptime.answer.result import estimate
from steptime.base.config import ConfigError
from steptime.bench.runnable import alone, as_run, peak_differences, unsupported
from steptime.bench.runs.block import run_block
from steptime.bench.runs.engines import LEARNING_RATE, lay_out
from steptime.bench.runs.step import check, run_steps
from steptime.bench.runs.training import Trainer, batch_of
from steptime.job.assembly import Assembly
from steptime.job.job import Job
from steptime.memory.part_memories import PartMemories

CPU = torch.device("cpu")
PAIRS = {
    "ddp": config(parallelism={"dp": 2}),
    "pp": config(parallelism={"pp": 2}),
}
"""FSDP2 and tensor parallelism are measured in test_command.py."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("steps")


@pytest.fixture(scope="module")
def seen(folder):
    """What two ranks measured of all cases."""
    return launch(folder, 2, PAIRS, rows=True)


def test_one_process(tmp_path):
    row = run_steps(job(), CPU, steps=3, warmup=1, trace=tmp_path)
    stated = estimate(as_run(job(), "cpu")[0])
    assert (row.layout, row.ranks, row.tokens_per_step, row.timing.reps) == ("single", 1, 4 * 32, 3)
    assert row.allocated_peak_bytes == [stated.memory.peak_allocated_bytes]
    assert row.reserved_peak_bytes == [None]
    assert row.n_params == [stated.params.total]
    assert row.rss_peak_bytes[0] > row.allocated_peak_bytes[0]
    assert row.last_loss < row.first_loss < 1.1 * math.log(96)  # 96 words, little known of them yet
    assert row.ddp is None
    assert row.notes == [
        "performance.norm_impl: composite, since F.rms_norm runs so on cpu",
        "performance.cublas_workspace: none, since a CPU has no cuBLAS",
        "performance.clip_grad: false, since the benchmark does not clip gradients",
    ]
    assert steps_in(tmp_path / "rank0.json") == {"ProfilerStep#1", "ProfilerStep#2"}


def steps_in(path):
    """Names of the marked steps of a trace."""
    events = json.loads(path.read_text())["traceEvents"]
    return {event["name"] for event in events if event.get("name", "").startswith("ProfilerStep#")}


@pytest.mark.parametrize("name", PAIRS)
def test_two_ranks(seen, folder, name):
    row = seen[name]["row"]
    assert (row["layout"], row["ranks"], row["tokens_per_step"], row["reps"]) == (name, 2, 4 * 32, 2)
    assert 0 < row["min_s"] <= row["median_s"] <= row["p90_s"]
    assert row["slowest_rank"] == row["rank_s"].index(max(row["rank_s"]))
    assert [len(row[key]) for key in ("rank_s", "n_params", "rss_peak_bytes", "allocated_peak_bytes")] == [2] * 4
    assert row["reserved_peak_bytes"] == [None, None]
    assert row["over_ranks"]["step_s"]["max"] == max(row["rank_s"])
    assert row["over_ranks"]["allocated_bytes"]["min"] == min(row["allocated_peak_bytes"])
    assert row["last_loss"] < row["first_loss"]
    for rank in range(2):
        assert steps_in(folder / "trace" / name / f"rank{rank}.json") == {"ProfilerStep#1", "ProfilerStep#2"}


def test_the_peak_of_ddp_counts_its_buckets(seen):
    """Gradients are copied into buckets that stay (torch's default, which the profile states): equal to the byte."""
    stated = estimate(as_run(Job.model_validate(PAIRS["ddp"]), "cpu")[0]).memory.peak_allocated_bytes
    assert seen["ddp"]["row"]["allocated_peak_bytes"] == [stated] * 2


def test_ddp_logs_its_communication(seen):
    ddp = seen["ddp"]["row"]["ddp"]
    assert set(ddp) == {"forward_s", "backward_s", "comm_s", "overlapped_s"}
    assert ddp["comm_s"] > 0
    assert 0 <= ddp["overlapped_s"] <= ddp["comm_s"]
    assert seen["pp"]["row"]["ddp"] is None


def test_a_step_is_adamw_by_hand():
    """Two micro-batches, then one AdamW update of their mean gradient."""
    trainer = Trainer(lay_out(as_run(job(gbs=2), "cpu")[0], CPU))
    part, (tokens, targets) = trainer.laid.parts[0], trainer.batch
    twin = lay_out(trainer.laid.job, CPU).parts[0]
    twin(tokens, targets).backward()  # the mean over both sequences at once
    torch.optim.AdamW(twin.parameters(), lr=LEARNING_RATE).step()
    trainer.step()
    for ours, theirs in zip(part.parameters(), twin.parameters(), strict=True):
        assert ours.grad is None
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


def test_every_data_rank_takes_its_own_share():
    laid = lay_out(as_run(job(), "cpu")[0], CPU)
    tokens, targets = batch_of(laid, 7)
    assert tokens.shape == targets.shape == (4, 32)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens, batch_of(laid, 7).tokens)
    assert not torch.equal(tokens, batch_of(laid, 8).tokens)


@pytest.mark.parametrize(("first", "last"), [(math.nan, 1.0), (2.0, math.inf)])
def test_a_loss_that_is_no_number(first, last):
    with pytest.raises(ValueError, match="loss is not finite"):
        check(first, last, changed=True)


def test_a_loss_that_stays():
    with pytest.raises(ValueError, match="no training progress"):
        check(2.0, 2.0, changed=True)
    check(2.0, 2.0, changed=False)


@pytest.mark.parametrize("performance", [{}, {"precision": "bf16"}, {"attention_impl": "unfused"}])
def test_one_block(performance):
    """A row for each recomputation, with the bytes that the estimate says it keeps."""
    small = job(performance=performance)
    rows = run_block(small, CPU, seconds=0.01)
    assert [row.recompute for row in rows] == ["none", "selective", "full"]
    for row in rows:
        assembly = Assembly(alone(small, row.recompute))
        memories, layer = PartMemories(assembly), assembly.kinds[0]
        stated = memories.checkpointed(((layer, 1),)) if row.recompute == "full" else memories.selective[layer]
        assert row.saved_bytes == stated.saved
        assert row.forward.min_s > 0
        assert row.backward.min_s > 0
    assert rows[-1].saved_bytes == 32 * 64 * (2 if "precision" in performance else 4)  # its input alone: s h


REFUSED = [
    (config(performance={"software": "megatron-core"}), "performance.software"),
    (config(performance={"software": "megatron-core", "precision": "fp8"}), "performance.software"),
    (config(performance={"activation_impl": "fused"}), "performance.activation_impl"),
    (config(performance={"rope_impl": "fused"}), "performance.rope_impl"),
    (config(performance={"softmax_impl": "composite", "attention_impl": "unfused"}), "performance.softmax_impl"),
    (config(performance={"cuda_graphs": True}), "performance.cuda_graphs"),
    (config(performance={"grad_accumulation_fusion": True}), "performance.grad_accumulation_fusion"),
    (config(performance={"activation_checkpointing_type": "super-selective"}), "performance.recompute.modules"),
    (config(performance={"master_dtype": "fp32", "precision": "bf16"}), "performance"),
    (config(performance={"software": "fsdp2", "precision": "bf16"}), "performance.param_dtype"),
    (config(parallelism={"cp": 2}), "parallelism.cp"),
    (config(parallelism={"dp": 2, "zero_level": 1}), "parallelism.zero_level"),
    (config(parallelism={"dp": 2, "tp": 2}), "parallelism.dp"),
    (config(parallelism={"pp": 2}, gbs=1), "parallelism.schedule"),
    (config({"tie_embeddings": True}, parallelism={"pp": 2}), "model.tie_embeddings"),
    (config(GPT | {"tie_embeddings": False}, parallelism={"tp": 2}), "model.learned_positions"),
    (config({"dropout": 0.1}, parallelism={"tp": 2}), "model.dropout"),
    (config({"dropout": 0.1, "attention_dropout": 0.2}, parallelism={"tp": 2}), "model.dropout"),
    (
        config(performance={"software": "fsdp2"}, parallelism={"dp": 2, "fsdp": {"prefetch": 2}}),
        "parallelism.fsdp.prefetch",
    ),
]


@pytest.mark.parametrize(("case", "path"), REFUSED, ids=[f"{path} {i}" for i, (_, path) in enumerate(REFUSED)])
def test_what_torch_cannot_run_is_refused_with_the_fix(case, path):
    """One line, and what it says to set mends it."""
    (line,) = unsupported(Job(**case), "cuda" if "precision" in path else "cpu")
    assert line.startswith(f"{path}: ")
    sets = [word for word in line.partition("; ")[2].split() if word != "--set"]
    assert sets
    assert unsupported(Job.load(json.dumps(case), sets), "cpu") == []


def test_refusals_stop_the_run():
    with pytest.raises(ConfigError, match=r"--set performance\.activation_impl=composite"):
        run_steps(job(performance={"activation_impl": "fused"}), CPU)


def test_known_differences_of_the_peak():
    """Of a GPT in fp32 on one CPU none is known, and there is none."""
    plain, _ = as_run(job(GPT), "cpu")
    assert peak_differences(plain, "cpu") == []
    row = run_steps(plain, CPU, steps=1, warmup=1)
    assert row.allocated_peak_bytes == [estimate(plain).memory.peak_allocated_bytes]
    assert peak_differences(job(parallelism={"tp": 2}), "cpu")[0].startswith("tensor parallelism")
    fsdp = job(performance={"software": "fsdp2", "precision": "bf16"}, parallelism={"dp": 2})
    assert [reason.partition(":")[0] for reason in peak_differences(fsdp, "cpu")] == ["FSDP2", "FSDP2", "CPU"]
    assert len(peak_differences(job(GPT, {"precision": "bf16"}), "cuda")) == 1


def test_what_the_device_dictates():
    unclipped = job(GPT, {"clip_grad": False, "cublas_workspace": ":0:0"})
    dropped, notes = as_run(unclipped.replace(**{"model.dropout": 0.1}), "cpu")
    assert (dropped.model.dropout, len(notes)) == (0.0, 1)
    assert as_run(unclipped, "cpu") == (unclipped, [])
    assert [note.partition(":")[0] for note in as_run(job(GPT), "cpu")[1]] == [
        "performance.cublas_workspace",
        "performance.clip_grad",
    ]
    assert as_run(job(performance={"norm_impl": "composite"}), "cuda")[0].software.kernels.norm_impl == "fused"
    assert "flash attention on CUDA needs bf16 or fp16" in unsupported(job(), "cuda")[0]
