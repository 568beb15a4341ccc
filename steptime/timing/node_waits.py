"""FSDP's communication beside a host that runs a traced graph: the device waits for the later of the two."""

from __future__ import annotations

from steptime.base.num import Num, maximum
from steptime.cost.nodes import run_by_host
from steptime.fsdp import StepSeconds
from steptime.job.assembly import Assembly
from steptime.timing.part_times import PartTimes


def with_the_host(assembly: Assembly, parts: PartTimes, found: StepSeconds) -> StepSeconds:
    """FSDP's communication of a step, as far as the device does not wait for the host meanwhile."""
    return found._replace(exposed_s=beside_the_host(assembly, parts, found.exposed_s))


def beside_the_host(assembly: Assembly, parts: PartTimes, exposed_s: Num) -> Num:
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
