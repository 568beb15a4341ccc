"""Parts of the step explained: formula with the job's numbers, constants, sources."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from functools import partial

from steptime.answer.result import Estimate
from steptime.answer.tables import kind_label, works_of
from steptime.base.num import tree_depth
from steptime.base.rows import CollectiveRow
from steptime.base.words import counted
from steptime.cost.work import CommCall
from steptime.job.assembly import Chunk
from steptime.job.job import Job
from steptime.job.mesh import comm_part
from steptime.job.parts import Part
from steptime.memory.on_host import follows_buckets, on_host
from steptime.report.breakdown import part_title
from steptime.report.constants import constant, machine_source
from steptime.report.explain_attention import attention
from steptime.report.explain_layers import calls, launch, recompute
from steptime.report.format import BINARY, SI, percent, quantity, seconds, whole
from steptime.report.kernel_table import KernelTime, op_times
from steptime.report.table import Fact, FactList
from steptime.timing.optimizer import clip_bytes_per_param, update_bytes_per_param, updated
from steptime.timing.orthogonalize import MOMENTA, NORMS, PRODUCTS, STEPS, orthogonalize_s, sharded
from steptime.timing.step_time import STRAGGLER, StepTime

_SHOWN = 12
MUON = (NORMS, MOMENTA, PRODUCTS)
"""Collectives that are on the optimizer's page."""


def memory_bound(estimate: Estimate) -> FactList:
    """Each memory-bound kernel: bytes over the rate, and a fixed time; largest first."""
    rates, device = estimate.timing.rates, estimate.job.machine.accelerator
    rows = sorted((row for row in op_times(estimate) if row.part == "memory_bound"), key=lambda row: -row.step_s)
    rate = f"{quantity(device.memory_bytes_per_s, SI, 'B/s')} x {device.memory_efficiency:g} x {rates.move_rate:g}"
    facts = [
        Fact("each", [f"bytes / ({rate}) + {seconds(rates.move_kernel_s)} for each kernel"]),
        Fact("source", [f"memory_efficiency: {machine_source(estimate.job, 'accelerator.memory_efficiency')}"]),
    ]
    return FactList(part_title(estimate, "memory_bound"), [*facts, *_widest(rows, estimate)])


def products(estimate: Estimate) -> FactList:
    """Every matrix multiply with its calls; each is explained under its own name."""
    rows = sorted((row for row in op_times(estimate) if row.part == "gemm"), key=lambda row: -row.step_s)
    each = Fact("each", ["3dtrn explain PLAN NAME has FLOPs over rate"])
    return FactList(part_title(estimate, "gemm"), [*_widest(rows, estimate), each])


def _widest(rows: list[KernelTime], estimate: Estimate) -> list[Fact]:
    """Kernels with their calls, largest first, the smallest joined."""
    facts = []
    for row in rows[:_SHOWN]:
        moved = f"forward moves {quantity(row.forward_bytes, BINARY)}" if row.forward_bytes else ""
        if row.backward_bytes:
            moved += f", backward {quantity(row.backward_bytes, BINARY)}"
        if row.part == "memory_bound" and moved:
            moved += f", {counted(row.kernels, 'kernel')} each"
        moved += "; " if moved else ""
        facts.append(Fact(row.name, [moved + calls(row.times, row.forward_s, row.backward_s, estimate)]))
    if len(rows) > _SHOWN:
        rest = sum(row.step_s for row in rows[_SHOWN:])
        facts.append(Fact("others", [f"{len(rows) - _SHOWN} kernels, {seconds(rest)}"]))
    return facts


def communication(estimate: Estimate, part: str) -> FactList:
    """Every collective of one axis, or send between stages: calls, time of each, and the exposed part."""
    rows = [row for row in estimate.collectives if comm_part(row.axis) == part and row.name not in MUON]
    elsewhere = _of_other_stages(estimate.timing)
    facts = [
        Fact(row.name, [_calls_of(row) + "; of another stage, not in the sum" * (row.name in elsewhere)])
        for row in sorted(rows, key=lambda row: -row.exposed_s)
    ]
    facts.append(Fact("each", ["3dtrn explain PLAN NAME has latency and bytes over rate"]))
    return FactList(part_title(estimate, part), facts)


def _calls_of(row: CollectiveRow) -> str:
    """Calls of a step, time of each, and the exposed part."""
    return f"{whole(row.count_per_step)} x {seconds(row.time_s)}, {seconds(row.exposed_s)} exposed, over {row.tier}"


