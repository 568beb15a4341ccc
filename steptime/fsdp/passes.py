"""The worst moments of FSDP's passes over a micro-batch, whether each reduces its gradients or only the last of a step."""

from __future__ import annotations

from steptime.base.num import maximum
from steptime.fsdp import no_sync_walk
from steptime.fsdp.flat_walk import flat_backward, flat_forward
from steptime.fsdp.groups import buffers, groups, options
from steptime.fsdp.memory_walk import (
    backward,
    by_module,
    forward,
    largest_module,
    sharded_gradients,
    wrapped,
)
from steptime.fsdp.moments import Moments
from steptime.fsdp.of_job import unsynced
from steptime.job.assembly import Assembly
from steptime.memory.part_memories import PartMemories
from steptime.memory.stages import PeakMoment


def peak_moment(assembly: Assembly) -> PeakMoment:
    """Activations and transients at the worst moment of a micro-batch; FSDP buffers count as transients."""
    worst_forward, worst_backward = pass_moments(assembly)
    most = maximum(worst_forward.most_bytes, worst_backward.most_bytes)
    gathers = maximum(worst_forward.gathers_bytes, worst_backward.gathers_bytes)
    return worst_forward.worse(worst_backward)._replace(most_bytes=most, gathers_bytes=gathers)


def pass_moments(assembly: Assembly) -> tuple[PeakMoment, PeakMoment]:
    """The worst moment of a micro-batch's forward, and that of its backward.

    Sharded gradients are counted as states, allocated from the start; for a single micro-batch those not yet made are subtracted,
    unless they stay from step to step.
    """
    memories = PartMemories(assembly, weight_grads_stay=True)
    root = buffers(assembly, groups(assembly, assembly.chunks[0]).root)
    if by_module(assembly):
        root = largest_module(assembly, [*assembly.embedding.params, *assembly.head_params])
    layers = wrapped(assembly, memories, assembly.chunks[0])
    late = (assembly.job.single_microbatch or unsynced(assembly.job)) and not options(assembly).gradients_stay
    to_come = sharded_gradients(assembly) if late else 0.0
    in_forward, in_backward = Moments(to_come), Moments(to_come)
    flat = options(assembly).version == 1
    if unsynced(assembly.job):
        no_sync_walk.walk(assembly, memories, in_forward, in_backward, root, layers)
    else:
        (flat_forward if flat else forward)(assembly, memories, in_forward, root, layers)
        (flat_backward if flat else backward)(assembly, memories, in_backward, root, layers)
    return in_forward.found, in_backward.found
