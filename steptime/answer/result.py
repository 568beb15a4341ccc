"""estimate(job): combines parts, pipeline walk, data parallelism and memory into the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from math import exp, isinf
from pathlib import Path
from typing import Any, ClassVar, Literal

from steptime.answer import fixes, refusals, scaling, switches, tables
from steptime.answer.assumptions import assumptions, host_bound
from steptime.answer.evidence import unjudged
from steptime.answer.flops import step_flops
from steptime.answer.interval import step_interval
from steptime.answer.verdict import Candidate, between_steps, stage_memory
from steptime.answer.whole_run import whole_run
from steptime.base.records import record
from steptime.base.rows import (
    SCHEMA,
    Basis,
    CollectiveRow,
    Fix,
    Flops,
    GemmRow,
    Memory,
    Params,
    Pipeline,
    Saving,
    Throughput,
    Time,
    WeakScaling,
    frame,
)
from steptime.base.words import counted
from steptime.job.assembly import Assembly
from steptime.job.job import Job
from steptime.model.blocks import n_trained
from steptime.timing.step_parts import hardware_flops, host_seconds, pipeline, step_parts
from steptime.timing.step_time import StepTime, step_time


@record
class Estimate:
    """The result of `estimate`. The step, the memory of every stage and the verdict are computed at once; tables on request.

    `to_dict()` is the document of `3dtrn --json`; in a notebook the object shows itself as tables.
    """

    job: Job
    assembly: Assembly
    timing: StepTime
    peaks: Memory
    """The memory of every stage, and the verdict; between steps without what blocks keep of one tensor for the next."""

    draw: ClassVar[Callable[..., str] | None] = None
    """How a notebook displays an estimate; set by `report.notebook`."""
    find_fixes: ClassVar[Callable[..., list[Fix]] | None] = None
    """Finds changes that make a job fit: the search of all layouts where `search.lazy_fixes` sets it; else single changes."""

    @cached_property
    def memory(self) -> Memory:
        """The memory of every stage, and the verdict."""
        return between_steps(self.peaks, self.assembly, self.timing.states)

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return self.timing.step_s

    @property
    def devices(self) -> int:
        """Devices of the job."""
        return self.job.parallelism.devices

    @property
    def nodes(self) -> int:
        """Nodes that hold them; the last one may be partly used."""
        return -(-self.devices // self.job.machine.devices_per_node)

    @property
    def fits(self) -> bool:
        """Whether the verdict is fits."""
        return self.peaks.fits

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization of the dense peak, causal attention halved."""
        return self.throughput.mfu

    @cached_property
    def assumptions(self) -> list[str]:
        """Defaults with their origin, assumptions, what is not verified, and notes on the layout."""
        return [*self.host_bound, *assumptions(self.job)]

    @property
    def host_bound(self) -> list[str]:
        """A line where the step waits for the host."""
        return host_bound(host_seconds(self.timing), self.step_s, self.job.software)

    @cached_property
    def params(self) -> Params:
        """Parameter counts."""
        return tables.params(self.assembly)

    @cached_property
    def trained_params(self) -> int:
        """Parameters that are trained: all, or those of adapters."""
        job = self.job
        return n_trained(job.model, job.data.seqlen, job.software) if job.model.lora else self.params.total

    @cached_property
    def flops(self) -> Flops:
        """FLOPs of one step of the whole job."""
        return step_flops(self.assembly, hardware_flops(self.timing))

    @cached_property
    def time(self) -> Time:
        """The step and its parts, with the interval."""
        found = step_interval(self.job)
        low, high, rests = found.low, found.high, found.evidence
        calibration = self.job.performance.calibration
        if calibration:  # the factor holds the bias of runs like the team's own already
            low, high = (low - high) / 2.0, (high - low) / 2.0
        known = calibration.covers if calibration else []
        beyond = rests.beyond + [line for key, line in unjudged(self.job).items() if key not in known]
        basis = Basis(rests.nearest, rests.n, beyond, "extrapolated" if beyond else rests.word)
        return step_parts(self.timing)._replace(
            step_s_p10=self.step_s * exp(low), step_s_p90=self.step_s * exp(high), basis=basis
        )

    @cached_property
    def pipeline(self) -> Pipeline:
        """The pipeline's walk."""
        return pipeline(self.timing)

    @cached_property
    def throughput(self) -> Throughput:
        """Tokens per second and utilization."""
        return tables.throughput(self.job, self.step_s, self.flops)

    @cached_property
    def gemms(self) -> list[GemmRow]:
        """Every projection, per stage kind and pass."""
        return tables.gemms(self.timing)

    @cached_property
    def collectives(self) -> list[CollectiveRow]:
        """Every kind of collective."""
        return tables.collectives(self.timing, self.time)

    @cached_property
    def weak_scaling(self) -> list[WeakScaling]:
        """Step time over dp at fixed work per device."""
        return scaling.weak(self.job, self._step_and_verdict)

    @cached_property
    def strong_scaling(self) -> list[WeakScaling]:
        """Step time over dp at the job's own batch."""
        return scaling.strong(self.job, self._step_and_verdict)

    def _step_and_verdict(self, job: Job) -> tuple[float, str]:
        found = self if job is self.job else estimate(job)
        return found.step_s, found.peaks.verdict

    @cached_property
    def fixes(self) -> list[Fix]:
        """The changes with the least step time that make a job fit which does not, or only just."""
        if self.peaks.fits:
            return []
        if find := type(self).find_fixes:
            return find(self)
        return fixes.cheapest(self.job, self.step_s, Candidate, tight=self.peaks.verdict != "tight")

    @cached_property
    def savings(self) -> list[Saving]:
        """Settings besides the layout that shorten the step of a job with enough memory, with arithmetic as precise."""
        return switches.savings(self, self.time.parts_s, estimate)

    @cached_property
    def run(self) -> dict[str, Any] | None:
        """Days, device-hours, cost, energy and goodput of the whole run, where the plan has a `run` section."""
        return whole_run(self.job, self.step_s, self.trained_params, self.devices)

    def to_frame(self, rows: Literal["parts", "stages", "gemms", "collectives", "weak_scaling"] = "parts") -> Any:
        """Rows as a pandas DataFrame: the parts of the step, or a table; bytes and seconds.

        Raises:
            ImportError: pandas is not installed.
            ValueError: there is no such table.
        """
        known = ("stages", "gemms", "collectives", "weak_scaling")
        if rows == "parts":
            parts = self.time.parts_s
            found = [{"part": name, "seconds": s, "share": s / self.time.step_s} for name, s in parts.items()]
        elif rows in known:
            found = [row._asdict() for row in (self.memory.stages if rows == "stages" else getattr(self, rows))]
        else:
            raise ValueError(f"rows: must be one of parts, {', '.join(known)} (got {rows!r})")
        return frame(found)

    def to_dict(self) -> dict[str, Any]:
        """The `--json` document: schema "3dtrn/1", raw SI."""
        return document(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Estimate) and self.job == other.job

    def __hash__(self) -> int:
        return hash(self.job)

    def __repr__(self) -> str:
        """One line: verdict, step, MFU."""
        name, verdict = self.job.model.name or "unnamed model", self.peaks.verdict.replace("_", " ")
        step = f"{self.step_s:,.0f}" if self.step_s >= 100.0 else f"{self.step_s:.3g}"
        mfu = f"{100.0 * self.throughput.mfu:.1f} %"
        return f"<Estimate {name} on {counted(self.devices, 'device')}: {verdict}, {step} s a step, MFU {mfu}>"

    def _repr_html_(self) -> str | None:
        """HTML tables for a notebook, where `report.notebook` is loaded."""
        draw = type(self).draw
        return draw(self) if draw else None


