"""FSDP's communication beside a host that runs a traced graph: the device waits for the later of the two."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from steptime.base.num import Num, maximum
from steptime.cost.nodes import run_by_host
from steptime.cost.part_seconds import PartTime
from steptime.cost.work import Work
from steptime.job.assembly import Assembly
from steptime.timing.part_times import PartTimes

if TYPE_CHECKING:  # a step without FSDP imports none of its seconds
    from steptime.fsdp import StepSeconds


def on_device(parts: PartTimes) -> PartTimes:
    """The parts without waits for a host that runs a traced graph: FSDP's collectives pass beside kernels alone.

    What passes beside the waits is taken off in `exposed_past_host`.
    """
    if not run_by_host(parts.assembly.job.software.timing):
        return parts
    of = {part: PartTime(*map(without_waits, times)) for part, times in parts.of.items()}
    replays = {part: without_waits(work) for part, work in parts.whole_replays.items()}
    return PartTimes(parts.assembly, of, replays)


def without_waits(work: Work) -> Work:
    """A work as long as its kernels take."""
    return replace(work, launch_s=work.launch_s - work.host_s, host_s=0.0)


def with_the_host(assembly: Assembly, parts: PartTimes, found: StepSeconds) -> StepSeconds:
    """FSDP's communication of a step, as far as the device does not wait for the host meanwhile."""
    return found._replace(exposed_s=exposed_past_host(assembly, parts, found.exposed_s))


def exposed_past_host(assembly: Assembly, parts: PartTimes, exposed_s: Num) -> Num:
    """What remains of exposed communication and of FSDP's copies where the device waits for the host anyway.

    The host issues nodes while collectives and copies run, so a step takes the longer of the two: the host's nodes, or the
    device's kernels with what is exposed. `wait_for_host` has counted by how much the nodes outlast the kernels.
    """
    if not run_by_host(assembly.job.software.timing):
        return exposed_s
    chunk = assembly.chunks[0]
    works = [(count, work) for count, part in parts.works(chunk) for work in parts.of[part][:2]]
    works += [(count, work) for count, _, work in parts.replays(chunk)]
    waits_s = assembly.job.microbatches * sum([count * work.host_s for count, work in works])
    return maximum(0.0, exposed_s - waits_s)
