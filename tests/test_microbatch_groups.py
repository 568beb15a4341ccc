"""Interleaving of micro-batches that pp does not divide: the group that is taken, said, exported and searched with."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from steptime import Job, estimate
from steptime.answer.assumptions import assumptions
from steptime.launch.write.export import read_back, write
from steptime.schedule import walk
from steptime.search.pipeline import ChunkFigures, Stages
from steptime.search.screen import Counts, Screen
from steptime.search.space import Axes
from steptime.search.walk_columns import makespans

GPT_OSS = Path(__file__).parent / "data" / "dlcalc" / "gpt_oss_120b.yaml"


def test_the_plan_names_the_group():
    """64 micro-batches of 6 stages: groups of 6 would leave 4, of 7 one; 8 divides 64. 66 micro-batches are groups of 6."""
    found = Job.load(GPT_OSS)
    assert found.to_config()["parallelism"]["microbatch_group_sz"] == 8
    assert any(line.startswith("parallelism.microbatch_group_sz: 8, the smallest") for line in assumptions(found))
    even = found.replace(**{"data.gbs": 66 * 128})
    assert "microbatch_group_sz" not in even.to_config()["parallelism"]
    assert not any("microbatch_group_sz" in line for line in assumptions(even))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("megatron", "--microbatch-group-size-per-virtual-pipeline-stage 8"),
        ("bridge", "microbatch_group_size_per_vp_stage: 8"),
    ],
)
def test_export_writes_the_group(kind, words):
    job = Job.load(GPT_OSS)
    assert job.parallelism.microbatch_group_sz is None
    written = write(job, kind)
    assert words in written.text
    back = read_back(written.text, written.reader, written.left_out)
    assert back.parallelism.microbatch_group_sz == 8
    assert estimate(back).step_s == estimate(job).step_s


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (4, 1), (2, 3), (4, 3), (3, 4)])
@pytest.mark.parametrize("blocking", [True, False])
def test_columns_walk_as_one_layout_does(pp, vpp, blocking):
    """Seconds at random, which seldom settle within a few micro-batches: the makespan is the schedule's own walk."""
    draw = np.random.default_rng(pp * 10 + vpp)
    microbatches = np.array([pp, pp + 1, 2 * pp, 4 * pp - 1, 4 * pp, 5 * pp, 32 * pp, 32 * pp + 1, 33 * pp])
    shape = (2, microbatches.size)
    chunk_figures = [
        [ChunkFigures(draw.uniform(1, 9, shape), draw.uniform(2, 18, shape), 0.0, 0.0, 0.0) for _ in range(vpp)]
        for _ in range(pp)
    ]
    sends = [draw.uniform(0, 2, microbatches.size) for _ in range(pp)]
    stages = Stages("interleaved", pp, vpp, ((),) * pp, tuple((stage,) for stage in range(pp)), 1)
    found = makespans(stages, chunk_figures, microbatches, sends, blocking=blocking)
    for choice, row in np.ndindex(*shape):
        forward = [[figures.forward_s[choice, row] for figures in stage] for stage in chunk_figures]
        backward = [[figures.backward_s[choice, row] for figures in stage] for stage in chunk_figures]
        between = [float(send[row]) for send in sends]
        alone = walk("interleaved", pp, vpp, int(microbatches[row]), forward, backward, between, blocking=blocking)
        assert found[choice, row] == pytest.approx(alone.makespan_s, rel=1e-9)


PLAN = """
model: {n_layers: 12, hidden_sz: 1024, inter_sz: 3072, n_q_heads: 16, n_kv_heads: 4, vocab_sz: 50257}
parallelism: {tp: 1, pp: 1, dp: 4}
data: {gbs: 64, seqlen: 2048, microbatch_sz: 1}
hardware: dgx-h100
"""


def test_the_screen_beside_estimates(tmp_path):
    """24 devices for 64 sequences: 3 and 6 stages divide none of the counts of micro-batches."""
    (tmp_path / "plan.yaml").write_text(PLAN)
    job = Job.load(tmp_path / "plan.yaml")
    draw, blocks = random.Random(1), [block for _, block in Screen(job, Axes(), Counts()).blocks(24, 64)]
    blocks = [block for block in blocks if block.stages.vpp > 1 and block.stages.pp in {3, 6}]
    errors = []
    for _ in range(20):
        block = draw.choice(blocks)
        choice, row = draw.randrange(len(block.choices)), int(draw.choice(np.flatnonzero(block.legal).tolist()))
        found = estimate(job.replace(**block.changes(choice, row)))
        assert found.job.microbatches % found.job.parallelism.pp
        assert block.allocated_bytes[choice, row] == found.memory.peak_allocated_bytes + sum(
            found.memory.overhead_bytes
        )
        errors.append(abs(block.step_s[choice, row] / found.step_s - 1.0) if found.memory.fits else 0.0)
    assert max(errors) < 0.01
    assert errors.count(0.0) < 20
