"""What to change when a job does not fit: single changes, tried one by one, then a few together; the fastest step first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from steptime.base.config import ConfigError
from steptime.base.rows import Fix, Memory, Verdict
from steptime.base.words import argument
from steptime.fsdp import applies, unsynced
from steptime.job.job import Job
from steptime.software.recomputation import words

Change = dict[str, Any]
MOST = 3
"""Number of changes that are reported."""


class Answer(Protocol):
    """The parts of an estimate that judge a candidate."""

    @property
    def peaks(self) -> Memory:
        """Its memory and verdict."""
        ...

    @property
    def step_s(self) -> float:
        """Seconds of its step."""
        ...


def cheapest(job: Job, step_s: float, estimate: Callable[[Job], Answer], *, tight: bool = False) -> list[Fix]:
    """The changes that make `job` fit with the least step time per token, at most `MOST`.

    Every candidate is estimated whole, by `estimate`. Where no single change fits, several `together` are tried. Changes of
    the layout keep the number of devices and the batch. `tight`: where none fits, those that leave it tight.
    """
    fixes = estimated(job, step_s, estimate, candidates(job))
    if not fixes["fits"]:
        more = estimated(job, step_s, estimate, together(job))
        fixes = {verdict: found or more[verdict] for verdict, found in fixes.items()}
    told = fixes["fits"] or (fixes["tight"] if tight else [])
    return sorted(told, key=lambda fix: fix.step_s)[:MOST]


def estimated(
    job: Job, step_s: float, estimate: Callable[[Job], Answer], changes: Iterable[Change]
) -> dict[Verdict, list[Fix]]:
    """The changes after which `job` fits, or is tight, each estimated whole; those that break a rule are left out."""
    fixes: dict[Verdict, list[Fix]] = {"fits": [], "tight": []}
    for change in changes:
        try:
            other = job.replace(**change)
        except ConfigError:
            continue
        result = estimate(other)
        verdict = result.peaks.verdict
        if verdict in fixes:
            settings = " ".join(f"--set {path}={argument(value)}" for path, value in change.items())
            relative = result.step_s / step_s - 1.0
            peaks = result.peaks
            fixes[verdict].append(
                Fix(settings, peaks.peak_reserved_bytes, result.step_s, relative, verdict, peaks.most_bytes)
            )
    return fixes


def candidates(job: Job) -> Iterator[Change]:
    """Single changes: recomputation, micro-batch, ZeRO, passes of a pipeline, and one degree doubled at the cost of dp."""
    yield from recomputation(job)
    smaller = range(1, job.data.microbatch_sz // 2 + 1)
    yield from ({"data.microbatch_sz": n} for n in smaller if job.data.microbatch_sz % n == 0)
    if unsynced(job):
        yield {"parallelism.fsdp.no_sync": False}
    if job.parallelism.fsdp is None:
        yield from ({"parallelism.zero_level": level} for level in range(job.zero_level + 1, 4))
    if not job.sp and job.parallelism.tp > 1:
        yield {"parallelism.sp": True}
    yield from sharded(job)
    yield from passes(job)
    yield from layouts(job)


def passes(job: Job) -> Iterator[Change]:
    """More passes of torch's pipeline, each of which holds fewer micro-batches; a rule leaves out what does not divide them."""
    if job.parallelism.pp > 1 and applies(job):
        yield from ({"parallelism.pipeline_passes": job.parallelism.pipeline_passes * factor} for factor in (2, 4, 8))


def sharded(job: Job) -> Iterator[Change]:
    """The same modules under FSDP, for torch under DistributedDataParallel; also with whole layers recomputed, or one sequence.

    The profile is that of the same trainer under FSDP, else fsdp2.
    """
    name = job.software.name
    if job.software.family == "torch" and job.parallelism.dp > 1:
        change: Change = {"performance.software": name.removesuffix("-ddp") if name.endswith("-ddp") else "fsdp2"}
        one: Change = {"data.microbatch_sz": 1} if job.data.microbatch_sz > 1 else {}
        whole: Change = (
            {"performance.activation_checkpointing_type": "full"} if job.performance.recompute is None else {}
        )
        yield from (change, change | one, change | whole, change | one | whole)


def together(job: Job) -> Iterator[Change]:
    """Whole layers recomputed and one sequence where the plan has neither; these with more passes, or more devices of experts."""
    whole: Change = {}
    if job.recompute.granularity != "full" and job.performance.recompute is None:
        whole["performance.activation_checkpointing_type"] = "full"
    one: Change = {"data.microbatch_sz": 1} if job.data.microbatch_sz > 1 else {}
    change = whole | one
    several = [change] if whole and one else []
    yield from several
    yield from (some | more for more in passes(job) for some in (whole, one, *several) if some)
    p = job.parallelism
    experts = job.model.moe.n_experts if job.model.moe else 1
    for ep in range(p.ep + 1, experts + 1):
        if experts % ep == 0 and ep % p.ep == 0 and (p.dp * p.cp * p.tp) % ep == 0:
            yield {"parallelism.ep": ep}
            if change:
                yield change | {"parallelism.ep": ep}


def recomputation(job: Job) -> Iterator[Change]:
    """Every stronger setting of recomputation, and whole-layer recomputation of only some layers per chunk."""
    for name in words(job.software.family)[1:]:
        if job.performance.recompute is None and job.performance.activation_checkpointing_type != name:
            yield {"performance.activation_checkpointing_type": name}
    if job.recompute.granularity == "full" and job.recompute.method == "uniform":
        return
    layers = max(job.layers_per_chunk)
    for n in sorted({-(-layers * quarter // 4) for quarter in (1, 2, 3)}):
        if job.performance.activation_checkpointing_type in {None, "none"}:
            yield {"performance.recompute": {"granularity": "full", "method": "block", "n_layers": n}}


def layouts(job: Job) -> Iterator[Change]:
    """One of tp, pp and cp larger, dp smaller by the same factor: the number of devices stays."""
    p = job.parallelism
    for axis in ("tp", "pp", "cp"):
        for factor in (2, 4, 8):
            if p.dp % factor == 0:
                yield {f"parallelism.{axis}": getattr(p, axis) * factor, "parallelism.dp": p.dp // factor}