def _of_other_stages(timing: StepTime) -> set[str]:
    """Names of the collectives of embedding and head that the busiest stage, which the step's parts are of, does not run."""
    assembly = timing.assembly

    def of(chunks: Iterable[Chunk], parts: Container[Part]) -> set[str]:
        """Names of the collectives of some parts of some chunks."""
        works = [work for chunk in chunks for _, part, work in works_of(timing, chunk) if part in parts]
        return {call.name for work in works for call in work.calls}

    ends = of((assembly.chunks[0], assembly.chunks[-1]), (assembly.embedding, assembly.head))
    return ends - of(assembly.stages[timing.busiest], timing.parts.of)


def host_copies(estimate: Estimate) -> FactList:
    """Activations and states in host memory: bytes of a layer of each kind, of a step's states, the link, the exposed part."""
    link = estimate.job.machine.accelerator.host_bytes_per_s or 0.0
    facts = [
        Fact(
            f"{kind_label(estimate.assembly, part)}{call.kind}",
            [copied(call, link) + f" a layer, {seconds(float(call.exposed_s))} longer than its {direction}"],
        )
        for part in estimate.assembly.kinds
        for direction, work in zip(("forward", "backward"), estimate.timing.parts.of[part][:2], strict=True)
        for call in work.calls
        if call.axis == "host"
    ]
    if estimate.job.performance.cpu_offload.share:
        host, per, several = estimate.timing.optimizer.host, on_host(estimate.job), not estimate.job.single_microbatch
        overlap = estimate.job.performance.cpu_offload.overlap
        how = "tensor by tensor, overlapped with the update" if overlap else "not overlapped"
        sums = f", {per.summed:g} B of its sum each way in every micro-batch" * (per.summed > 0 and several)
        down = f"{per.down:g} B a parameter down{sums}: {seconds(host.down_s)}"
        up = f"{per.up:g} B up: {seconds(host.up_s)}"
        facts.append(Fact("states", [f"{down}; {up}; {how}: {seconds(host.copied_s)} exposed"]))
        if follows_buckets(estimate.job):
            turn = float(estimate.timing.optimizer.in_turn)
            facts.append(Fact("in turn", [f"gradients of {whole(round(turn))} parameters go down one after another"]))
    facts.append(Fact("source", [f"host_bytes_per_s: {machine_source(estimate.job, 'accelerator.host_bytes_per_s')}"]))
    return FactList(part_title(estimate, "host_comm"), facts)


def gradient_bytes(job: Job) -> str:
    """Bytes of gradients on a device, and what is on the way to the host."""
    each = f"{job.software.state_bytes.gradients:g} B each, sharded at zero_level 2 and above"
    if not follows_buckets(job):
        return each
    kept = "" if job.zero_level == 2 else f"{each}; "
    return f"{kept}buckets of the reduction, which are copied to the host, and a buffer for the largest parameter"


def host_optimizer(estimate: Estimate) -> FactList:
    """The host's update: bytes that it reads and writes over the rate of its memory, and the part that the device waits for."""
    job, host = estimate.job, estimate.timing.optimizer.host
    said, per, machine = job.performance.cpu_offload, on_host(job), job.machine
    facts = [
        Fact("share", [f"the host updates {percent(said.share)} of the parameters that a device owns"]),
        Fact("bytes", [f"{per.stored:g} B stored and {per.touched:g} B read and written per parameter"]),
    ]
    if machine.host is not None:
        rate = machine.host.device_bytes_per_s(machine.devices_per_node, said.threads)
        limit = f"{counted(said.threads, 'thread')} of each process, {machine.devices_per_node} devices a node"
        facts.append(Fact("rate", [f"{quantity(rate, SI, 'B/s')} ({limit}): {seconds(host.update_s)}"]))
    facts.append(Fact("exposed", [f"{seconds(host.waited_s)} not hidden by overlapping work"]))
    keys = ("host.memory_bytes_per_s", "host.core_bytes_per_s")
    facts.append(Fact("source", [f"{key}: {machine_source(estimate.job, key)}" for key in keys]))
    return FactList(part_title(estimate, "host_optimizer"), facts)


def copied(call: CommCall, link: float) -> str:
    """Bytes over the link's rate."""
    return f"{quantity(float(call.bytes), BINARY)} / {quantity(link, SI, 'B/s')} = {seconds(float(call.cost.time_s))}"


