"""Hybrid models from Megatron's flags."""

from __future__ import annotations

import pytest

from steptime.base.config import ConfigError
from steptime.launch.megatron.sources import read_megatron
from steptime.launch.reading import to_job
from steptime.launch.write.export import write

SCRIPT = """#!/bin/bash
torchrun --nproc_per_node 8 pretrain_mamba.py --use-mcore-models {pattern} \\
  --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec --hidden-size 1024 --num-attention-heads 16 \\
  --group-query-attention --num-query-groups 8 --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 4 \\
  --global-batch-size 32 --tensor-model-parallel-size 1 --pipeline-model-parallel-size {pp} --bf16 --vocab-size 50257 \\
  --tokenizer-type NullTokenizer --position-embedding-type none
"""


def reading(pattern, pp=1):
    return read_megatron("run.sh", SCRIPT.format(pattern=pattern, pp=pp))


def plan(pattern, pp=1):
    return to_job(reading(pattern, pp), {"hardware.node_type": "dgx-h100"})


def test_a_pattern_beside_its_number_of_layers():
    """Sizes of the Mamba layers are Megatron's defaults where not set: heads of 64 values, 128 states, 8 groups."""
    job = plan("--num-layers 4 --is-hybrid-model --hybrid-override-pattern M-M* --mamba-num-heads 16")
    assert (job.model.n_layers, job.model.hybrid_pattern) == (4, "M-M*")
    assert job.model.mamba.model_dump() | {"chunk_sz": 128, "conv_width": 4} == {
        "n_heads": 16,
        "head_dim": 64,
        "state_dim": 128,
        "n_groups": 8,
        "conv_width": 4,
        "chunk_sz": 128,
    }


def test_bars_cut_a_pattern_into_stages():
    job = plan("--hybrid-layer-pattern 'M-M-|M*|-M|-'", pp=4)
    assert job.model.hybrid_pattern == "M-M-M*-M-"
    assert job.layers_per_chunk == [4, 2, 2, 1]
    interleaved = plan("--hybrid-layer-pattern 'M-|M*|-M|-M'", pp=2)
    assert (interleaved.parallelism.vpp, interleaved.layers_per_chunk) == (2, [2, 2, 2, 2])


def test_depths_of_prediction_beside_a_pattern():
    """Each is attention and experts, and says how many there are (core hybrid_layer_allocation.py, parse_hybrid_pattern)."""
    experts = "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm"
    job = plan(f"--hybrid-layer-pattern MEM*E/*E/*E --mtp-use-repeated-layer {experts}")
    assert (job.model.hybrid_pattern, job.model.mtp, job.model.mtp_repeated) == ("MEM*E", 2, True)
    written = write(job, "megatron").text
    assert "--hybrid-layer-pattern 'MEM*E/*E/*E'" in written
    assert "--mtp-use-repeated-layer" in written


def test_a_pattern_of_another_length():
    with pytest.raises(ConfigError, match="the hybrid pattern has 4 layers, num_layers is 5"):
        plan("--num-layers 5 --hybrid-override-pattern M-M*")


@pytest.mark.parametrize(
    ("pattern", "note"),
    [
        ("--num-layers 4 --is-hybrid-model --hybrid-attention-ratio 0.1", "hybrid layers without a pattern"),
        ("--hybrid-layer-pattern 'M-M*/*-'", "multi-token prediction layers other than *E"),
    ],
)
def test_what_is_not_modeled_is_refused(pattern, note):
    found = [flag for flag in reading(pattern).flags if flag.status == "unmodeled"]
    assert note in " ".join(flag.note for flag in found)
