"""Seconds of an update in host memory: gradients come down, the host's processors update, parameters go up."""

from typing import NamedTuple

from steptime.base.num import Num, maximum, minimum
from steptime.job.job import Job
from steptime.memory.on_host import on_host


class HostUpdate(NamedTuple):
    """The host's part of an optimizer step, each leg by itself, and what they add to the device's part [s]."""

    down_s: Num = 0.0
    """Gradients from device to host."""
    update_s: Num = 0.0
    """The host's update."""
    up_s: Num = 0.0
    """Parameters from host to device."""
    copied_s: Num = 0.0
    """Exposed seconds of the copies."""
    waited_s: Num = 0.0
    """Exposed seconds of the update."""

    @property
    def exposed_s(self) -> Num:
        """Seconds that it adds to the step."""
        return self.copied_s + self.waited_s

    @property
    def hidden_s(self) -> Num:
        """Seconds of the copies that overlap updates."""
        return self.down_s + self.up_s - self.copied_s


def host_update(
    job: Job, owned: Num, tensors: Num, device_s: Num, device_bytes_per_s: float, in_turn: Num | None = None
) -> HostUpdate:
    """The host's part of the update of `owned` parameters in so many `tensors`.

    `in_turn`: parameters whose gradients are copied one after another, where ranks wait for one another (`gradients_down`).
    `device_s`: seconds of the device's own update, which overlaps the host's. Without overlap all gradients come down, then
    the host updates, then all parameters go up. With it tensors follow one another through three stages, so that the longest
    stage counts whole and the two others for one tensor
    (megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py, step, build_cpu_optimizer_list).
    """
    said, machine = job.performance.cpu_offload, job.machine
    link, host = machine.accelerator.host_bytes_per_s, machine.host
    if said.share == 0.0 or link is None or host is None:
        return HostUpdate()
    per = on_host(job)
    n = said.share * owned
    down_s = (n if in_turn is None else in_turn) * (per.down / link + per.readied / device_bytes_per_s)
    up_s = n * (per.up / link + per.cast / device_bytes_per_s)
    rate, further = host.device_bytes_per_s(machine.devices_per_node, said.threads), job.microbatches - 1.0
    update_s = n * per.touched / rate
    if per.added:  # what blocks the host waits for each copy, and adds
        down_s, update_s = down_s + further * n * per.reduced / link, update_s + further * n * per.added / rate
    total = down_s + update_s + up_s
    if said.overlap:
        longest = maximum(maximum(down_s, up_s), update_s)
        total = longest + (total - longest) / maximum(1.0, said.share * tensors)
        total = maximum(0.0, total - device_s)
        waited_s = minimum(total, maximum(0.0, update_s - device_s))
        return HostUpdate(down_s, update_s, up_s, total - waited_s, waited_s)
    return HostUpdate(down_s, update_s, up_s, down_s + up_s, maximum(0.0, update_s - device_s))
