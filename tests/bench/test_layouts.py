"""Jobs on real gloo ranks by torch's engines: what they hold and send is what the estimate says, to the byte.

That the loss is the single process's, step by step, proves that the sharding computes the same.
"""

from __future__ import annotations

import pytest
import torch
from bench_jobs import config, launch

from steptime.answer.result import estimate
from steptime.base.config import ConfigError
from steptime.bench.runnable import as_run, layout_name
from steptime.bench.runs.engines import lay_out
from steptime.bench.runs.step import mean_loss
from steptime.bench.runs.training import Trainer
from steptime.job.job import Job

FSDP = {"software": "fsdp2"}
BF16 = FSDP | {"precision": "bf16"}
SHARDED = {"dp": 2}
WIDE = {"inter_sz": 512}
"""The MLP holds most, not the temporaries of the CPU's RMSNorm."""
FULL = {"activation_checkpointing_type": "full"}
ONE = {"n_layers": 1}
TIED = {"tie_embeddings": True}
PAIRS = {
    "ddp, small buckets": config(parallelism=SHARDED | {"bucket_size_mb": 0.05}),
    "ddp, tied, full recompute": config(TIED, FULL, SHARDED),
    "fsdp2": config(WIDE, FSDP, SHARDED),
    "fsdp2, bf16": config(WIDE, BF16, SHARDED),
    "fsdp2, columns, no reshard": config(
        WIDE, FSDP, SHARDED | {"fsdp": {"shard_dim": 1, "reshard_after_forward": False}}
    ),
    "fsdp2, tied, full recompute": config(TIED, FSDP | FULL, SHARDED),
    "tp, sp, tied, qk_norm, full recompute": config(ONE | TIED | {"qk_norm": True}, FULL, {"tp": 2, "sp": True}, gbs=2),
    "pp, gpipe, uneven": config({"n_layers": 3}, None, {"pp": 2, "schedule": "gpipe", "layers_per_stage": [2, 1]}),
    "pp, interleaved": config({"n_layers": 4}, None, {"pp": 2, "vpp": 2}),
}
"""Default buckets of DDP and the schedule 1f1b of two ranks are in test_steps.py and test_command.py, tensor parallelism without
sharded sequences in `FOURS`."""
FOURS = {
    "fsdp2+tp": config(ONE, FSDP, {"dp": 2, "tp": 2}),
    "ddp+pp": config(parallelism={"dp": 2, "pp": 2}),
    "tp+pp": config(parallelism={"tp": 2, "pp": 2, "sp": True}, gbs=2),
    "hsdp": config(WIDE | ONE, FSDP, {"dp": 4, "replicas": 2}),
}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What two ranks and four saw of all cases."""
    pairs = launch(tmp_path_factory.mktemp("pairs"), 2, PAIRS)
    return pairs | launch(tmp_path_factory.mktemp("fours"), 4, FOURS)


def as_on_cpu(case):
    return as_run(Job(**case), "cpu")[0]


each_case = pytest.mark.parametrize("name", [*PAIRS, *FOURS])
CASES = PAIRS | FOURS


@each_case
def test_parameters_and_collectives(seen, name):
    truths = seen[name]["truths"]
    assert [t for t in truths if t["predicted"] != t["observed"]] == []
    assert any(t["unit"] == "calls" and t["observed"] for t in truths)


@each_case
def test_losses_are_those_of_one_process(seen, name):
    job = as_on_cpu(CASES[name])
    one = {"parallelism": {"tp": 1, "pp": 1, "dp": 1}, "performance.software": "torch"}
    dtypes = dict.fromkeys(("param_dtype", "main_grad_dtype", "moment_dtype"), job.software.compute_dtype)
    single = Trainer(lay_out(job.replace(**one, **{f"performance.{k}": v for k, v in dtypes.items()}), CPU))
    losses = [mean_loss(single.laid, single.step()) for _ in range(2)]
    wide = job.software.compute_dtype == "fp32"
    assert seen[name]["losses"] == pytest.approx(losses, rel=1e-5 if wide else 1e-2)
    assert losses[0] > losses[1]


@pytest.mark.parametrize("name", ["fsdp2", "fsdp2, bf16", "hsdp"])
def test_peaks_of_sharded_steps(seen, name):
    """Every rank holds what the estimate says."""
    stated = estimate(as_on_cpu(CASES[name])).memory.peak_allocated_bytes
    assert set(seen[name]["peaks"]) == {stated}


@each_case
def test_peaks_of_all_layouts(seen, name):
    """DTensor's and the schedules' own buffers are a few per cent of these small models; DDP's copies of gradients far more."""
    job = as_on_cpu(CASES[name])
    stages = estimate(job).memory.stages
    peaks = seen[name]["peaks"]
    stated = [stages[rank * len(stages) // len(peaks)].allocated_bytes for rank in range(len(peaks))]
    assert peaks == pytest.approx(stated, rel=0.06)


def test_the_world_must_fit():
    with pytest.raises(ConfigError, match=r"tp\*pp\*dp is 2, but 1 ranks are running"):
        lay_out(as_on_cpu(PAIRS["fsdp2"]), CPU)


@pytest.mark.parametrize(
    ("axes", "software", "name"),
    [
        ({}, "torch", "single"),
        ({"dp": 2}, "torch", "ddp"),
        ({"dp": 4}, "fsdp2", "fsdp2"),
        ({"dp": 4, "replicas": 2, "tp": 2}, "fsdp2", "hsdp+tp"),
        ({"tp": 2, "pp": 2}, "torch", "tp+pp"),
    ],
)
def test_names(axes, software, name):
    assert layout_name(Job(**config(performance={"software": software}, parallelism=axes))) == name
