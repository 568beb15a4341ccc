"""torchtitan's own runs on 256 and 512 H100: FSDP2 with asynchronous TP, pipelines, float8 and torch.compile; no constant
was fitted to them.

Source: pytorch/torchtitan@31a17bfd benchmarks/llama3_h100_202412_torchtitan.md, tables 4 to 6 (96 GB HBM2e at 500 W).
Micro-batches are a pp-th of the local batch, torchtitan's default then.
"""

from __future__ import annotations

from typing import Any

import pytest
import torchtitan_runs

from steptime.answer.result import estimate
from steptime.job.job import Job

B405 = {"n_layers": 126, "hidden_sz": 16384, "inter_sz": 53248, "n_q_heads": 128, "n_kv_heads": 8, "vocab_sz": 128256}
B70 = B405 | {"n_layers": 80, "hidden_sz": 8192, "inter_sz": 28672, "n_q_heads": 64}


def predicted(
    model: dict[str, Any], seqlen: int, batch: int, *, async_tp: bool = True, gathers_fp8: bool = True, **layout: Any
) -> tuple[float, float]:
    """Tokens/s/device and the most reserved bytes of a stage; `batch` sequences on each data-parallel rank."""
    pp = layout.get("pp", 1)
    job = Job(
        model=model | {"head_dim": 128},
        parallelism={"tp": 8, "pp": pp, "fsdp": {"reshard_after_forward": pp == 1, "reduce_dtype": "fp32"}} | layout,
        performance={
            "software": "torchtitan@0.1",
            "precision": "fp8_tensorwise",
            "fp8_params": gathers_fp8,
            "compile": "blocks",
            "activation_checkpointing_type": "full",
            "overlap": {"tp": async_tp},
        },
        data={"gbs": batch * layout["dp"], "seqlen": seqlen, "microbatch_sz": batch // pp},
        hardware="grand-teton-h100",
    )
    found = estimate(job)
    speed = batch * layout["dp"] * seqlen / job.parallelism.devices / found.step_s
    return speed, max(stage.reserved_bytes for stage in found.memory.stages)


@pytest.mark.parametrize(
    ("seqlen", "batch", "schedule", "vpp", "measured"),
    [(8192, 32, "1f1b", 1, 100), (8192, 32, "interleaved", 2, 128), (32768, 8, "1f1b", 1, 76)],
)
def test_pipelines(seqlen, batch, schedule, vpp, measured):
    """1 to 5.4 % too slow, the interleaved schedule most; without time steps and reductions before sends 6 to 8 % too fast."""
    layout = {"pp": 8, "vpp": vpp, "schedule": schedule, "layers_per_stage": "auto", "dp": 8}
    speed, _ = predicted(B405, seqlen, batch, **layout)
    assert speed == pytest.approx(measured, rel=0.055 if vpp == 2 else 0.05)


@pytest.mark.parametrize(
    ("seqlen", "batch", "more", "gib"),
    [
        (8192, 32, {"schedule": "1f1b"}, 82.5),
        (8192, 32, {"schedule": "interleaved", "vpp": 2}, 72.7),
        (32768, 8, {"schedule": "1f1b"}, 75.3),
        (262144, 8, {"schedule": "1f1b", "dp": 1, "cp": 8, "gathers_fp8": False}, 84.9),
    ],
)
def test_reserved_memory(seqlen, batch, more, gib):
    """12 to 20 % too small; 15 to 24 % without the outputs and the reduction's input that stay.

    Float8 is gathered with several shards of data alone (torchtitan@9dec370 float8.py, parallel_dims.dp_shard_enabled).
    """
    layout = {"pp": 8, "layers_per_stage": "auto", "dp": 8} | more
    _, reserved = predicted(B405, seqlen, batch, **layout)
    assert reserved / 2**30 == pytest.approx(gib, rel=0.205)


def test_asynchronous_tensor_parallelism():
    """829 and 876 tokens/s: 6 % faster; the same team's later run on 256 GPUs 810 and 942, 16 %."""
    plain, hidden = (predicted(B70, 8192, 16, async_tp=on, dp=32)[0] for on in (False, True))
    assert plain == pytest.approx(829, rel=0.1)
    assert 1.057 <= hidden / plain <= 1.163


@pytest.mark.parametrize("run", torchtitan_runs.MEASURED[:-1], ids=lambda run: f"{run.devices} {run.tokens_per_s}")
def test_job_configs(run):
    """Tables 1, 3 and 4 from job configs: step times within 9 %, what is reserved within 6 % (8B) and 20 % (70B)."""
    speed, gib = torchtitan_runs.predicted(run)
    assert speed == pytest.approx(run.tokens_per_s, rel=0.09)
    assert gib == pytest.approx(run.reserved_gib, rel=0.06 if run.devices < 256 else 0.2)