def stragglers(estimate: Estimate) -> FactList:
    """Synchronized replicas wait for the slowest of them."""
    job, timing = estimate.job, estimate.timing
    p = job.parallelism
    nodes = -(-p.devices // job.machine.devices_per_node)
    replicas = min(p.dp * p.cp, nodes)
    inside = timing.passes * timing.walk.makespan_s + timing.fsdp_exposed_s
    facts = [
        Fact("replicas", [f"min(dp x cp, nodes) = min({p.dp * p.cp:,}, {nodes:,}) = {replicas:,}"]),
        Fact("formula", ["STRAGGLER x ceil(log2(replicas)) x seconds of forward, backward, sends and bubble"]),
        Fact(
            "numbers", [f"{STRAGGLER:g} x {tree_depth(replicas):g} x {seconds(inside)} = {seconds(timing.straggler_s)}"]
        ),
        Fact("STRAGGLER", [constant("timing.step_time.STRAGGLER").said]),
    ]
    return FactList(part_title(estimate, "stragglers"), facts)


def optimizer(estimate: Estimate) -> FactList:
    """Bytes that the update moves over the rate of memory, on the stage that owns most parameters."""
    job, timing = estimate.job, estimate.timing
    assembly = estimate.assembly
    shares = [updated(job, counted) for counted in assembly.stage_params]
    most, moments, *_ = max(shares, key=lambda share: share.owned)
    named = job.software.states.optimizer
    per, clip, rate = update_bytes_per_param(job, moments), clip_bytes_per_param(job), timing.rates.bytes_per_s
    update_s = most * (per + clip) / rate
    rest_s = timing.optimizer.device_s - update_s
    passes = ["gradients zeroed"]
    passes += ["weights quantized"] if job.software.recipe else []
    passes += ["Muon's iterations"] if "muon" in named else []
    more = f"{', '.join(passes)}: {seconds(rest_s)} = {quantity(rest_s * rate, BINARY)} at that rate"
    rest = [Fact("rest", [more])] if rest_s > 1e-9 * update_s else []  # FSDP frees gradients instead
    facts = [
        Fact("owned", [f"{whole(round(most))} parameters on the stage with most, zero_level {job.zero_level}"]),
        Fact("bytes", [f"{named} {per:g} + clipping {clip:g} bytes for each (states read and written, gradient read)"]),
        Fact("update", [f"{whole(round(most))} x {per + clip:g} B / {quantity(rate, SI, 'B/s')} = {seconds(update_s)}"]),
        *_orthogonalized(estimate),
        *[Fact(row.name, [_calls_of(row)]) for row in estimate.collectives if row.name in MUON],
        *rest,
        Fact("source", ["passes of megatron/core/optimizer/optimizer.py and torch/optim/adam.py"]),
    ]  # fmt: skip
    return FactList(part_title(estimate, "optimizer"), facts)


def _orthogonalized(estimate: Estimate) -> list[Fact]:
    """Muon's iterations, if it is Muon."""
    assembly, states = estimate.assembly, estimate.job.software.states
    if "muon" not in states.optimizer:
        return []
    context = estimate.timing.pricing.context
    took = max(orthogonalize_s(assembly.job, params, context) for params in assembly.stage_params)
    if sharded(assembly.job):
        how = f"{STEPS:g} iterations on each matrix, product by product, and the collectives of its shards: {seconds(took)}"
        return [Fact("orthogonalize", [how, "torch/optim/_muon.py on DTensors; Jordan et al. 2024"])]
    how = f"{STEPS:g} iterations of 4 m^2 n + 2 m^3 FLOPs on each m x n matrix: {seconds(took)}"
    return [Fact("orthogonalize", [how, f"muon_tp_mode {states.muon_tp_mode}; Jordan et al. 2024"])]


PARTS: dict[str, Callable[[Estimate], FactList]] = {
    "gemm": products,
    "attention": attention,
    "memory_bound": memory_bound,
    "launch": launch,
    "recompute": recompute,
    "stragglers": stragglers,
    "optimizer": optimizer,
    "host_comm": host_copies,
    "host_optimizer": host_optimizer,
    **{
        part: partial(communication, part=part)
        for part in ("tp_comm", "cp_comm", "ep_comm", "pp_comm", "dp_comm", "embedding_comm")
    },
}
