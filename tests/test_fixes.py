"""Fixes: what is proposed makes the job fit, as the command line takes it."""

from __future__ import annotations

import shlex
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steptime.answer.fixes import candidates, cheapest
from steptime.answer.result import estimate
from steptime.answer.verdict import Candidate
from steptime.base.config import ConfigError
from steptime.base.rows import Fix
from steptime.base.words import argument
from steptime.job.job import Job
from steptime.search.found_fixes import fixes as from_search

CONFIG = """
model: {model}
parallelism: {{tp: {tp}, pp: {pp}, dp: {dp}}}
data: {{gbs: {gbs}, seqlen: {seqlen}, microbatch_sz: {batch}}}
hardware: {machine}
"""


def text(model="llama3-8b", tp=2, pp=1, dp=4, gbs=64, seqlen=8192, batch=4, machine="dgx-h100") -> str:
    return CONFIG.format(model=model, tp=tp, pp=pp, dp=dp, gbs=gbs, seqlen=seqlen, batch=batch, machine=machine)


def settings_of(fix: str) -> list[str]:
    """The arguments of the `--set` options as a shell would hand them over."""
    words = shlex.split(fix)
    assert words[::2] == ["--set"] * (len(words) // 2)
    return words[1::2]


def test_a_job_that_fits_needs_none():
    room = ["hardware.overrides={accelerator.usable_memory_bytes: 180e9}"]
    answer = estimate(Job.load(text(batch=1), room))
    assert answer.memory.fits
    assert answer.fixes == answer.to_dict()["memory"]["fixes"] == []


def test_fixes_are_three_at_most_cheapest_first_and_work_as_they_are_printed():
    config = text()
    answer = estimate(Job.load(config))
    assert answer.memory.verdict == "does_not_fit"
    fixes = answer.fixes
    assert 1 <= len(fixes) <= 3
    assert [fix.step_s for fix in fixes] == sorted(fix.step_s for fix in fixes)
    for fix in fixes:
        fixed = estimate(Job.load(config, settings_of(fix.set)))
        assert fixed.memory.verdict == "fits"
        assert fixed.step_s == pytest.approx(fix.step_s)
        assert fixed.memory.peak_reserved_bytes == pytest.approx(fix.peak_reserved_bytes)
        assert fix.step_change == pytest.approx(fixed.step_s / answer.step_s - 1)
        assert fixed.job.parallelism.devices == answer.devices
        assert fixed.job.data.gbs == answer.job.data.gbs


@settings(deadline=None, max_examples=15)
@given(
    st.sampled_from(["llama3-8b", "gpt2-xl", "qwen2.5-14b", "llama2-13b"]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 4, 8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["dgx-a100-40", "dgx-h100", "dgx-1v"]),
)
def test_every_fix_of_every_job_is_runnable(model, tp, pp, dp, batch, machine):
    config = text(model, tp, pp, dp, 8 * dp * batch, 1024, batch, machine)
    try:
        answer = estimate(Job.load(config, ["performance.precision=fp16"]))
    except ConfigError:
        return
    assert len({fix.verdict for fix in answer.fixes}) <= 1  # tight ones only where none fits
    for fix in answer.fixes:
        fixed = estimate(Job.load(config, ["performance.precision=fp16", *settings_of(fix.set)]))
        assert fixed.memory.verdict == fix.verdict, fix.set
        assert fixed.step_s == pytest.approx(fix.step_s)


@pytest.mark.parametrize(
    ("software", "set_"),
    [
        ("torch", "--set performance.software=fsdp2"),
        ("accelerate-ddp", "--set performance.software=accelerate"),
        ("torchtitan-ddp", "--set performance.software=torchtitan"),
    ],
)
def test_a_job_of_ddp_that_does_not_fit_is_told_of_fsdp(software, set_):
    """8 B weights, gradients and two moments in fp32 take 4 x 32 GB on one device of 80 GB; an eighth of them leaves room.

    Profiles of DDP shard nothing, so that FSDP is no layout of theirs.
    """
    plan = Job.load(
        text(tp=1, dp=8, batch=1, seqlen=4096), [f"performance.software={software}", "performance.param_dtype=fp32"]
    )
    answer = estimate(plan)
    assert answer.memory.verdict == "does_not_fit"
    found = from_search(answer)
    assert len(found) <= 3
    assert [fix.step_s for fix in found] == sorted(fix.step_s for fix in found)
    (told,) = [fix for fix in found if fix.set.startswith(set_)]
    after = estimate(
        Job.load(text(tp=1, dp=8, batch=1, seqlen=4096), ["performance.param_dtype=fp32", *settings_of(told.set)])
    )
    assert (after.memory.verdict, after.step_s) == ("fits", pytest.approx(told.step_s))


def test_no_change_helps_a_model_that_is_far_too_large():
    answer = estimate(Job.load(text("megatron-1t", tp=1, dp=1, gbs=1, seqlen=2048, batch=1)))
    assert answer.memory.verdict == "does_not_fit"
    assert answer.fixes == []


def test_a_tight_job_is_told_what_makes_it_fit():
    """Allocated memory fits; only what the allocator holds does not."""
    answer = estimate(Job.load(text(batch=1)))
    room = answer.memory.peak_reserved_bytes + sum(answer.memory.overhead_bytes) - 1
    less = [f"hardware.overrides={{accelerator.usable_memory_bytes: {room}}}"]
    tight = estimate(Job.load(text(batch=1), less))
    assert tight.memory.verdict == "tight"
    assert tight.fixes
    for fix in tight.fixes:
        assert estimate(Job.load(text(batch=1), [*less, *settings_of(fix.set)])).memory.fits


def test_candidates_change_one_thing_and_keep_the_devices():
    job = Job.load(text())
    changes = list(candidates(job))
    assert len(changes) == len({str(change) for change in changes})
    for change in changes:
        degrees = change.keys() & {"parallelism.tp", "parallelism.pp", "parallelism.cp"}
        assert len(change) == (2 if degrees else 1)
        if degrees:
            layout = job.parallelism.model_dump() | {key.partition(".")[2]: value for key, value in change.items()}
            assert layout["tp"] * layout["pp"] * layout["cp"] * layout["dp"] == job.parallelism.devices
    kinds = {key for change in changes for key in change}
    assert kinds == {
        "performance.activation_checkpointing_type",
        "performance.recompute",
        "data.microbatch_sz",
        "parallelism.zero_level",
        "parallelism.cp",
        "parallelism.tp",
        "parallelism.pp",
        "parallelism.dp",
    }


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (True, "true"),
        (8, "8"),
        ("full", "full"),
        ({"granularity": "full", "n_layers": 2}, "'{granularity: full, n_layers: 2}'"),
    ],
)
def test_words(value, said):
    assert argument(value) == said