def estimate(job: Job | str | Path | Mapping[str, Any]) -> Estimate:
    """Estimate step time, memory, MFU and verdict of a training plan.

    Args:
        job: a `Job`, the path of a plan, its YAML text, or the same as a mapping.

    Returns:
        An `Estimate`: `.fits`, `.step_s`, `.mfu`, `.memory`, `.time`, `.throughput`, `.to_frame()`, `.to_dict()`; seconds, bytes
        and FLOPs, per device unless the name says otherwise.

    Raises:
        ConfigError: the plan cannot be read or is invalid, one line per problem.

    >>> estimate({"model": "llama3-8b", "devices": 8, "parallelism": {"tp": 2, "pp": 1}, "hardware": "h100",
    ...           "data": {"gbs": 32, "seqlen": 8192, "microbatch_sz": 1}}).fits
    True
    """
    job = job if isinstance(job, Job) else Job.load(job)
    assembly = Assembly(job)
    timing = step_time(assembly)
    return Estimate(job, assembly, timing, stage_memory(assembly, timing.states))


def step_seconds(job: Job) -> float:
    """The step time only [s]: no memory, no tables."""
    return step_time(Assembly(job)).step_s


def document(estimate: Estimate) -> dict[str, Any]:
    """An estimate as plain data: bytes, seconds and FLOPs, per device unless the key says otherwise."""
    time = estimate.time
    steps = {"step_s": time.step_s, "step_s_p10": time.step_s_p10, "step_s_p90": time.step_s_p90}
    document = {
        "schema": SCHEMA,
        "config": config(estimate),
        "assumptions": list(estimate.assumptions),
        "devices": estimate.devices,
        "nodes": estimate.nodes,
        "params": estimate.params._asdict(),
        "flops": estimate.flops._asdict(),
        "memory": memory(estimate),
        "gemms": [{key.rstrip("_"): value for key, value in row._asdict().items()} for row in estimate.gemms],
        "collectives": [row._asdict() for row in estimate.collectives],
        "pipeline": estimate.pipeline._asdict(),
        "time": {**steps, "parts_s": dict(time.parts_s), "basis": time.basis._asdict()},
        "throughput": estimate.throughput._asdict(),
        "weak_scaling": [row._asdict() for row in estimate.weak_scaling],
        "settings": [saving._asdict() for saving in estimate.savings],
    }
    more = {"run": dict(estimate.run or {}), "refused": refusals.refusals(estimate.job)}
    return document | {key: value for key, value in more.items() if value}


def memory(estimate: Estimate) -> dict[str, Any]:
    """Memory with its fixes, which are searched only where the job does not fit."""
    document = (found := estimate.memory)._asdict()
    document["stages"] = [row._asdict() for row in found.stages]
    document["overhead_bytes"] = found.overhead_bytes._asdict()
    if not found.host_bytes:
        del document["host_bytes"], document["host_capacity_bytes"]
    document["fixes"] = [] if found.fits else [fix._asdict() for fix in estimate.fixes]
    return document


def config(estimate: Estimate) -> dict[str, Any]:
    """The job as understood, every default filled in."""
    return {key: finite(value) for key, value in estimate.job.to_config().items()}


def finite(value: Any) -> Any:
    """`value` with an unlimited tier's size as the text "inf", since JSON has no such number; a config file accepts it."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return "inf" if isinstance(value, float) and isinf(value) else value
