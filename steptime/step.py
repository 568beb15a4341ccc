"""estimate(job): the step, put together from parts, pipeline walk, data parallelism and memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import exp
from typing import Any

from steptime import fixes, run, scaling, tables
from steptime.assembly import Assembly
from steptime.estimate import (
    Basis,
    CollectiveRow,
    Fix,
    Flops,
    GemmRow,
    Memory,
    Params,
    Pipeline,
    Throughput,
    Time,
    WeakScaling,
)
from steptime.flops import step_flops
from steptime.interval import step_interval
from steptime.job import Job
from steptime.stage_time import StepTime
from steptime.verdict import stage_memory


@dataclass(frozen=True)
class Estimate:
    """What `estimate` returns. The step, the memory of every stage and the verdict are there; tables come when asked for.

    `to_dict()` is the document of `3dtrn --json`; in a notebook the object shows itself as tables.
    """

    job: Job
    assembly: Assembly
    timing: StepTime
    memory: Memory

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
        """Nodes that hold them, the last one perhaps not full."""
        return -(-self.devices // self.job.machine.devices_per_node)

    @property
    def assumptions(self) -> list[str]:
        """What was unsaid, what is assumed, what is unproved."""
        return self.job.assumptions

    @cached_property
    def params(self) -> Params:
        """Parameter counts."""
        return tables.params(self.assembly)

    @cached_property
    def flops(self) -> Flops:
        """FLOPs of one step of the whole job."""
        return step_flops(self.assembly, self.timing.hardware_flops)

    @cached_property
    def time(self) -> Time:
        """The step and its parts, with the interval."""
        found = step_interval(self.job)
        low, high = found.low, found.high
        beyond = [axis.text for axis in found.beyond]
        if self.job.performance.calibration:  # the factor holds the bias of runs like the team's own already
            low, high = (low - high) / 2.0, (high - low) / 2.0
            beyond.append("calibration: the interval is as wide as without it, around the calibrated step")
        basis = Basis(found.nearest, found.n, beyond)
        return self.timing.time._replace(
            step_s_p10=self.step_s * exp(low), step_s_p90=self.step_s * exp(high), basis=basis
        )

    @cached_property
    def pipeline(self) -> Pipeline:
        """The pipeline's walk."""
        return self.timing.pipeline

    @cached_property
    def throughput(self) -> Throughput:
        """Tokens per second and utilisation."""
        return tables.throughput(self.job, self.step_s, self.flops)

    @cached_property
    def gemms(self) -> list[GemmRow]:
        """Every projection, per stage kind and pass."""
        return tables.gemms(self.assembly, self.timing)

    @cached_property
    def collectives(self) -> list[CollectiveRow]:
        """Every kind of collective."""
        return tables.collectives(self.assembly, self.timing)

    @cached_property
    def weak_scaling(self) -> list[WeakScaling]:
        """Step time over dp at fixed work per device."""
        return scaling.weak(self.job)

    @cached_property
    def fixes(self) -> list[Fix]:
        """The cheapest single changes that make a job fit that does not, or only just."""
        return [] if self.memory.fits else fixes.cheapest(self.job, self.step_s)

    @cached_property
    def run(self) -> dict[str, Any] | None:
        """Days, device-hours, cost, energy and goodput of the whole run, when the config asks."""
        return run.whole_run(self.job, self.step_s, self.params.total, self.devices)

    def to_dict(self) -> dict[str, Any]:
        """The `--json` document: schema "3dtrn/1", raw SI."""
        from steptime.report.json import to_dict

        return to_dict(self)

    def __repr__(self) -> str:
        """One line: the answer."""
        from steptime.report.html import short

        return short(self)

    def _repr_html_(self) -> str:
        """Tables for a notebook."""
        from steptime.report.html import estimate_html

        return estimate_html(self)


def estimate(job: Job) -> Estimate:
    """How long a step of this job takes, and whether it fits.

    Raises:
        ConfigError: never for a valid `Job`; building one checks the layout.
    """
    assembly = Assembly(job)
    timing = StepTime(assembly)
    return Estimate(job, assembly, timing, stage_memory(assembly, timing.states))
