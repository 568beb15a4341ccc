"""Weights that torchtitan gathers in float8."""

from __future__ import annotations

import pytest

from steptime.launch.torchtitan.job_config import read_torchtitan

JOB = """
[model]
flavor = "8B"
converters = ["float8"]
[training]
local_batch_size = 1
seq_len = 4096
[parallelism]
data_parallel_shard_degree = {shards}
context_parallel_degree = {cp}
[float8]
enable_fsdp_float8_all_gather = true
"""


@pytest.mark.parametrize(("shards", "cp", "gathered"), [(8, 1, True), (2, 4, True), (1, 8, None)])
def test_weights_that_context_parallelism_alone_shards_are_gathered_unconverted(shards, cp, gathered):
    """torchtitan v0.2.0 torchtitan/components/quantization/float8.py: in float8 if dp_shard is above 1 (dp_shard_enabled)."""
    found = read_torchtitan("a.toml", JOB.format(shards=shards, cp=cp))
    assert found.config["performance"]["precision"] == "fp8_tensorwise"
    assert found.config["performance"].get("fp8_params") is gathered
