"""The shipped plans: each loads, says what it is and where it comes from, and is the run it claims to be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from steptime.answer.result import estimate
from steptime.job.job import Job
from steptime.model.blocks import n_params

ROOT = Path(__file__).parents[1] / "configs"
FILES = sorted(ROOT.rglob("*.yaml"))
PUBLISHED = sorted((ROOT / "published").glob("*.yaml"))

# Korthikanti et al. 2022, table 5: seconds per iteration.
TABLE_5 = {
    ("megatron-22b", "full"): 1.42,
    ("megatron-22b", "selective"): 1.10,
    ("megatron-175b", "full"): 18.13,
    ("megatron-175b", "selective"): 13.75,
    ("megatron-530b", "full"): 49.05,
    ("megatron-530b", "selective"): 37.83,
    ("megatron-1t", "full"): 94.42,
    ("megatron-1t", "selective"): 71.49,
}


def head(path: Path) -> list[str]:
    """The comment block at the top of a file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]


def measured(path: Path) -> dict[str, float]:
    """The `# measured: NAME: VALUE` lines of a plan."""
    found = re.findall(r"^# measured: (\w+): ([0-9.]+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: float(value) for name, value in found}


def names(paths):
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.fixture(scope="module")
def plans():
    """Every shipped plan, loaded."""
    return {path: Job.load(path) for path in FILES}


def test_there_are_plans_of_every_kind(plans):
    jobs = list(plans.values())
    assert len(jobs) >= 18
    assert len(PUBLISHED) == 8
    assert {job.parallelism.devices for job in jobs} >= {1, 64, 1024, 16384}
    assert any(job.parallelism.fsdp for job in jobs)
    assert any(job.cross_dc for job in jobs)
    assert any(job.run and job.run.price_per_device_hour for job in jobs)
    assert any(job.performance.recompute and job.performance.recompute.modules for job in jobs)


def test_the_first_line_counts_the_devices(plans):
    """`# 1,024 x H100: ...`: as many as the layout has, of the machine's kind."""
    for path, job in plans.items():
        count, kind = re.match(r"# ([0-9,]+) x (\w+): ", head(path)[0]).groups()
        assert int(count.replace(",", "")) == job.parallelism.devices, path.name
        assert kind in job.machine.accelerator.name.upper(), path.name


def test_plans_say_where_they_come_from():
    words = ("arXiv", "README", "github", ".py", "not a published run", "assumed", "torchtitan")
    assert [path.name for path in FILES if not any(word in " ".join(head(path)) for word in words)] == []


def test_lines_fit_the_page():
    lines = ((path.name, line) for path in FILES for line in path.read_text(encoding="utf-8").splitlines())
    assert [(name, line) for name, line in lines if len(line) > 128] == []


@pytest.mark.parametrize("plan", PUBLISHED, ids=names(PUBLISHED))
def test_the_published_rows(plan):
    """Each of the eight rows of table 5 once, with its own step time, as the paper ran it."""
    job = Job.load(plan)
    kind = job.performance.activation_checkpointing_type
    assert measured(plan) == {"step_time_s": TABLE_5[job.model.name, kind]}
    assert job.sp is (kind == "selective")
    assert (job.parallelism.dp, job.data.seqlen, job.performance.precision) == (1, 2048, "fp16")
    assert job.performance.software == "megatron-2021"
    assert job.machine.name == "selene"


def test_the_published_rows_are_all_there():
    jobs = [Job.load(plan) for plan in PUBLISHED]
    assert {(job.model.name, job.performance.activation_checkpointing_type) for job in jobs} == set(TABLE_5)


@pytest.mark.parametrize(
    ("name", "elements", "microbatches"),
    [
        ("llama3_70b.yaml", 70_553_706_496, 64),
        ("llama3_405b.yaml", 405_853_388_800, 16),
        ("gpt3_175b_a100.yaml", 174_615_846_912, 192),
        ("megatron_1t.yaml", 1_008_038_758_400, 512),
        ("gpt2_1gpu.yaml", 124_373_760, 40),  # nanoGPT's 124M: biases gone, 47 rows more
    ],
)
def test_sizes(name, elements, microbatches):
    job = Job.load(ROOT / name)
    assert (n_params(job.model), job.microbatches) == (elements, microbatches)


def test_llama3_405b_has_its_ends_on_chunks_of_their_own():
    """Grattafiori et al. 2024, section 3.3.2: the first chunk has only the embedding, the last only the head and the loss."""
    assert Job.load(ROOT / "llama3_405b.yaml").layers_per_chunk == [0, *[1] * 126, 0]


PUBLISHED_MFU = {"deepseek_v3.yaml": 0.1953}
"""2.664 M device-hours for 14.8 T tokens (arXiv 2412.19437, table 1) are 1,543 tokens/s on a device, of 250.4 GFLOP with causal
attention halved: 386.4 of 1,979 TFLOP/s."""


@pytest.mark.parametrize("path", FILES, ids=names(FILES))
def test_estimates_and_fits(path, plans):
    """Every shipped plan runs on its machine, at a rate below the peak; a measured one is near its run.

    That guards against a plan that is not the run it names; accuracy is the business of `3dtrn validate`. One rate is published,
    below those of all others; no constant was fitted to it.
    """
    answer = estimate(plans[path])
    if said := measured(path):
        assert answer.time.step_s == pytest.approx(said["step_time_s"], rel=0.25)
    assert answer.memory.verdict in {"fits", "tight"}
    assert answer.memory.peak_reserved_bytes + sum(answer.memory.overhead_bytes) <= answer.memory.capacity_bytes
    mfu = answer.throughput.mfu
    assert mfu == pytest.approx(PUBLISHED_MFU[path.name], rel=0.05) if path.name in PUBLISHED_MFU else 0.2 < mfu < 0.8
    assert sum(answer.time.parts_s.values()) == pytest.approx(answer.time.step_s)