def test_changes_that_leave_a_job_tight_are_told_where_none_fits():
    """Of all single changes only a micro-batch of 1 helps, and not wholly: 2 s a step after 1 s are 100 % more."""
    data = {"gbs": 8, "seqlen": 2048, "microbatch_sz": 2}
    job = Job(model="llama3-8b", parallelism={"tp": 1, "pp": 1, "dp": 1}, data=data, hardware="dgx-h100")

    def answered(other):
        verdict = "tight" if other.data.microbatch_sz == 1 else "does_not_fit"
        return SimpleNamespace(
            step_s=2.0, peaks=SimpleNamespace(verdict=verdict, peak_reserved_bytes=5.0, most_bytes=6.0)
        )

    assert cheapest(job, 1.0, answered) == []
    assert cheapest(job, 1.0, answered, tight=True) == [Fix("--set data.microbatch_sz=1", 5.0, 2.0, 1.0, "tight", 6.0)]


@pytest.mark.parametrize("software", ["megatron-core", "fsdp2"])
def test_a_candidate_is_judged_as_its_estimate_and_timed_only_when_asked(software):
    """Most candidates do not fit: their memory says so before the pipeline is walked."""
    plan = {"model": "llama3-8b", "devices": 8, "parallelism": {"tp": 1, "pp": 1}, "hardware": "h100"}
    data = {"gbs": 16, "seqlen": 8192, "microbatch_sz": 2}
    job = Job(**plan, data=data, performance={"software": software})
    tried, whole = Candidate(job), estimate(job)
    assert tried.peaks == whole.peaks
    assert "timing" not in vars(tried)
    assert tried.step_s == whole.step_s


def test_experts_over_more_devices_together_with_recomputation_and_one_sequence():
    """DeepSeek-V3 on 256 H100 under FSDP: no single change is enough, three together are."""
    config = """
    model: deepseek-v3
    devices: 256
    parallelism: {tp: 1, pp: 1, ep: 1, fsdp: {}}
    performance: {software: torchtitan, activation_checkpointing_type: per-op}
    data: {gbs: 2048, seqlen: 4096, microbatch_sz: 4}
    hardware: {node_type: h100}
    """
    plan = Job.load(config)
    fixes = cheapest(plan, 1.0, Candidate)
    assert fixes
    for fix in fixes:
        said = settings_of(fix.set)
        assert {line.partition("=")[0] for line in said} == {
            "performance.activation_checkpointing_type",
            "data.microbatch_sz",
            "parallelism.ep",
        }
        assert estimate(Job.load(config, said)).memory.verdict == "fits"
        for alone in said:
            assert estimate(Job.load(config, [alone])).memory.verdict != "fits"


def test_more_passes_of_a_pipeline_alone_and_with_whole_layers_recomputed():
    """GPipe holds all micro-batches of a pass: 32 sequences on 4 ranks are 8 in one pass, 4 in each of two.

    On 42 GB neither full recomputation, which keeps a layer's input per micro-batch, nor four passes of two micro-batches fit.
    """
    config = """
    model: llama3-8b
    parallelism: {tp: 1, pp: 2, vpp: 2, dp: 4, schedule: gpipe, fsdp: {}}
    performance: {software: torchtitan, activation_checkpointing_type: per-op}
    data: {gbs: 32, seqlen: 8192, microbatch_sz: 1}
    hardware: {node_type: dgx-h100, overrides: {accelerator.usable_memory_bytes: ROOM}}
    """
    wide = config.replace("ROOM", "80e9")
    assert "--set parallelism.pipeline_passes=4" in [fix.set for fix in estimate(Job.load(wide)).fixes]
    narrow = config.replace("ROOM", "42e9")
    fastest = estimate(Job.load(narrow)).fixes[0]
    said = settings_of(fastest.set)
    assert said == ["performance.activation_checkpointing_type=full", "parallelism.pipeline_passes=4"]
    assert estimate(Job.load(narrow, said)).memory.verdict == "fits"
    assert {estimate(Job.load(narrow, [alone])).memory.verdict for alone in said} <= {"tight", "does_not_fit"}
    twice = Job.load(wide, ["parallelism.pipeline_passes=2"])
    assert {"parallelism.pipeline_passes": 4} in list(candidates(twice))
    assert not [change for change in candidates(Job.load(text(pp=2, dp=2))) if "parallelism.pipeline_passes" in change]
