"""Rules for a pipeline: virtual stages, schedule, groups of micro-batches."""

from __future__ import annotations

from steptime.base.num import maximum
from steptime.job.facts import Facts
from steptime.job.limits import Rule


def group_taken(f: Facts) -> dict[str, int]:
    """The `microbatch_group_sz` of a job that sets none and that Megatron-Core does not run with its default, pp."""
    grouped = f.vpp > 1 and f.framework.groups and f.schedule_said in {None, "interleaved"}
    if not grouped or f.microbatch_group_sz is not None or f.microbatches % f.pp == 0:
        return {}
    return {"microbatch_group_sz": f.group_choice}


PIPELINE_RULES = [
    Rule(
        "vpp needs pp",
        "parallelism.vpp",
        "virtual stages need pp > 1 (got {f.vpp} with pp {f.pp}); use 1",
        lambda f: (f.vpp == 1) | (f.pp > 1),
    ),
    Rule(
        "interleaving framework",
        "parallelism.vpp",
        "{f.software} does not support the interleaved schedule (got {f.vpp}); use 1",
        lambda f: (f.vpp == 1) | ("interleaved" in f.framework.schedules),
    ),
    Rule(
        "schedule of the framework",
        "parallelism.schedule",
        "{f.software} has no {f.schedule_said} schedule; use one of {f.schedule_words}",
        lambda f: f.schedule_said in {None, *f.framework.schedules} or (f.schedule_said == "interleaved"),
    ),
    Rule(
        "split backward in one stage",
        "parallelism.schedule",
        "{f.schedule_said} needs pp of 2 or more (got {f.pp}); one stage has no bubble to fill: remove it",
        lambda f: (f.pp > 1) | (not f.split_backward),
    ),
    Rule(
        "vpp of a V schedule",
        "parallelism.vpp",
        "{f.schedule_said} needs vpp {f.chunks_needed} (got {f.vpp}); set it to {f.chunks_needed}",
        lambda f: (f.chunks_needed is None) | (f.vpp == f.chunks_needed),
    ),
    Rule(
        "dualpipev micro-batches",
        "data.gbs",
        "dualpipev needs at least 2 * pp = {f.chunks} micro-batches (got {f.microbatches_of_a_pass}); raise gbs, or lower dp",
        lambda f: (f.schedule_said != "dualpipev") | (f.microbatches_of_a_pass >= 2 * f.pp),
    ),
    Rule(
        "schedule with vpp",
        "parallelism.schedule",
        "vpp {f.vpp} needs interleaved (got {f.schedule_said!r}); remove schedule or use vpp 1",
        lambda f: (f.vpp == 1) | (f.schedule_said != "1f1b") & ((f.schedule_said != "gpipe") | f.framework.rounds),
    ),
    Rule(
        "interleaved needs vpp",
        "parallelism.schedule",
        "interleaved needs vpp > 1 (got vpp {f.vpp}); set vpp or use 1f1b",
        lambda f: (f.vpp > 1) | (f.schedule_said != "interleaved"),
    ),
    # NVIDIA/Megatron-LM@core_v0.9.0 megatron/core/pipeline_parallel/schedules.py:632 and before: no groups of another size
    Rule(
        "interleaving in groups of pp",
        "data.gbs",
        "{f.software} interleaves only micro-batches that are a multiple of pp {f.pp} (got {f.microbatches}); "
        "nearest: gbs {f.gbs_choices}",
        lambda f: (
            (f.vpp == 1)
            | f.framework.groups
            | f.framework.rounds
            | (f.microbatches % f.pp == 0)
            | (f.gbs % f.batch != 0)
        ),
    ),
    # megatron/core/pipeline_parallel/schedules.py (0.16.1), :995-1018: a group from pp to the micro-batches, and the last one
    Rule(
        "interleaving from pp micro-batches",
        "data.gbs",
        "interleaving needs at least pp {f.pp} micro-batches of dp*microbatch_sz = {f.batch} (got {f.microbatches}); "
        "raise gbs, or lower pp",
        lambda f: (f.vpp == 1) | (not f.framework.groups) | (f.microbatches >= f.pp) | (f.gbs % f.batch != 0),
    ),
    Rule(
        "group needs interleaving",
        "parallelism.microbatch_group_sz",
        "has an effect only in interleaved pipelines of Megatron-Core; remove it",
        lambda f: (
            (f.microbatch_group_sz is None)
            | (f.vpp > 1) & f.framework.groups & (f.schedule_said in {None, "interleaved"})
        ),
    ),
    Rule(
        "group within the micro-batches",
        "parallelism.microbatch_group_sz",
        "must be from pp {f.pp} to the {f.microbatches} micro-batches, and the last group empty or at least pp "
        "(got {f.microbatch_group_sz}); use {f.group_choice}",
        lambda f: (
            True
            if f.microbatch_group_sz is None
            else (f.vpp == 1)
            | (f.microbatches < f.pp)
            | (f.microbatch_group_sz >= f.pp)
            & (f.microbatch_group_sz <= f.microbatches)
            & ((f.microbatches % f.microbatch_group_sz == 0) | (f.microbatches % f.microbatch_group_sz >= f.pp))
        ),
    ),
    # torch/distributed/pipelining/schedules.py, ScheduleInterleaved1F1B: rounds = max(1, microbatches // pp)
    Rule(
        "interleaving in rounds",
        "data.gbs",
        "torch's interleaved schedule needs micro-batches that divide into "
        "max(1, microbatches // pp) rounds (got {f.microbatches_of_a_pass} with pp {f.pp}); nearest: gbs {f.gbs_choices}",
        lambda f: (
            (f.vpp == 1)
            | (not f.framework.rounds)
            | (f.schedule_said not in {None, "interleaved", "zero_bubble"})
            | (f.microbatches_of_a_pass % maximum(1, f.microbatches_of_a_pass // f.pp) == 0)
        ),
    ),
    # torchtitan/trainer.py@b5bcd76c, train_step; NVIDIA-NeMo/Automodel@36044ad3 recipes/llm/benchmark.py, run_benchmark: ga_steps
    Rule(
        "passes of a pipeline",
        "parallelism.pipeline_passes",
        "local batches run one after the other through torch's pipelines under FSDP (got {f.pipeline_passes} with pp {f.pp}, "
        "software {f.software}); use 1",
        lambda f: (
            (f.pipeline_passes == 1) | (f.pp > 1) & f.framework.rounds & (f.zero_level == 3 or f.fsdp is not None)
        ),
    ),
    Rule(
        "passes divide the micro-batches",
        "parallelism.pipeline_passes",
        "must divide the {f.microbatches} micro-batches of a step (got {f.pipeline_passes}); use another, or change gbs",
        lambda f: f.microbatches % f.pipeline_passes == 0,
    ),
]
