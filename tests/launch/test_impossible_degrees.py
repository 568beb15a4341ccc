"""Degrees of parallelism that no job has, and those that a table does not list."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptime.base.config import ConfigError
from steptime.launch.read import read
from steptime.launch.reading import to_job

SETS = {"hardware.node_type": "dgx-h100"}
SWIFT = (
    "NPROC_PER_NODE=8 swift sft --model Qwen/Qwen2.5-7B --train_type full --torch_dtype bfloat16 --max_length 2048 "
    "--per_device_train_batch_size 1 --gradient_accumulation_steps 1 --deepspeed zero3 --sequence_parallel_size"
)
AXOLOTL = (
    "base_model: NousResearch/Meta-Llama-3-8B\nmicro_batch_size: 1\ngradient_accumulation_steps: 1\nsequence_len: 2048\n"
    "bf16: true\noptimizer: adamw_torch_fused\nsequence_parallel_degree: "
)


@pytest.mark.parametrize("more", [{}, {"parallelism.tp": 2}])
def test_no_ranks_of_a_sequence_are_refused(tmp_path: Path, more: dict[str, int]) -> None:
    (tmp_path / "run.sh").write_text(f"#!/bin/bash\n{SWIFT} 0\n")
    with pytest.raises(ConfigError, match=r"parallelism\.cp"):
        to_job(read("swift", str(tmp_path / "run.sh"), SETS | more), SETS | more)


def test_a_launchers_devices_without_context_parallelism_are_refused(tmp_path: Path) -> None:
    """`accelerate launch` of Axolotl starts the devices of a node: 0 does not divide them."""
    config = AXOLOTL.replace("sequence_parallel_degree", "context_parallel_size")
    (tmp_path / "job.yaml").write_text(f"{config}0\n")
    with pytest.raises(ConfigError, match=r"parallelism\.cp"):
        to_job(read("axolotl", str(tmp_path / "job.yaml"), SETS), SETS)


def test_any_number_of_ranks_of_a_sequence_is_told(tmp_path: Path) -> None:
    """Axolotl's ring attention: its exchange is not that of the profile, but of one rank there is none."""
    for degree, told in ((1, []), (3, ["sequence_parallel_degree"]), (32, ["sequence_parallel_degree"])):
        (tmp_path / "job.yaml").write_text(f"{AXOLOTL}{degree}\n")
        found = read("axolotl", str(tmp_path / "job.yaml"), SETS | {"parallelism.dp": 8})
        assert [flag.name for flag in found.of("approximated")] == told
