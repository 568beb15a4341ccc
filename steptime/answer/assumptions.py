"""The assumptions of a job as text: the source of each default, what is not verified, and notes (`answer.notes`)."""

from __future__ import annotations

from steptime import fsdp
from steptime.answer.idle import idle, usual_settings
from steptime.answer.notes import notes
from steptime.answer.refusals import refusals
from steptime.base.words import counted, flow
from steptime.cost.nodes import run_by_host
from steptime.job.job import Job, facts
from steptime.job.mesh import group, members_per_domain
from steptime.job.pipeline_rules import group_taken
from steptime.memory.overhead import (
    COMMUNICATOR_BYTES,
    CONTEXT_BYTES,
    EXPANDABLE_FRAGMENTATION,
    FRAGMENTATION,
    GIB,
)
from steptime.model.blocks import n_params, n_trained
from steptime.software.efficiency import compute_factor, sustained_share
from steptime.software.performance import EAGER_TORCH, OPTIONS, Software
from steptime.software.precision import RECIPES, rate_of

_EFFICIENCIES = ("memory_efficiency", "attention_forward_efficiency", "attention_backward_efficiency", "efficiency")


def assumptions(job: Job) -> list[str]:
    """One line each, the most important first."""
    kinds = (foremost, _profile, _unset, _fitted, _unproved, _machine, _cross_dc, one_link, _memory)
    return [line for lines in kinds for line in lines(job)]


HOST_BOUND = 0.05
"""Share of the step above which waiting for the host is reported."""


def host_bound(waits_s: dict[str, float], step_s: float, software: Software) -> list[str]:
    """A line where waiting for the host takes a considerable part of the step; `waits_s` by the part they are counted in."""
    share = sum(waits_s.values()) / step_s
    if share < HOST_BOUND:
        return []
    whole, replays = round(100 * share), round(100 * waits_s["recompute"] / step_s)
    parts = f"{whole - replays} % as launch gaps, {replays} % as recomputation"
    where = parts if replays else "part of the launch gaps"
    traced = run_by_host(software.timing)
    eager = software.family in EAGER_TORCH and software.kernels.compile == "none" and not traced
    remedies = ", ".join(["larger micro-batches", *(["torch.compile"] if eager else [])])
    what = "the nodes of a traced graph" if traced else "kernel launches"
    waits = f"the device waits for {what} during {whole} % of the step ({where})"
    return [f"host-bound: {waits}; {remedies} or CUDA graphs shorten it"]


def foremost(job: Job) -> list[str]:
    """The main assumptions: the software, how it differs from its profile, and notes from the plan and on its layout."""
    calibrated = job.performance.calibration.words if job.performance.calibration else []
    kinds = (idle, _group, _experts, _adapters, notes)
    refused = refusals(job)
    others = [note for note in job.notes if note not in refused]
    return [*refused, *others, *calibrated, _software(job), *(line for lines in kinds for line in lines(job))]


def _software(job: Job) -> str:
    """The profile, and the switches that the plan changes."""
    software = job.software
    usual, here = usual_settings(job), software.settings()
    changed = [
        f"{key} {flow(here[key])} (profile: {flow(usual[key])})"
        for key in OPTIONS
        if getattr(job.performance, key) is not None and here[key] != usual[key]
    ]
    about = [*([] if job.performance.software else ["default"]), *([software.as_of] if software.as_of else [])]
    why = f" ({'; '.join(about)})" if about else ""
    return f"software: {software.name}{why}" + (f"; set in the plan: {', '.join(changed)}" if changed else "")


def _fitted(job: Job) -> list[str]:
    """The fitted constants that the step time depends on."""
    software, device = job.software, job.machine.accelerator
    if software.timing.measured:
        return [f"rates and kernel times measured on {job.machine.name}; no factor fitted on published runs"]
    share, factor = (
        sustained_share(device.same_chip_as or device.name, software.precision),
        compute_factor(software.name),
    )
    return [
        (
            f"fitted to measured runs: {software.precision} matrix multiplies at {share:g} x the rate measured in isolation, "
            f"kernel times of {software.name} x {factor:g}"
        )
    ]


def _profile(job: Job) -> list[str]:
    settings = job.software.settings()
    taken = [f"{key} {flow(settings[key])}" for key in OPTIONS if getattr(job.performance, key) is None]
    return [f"from the profile {job.software.name}: {', '.join(taken)}"] if taken else []


def _unset(job: Job) -> list[str]:
    lines = []
    layout: dict[str, object] = {"sp": job.sp, "zero_level": job.zero_level, "schedule": job.schedule}
    if job.parallelism.cp > 1:
        layout["cp_comm_type"] = job.cp_comm_type
    taken = [f"{key} {str(value).lower()}" for key, value in layout.items() if getattr(job.parallelism, key) is None]
    if job.model.learned_positions and job.model.max_positions is None:
        lines.append(f"model.max_positions is not set: {job.data.seqlen:,} learned positions, as many as data.seqlen")
    if taken:
        lines.append(f"parallelism defaults: {', '.join(taken)}")
    if job.performance.recompute is None and job.performance.activation_checkpointing_type is None:
        lines.append("recomputation default: none")
    if job.parallelism.sp and job.parallelism.tp == 1:
        lines.append("sp has no effect with tp 1")
    return lines


def _group(job: Job) -> list[str]:
    """The micro-batch group size of the interleaved schedule, where Megatron-Core's default is not valid."""
    pp = job.parallelism.pp
    return [
        f"parallelism.microbatch_group_sz: {group}, the smallest group that Megatron-Core accepts for {job.microbatches:,} "
        f"micro-batches; its default, pp {pp}, is an error, because the last group would have {job.microbatches % pp}"
        for group in group_taken(facts(job)).values()
    ]


def _adapters(job: Job) -> list[str]:
    """How much of the model adapters train."""
    if job.model.lora is None:
        return []
    trained = n_trained(job.model, job.data.seqlen, job.software)
    total = n_params(job.model, job.data.seqlen, software=job.software)
    return [f"adapters: {trained / 1e6:,.1f} M of {total / 1e9:,.2f} B parameters are trained, the others frozen"]


def _experts(job: Job) -> list[str]:
    """How tokens are distributed to experts, and by which dispatcher."""
    moe, how, p = job.model.moe, job.software.moe, job.parallelism
    if moe is None:
        return []
    ranks = p.ep * p.etp
    holders = p.dp * p.cp * p.tp // ranks
    rows = job.data.seqlen * job.data.microbatch_sz / p.cp / (p.tp if job.sp else 1) * moe.experts_per_token * p.etp
    per_expert = rows * p.ep / moe.n_experts
    load = (
        "balanced"
        if moe.imbalance_factor == 1
        else f"{moe.imbalance_factor:g} times the mean on the most loaded device"
    )
    router = "fp32" if how.router_dtype == "fp32" else job.software.compute_dtype
    torch = job.software.family == "fsdp2"
    kept = f" in {job.software.compute_dtype} (torchao converts linear layers only)"
    permutes = "fused" if how.permute_fusion and not torch else "unfused"
    hybrid = how.dispatcher == "flex" and how.flex_backend == "hybridep"
    products = "grouped GEMMs" if how.grouped_gemm else "one GEMM per expert"
    products += "" if how.grouped_precision == "none" else f" in {how.grouped_precision}"
    return [
        (
            f"experts: {moe.n_experts // p.ep} of {moe.n_experts} on each of ep {p.ep} devices, "
            f"in {counted(holders, 'replica')} (edp); {per_expert:,.0f} tokens per expert and micro-batch"
        ),
        (
            f"expert load: {load} (model.moe.imbalance_factor {moe.imbalance_factor:g}); measured per micro-batch: 1.04 to 1.22 "
            "for routers trained with a balancing loss, 1.6 for a benchmark without forced balance (MOEZOO-008)"
        ),
        (
            f"dispatch: {'HybridEP' if hybrid else how.dispatcher}, {permutes} permutation, router in {router}, {products}"
            f"{kept if torch and job.software.recipe is not None else ''}"
        ),
    ]


def _unproved(job: Job) -> list[str]:
    software = job.software
    kernels = {
        "flash attention": software.kernels.attention_impl == "flash",
        "fused norms": software.kernels.norm_impl == "fused",
        "fused activation": software.kernels.activation_impl == "fused",
        "fused cross-entropy": software.kernels.loss_impl == "fused",
        f"{software.precision} projections": software.recipe is not None,
        f"{software.moe.grouped_precision} products of experts": software.moe.grouped_precision != "none",
        f"context parallelism by {job.cp_comm_type}": job.parallelism.cp > 1,
    }
    names = [name for name, used in kernels.items() if used]
    if not names:
        return []
    return [f"not verified without a GPU: memory saved for backward and time of {', '.join(names)}"]


def _memory(job: Job) -> list[str]:
    freed = "memory: gradients are freed after every step, so gradients created after the peak are not in the peak"
    expandable = job.software.buffers.expandable_segments
    beyond = f"{100 * (EXPANDABLE_FRAGMENTATION if expandable else FRAGMENTATION):g} % of activations and transients"
    if fsdp.applies(job) and fsdp.pooled(job):
        beyond += ", and what FSDP's streams hold at other moments: gradients, and what all-gathers send and return"
    graphs = (
        "memory: what CUDA graphs hold besides is not counted; measured 40 to 170 MiB in small test jobs of Megatron-LM with "
        "experts, more in torchtitan's GraphTrainer (docs/known-errors.md)"
    )
    stay = job.parallelism.fsdp is not None and job.parallelism.fsdp.gradients_stay
    return [
        *([] if stay or job.software.states.gradients_persist or job.microbatches > 1 else [freed]),
        *([graphs] if job.software.timing.cuda_graphs else []),
        (
            f"memory: reserved = allocated + {beyond}; context "
            f"{CONTEXT_BYTES / GIB:g} GiB and {COMMUNICATOR_BYTES / GIB:g} GiB per process group are assumed"
        ),
    ]


def _machine(job: Job) -> list[str]:
    machine = job.machine
    lines = [] if machine.measured else [f"no measured run on this machine ({machine.name})"]
    guessed = sorted(path for path, source in machine.provenance.items() if path and source.startswith("assumed"))
    if guessed:
        lines.append(f"assumed figures of {machine.name}: {', '.join(guessed)}")
    usual = _usual_figures(job)
    if usual:
        lines.append(f"{machine.name} defaults (not in its file): {', '.join(usual)}")
    return lines


def _cross_dc(job: Job) -> list[str]:
    if job.cross_dc is None:
        return []
    devices, gbps = job.parallelism.devices / job.cross_dc.n_dcs, job.cross_dc.interconnect_bandwidth_gbps
    return [
        (
            f"cross_dc: {gbps:g} Gbit/s each way per data center, used at the full stated rate (no measured efficiency), "
            f"shared evenly by its {counted(devices, 'device')}; only data parallelism crosses it"
        )
    ]


def one_link(job: Job) -> list[str]:
    """Where a program's data-parallel collectives use one network link of a node, not those of all its ranks."""
    ranks = linked_ranks(job)
    if ranks <= 1:
        return []
    software = job.software
    return [
        (
            f"one network link per node: between nodes, data-parallel collectives of {software.name} are priced at the rate of "
            f"1 link, not of all {ranks:g} ranks of the group on a node ({software.sources.get('node_links', 'assumed')})"
        )
    ]


def linked_ranks(job: Job) -> float:
    """Ranks of a data-parallel group on a node that share one link to the others; 1 where each has its own (`cost.network`)."""
    n_dcs = job.cross_dc.n_dcs if job.cross_dc else 1
    ranks, on_node = group(job.parallelism, "shards", n_dcs=n_dcs), job.machine.tiers[0].size
    members = float(members_per_domain(ranks, on_node))
    return members if job.software.comm.node_links == "one" and float(ranks.ranks) > members else 1.0


def _usual_figures(job: Job) -> list[str]:
    """Figures of the machine that its file leaves at their defaults."""
    device, precision = job.machine.accelerator, str(job.software.precision)
    places = [("accelerator", device), *((f"tiers.{i}", tier) for i, tier in enumerate(job.machine.tiers))]
    found = [
        f"{at}.{name} {getattr(part, name):g}"
        for at, part in places
        for name in _EFFICIENCIES
        if name in type(part).model_fields and name not in part.model_fields_set
    ]
    twins = {"bf16", "fp16"} if precision in {"bf16", "fp16"} else {precision}
    if precision in RECIPES:
        precision = rate_of(precision, device.peak_flops) or precision
        twins = {precision}
    if not twins & device.sustained_flops.keys():
        found.append(
            f"accelerator.sustained_flops.{precision} as a fixed fraction of the best measured shape or of the peak"
        )
    if device.sm_count is None:
        found.append("no accelerator.sm_count, so no wave quantization")
    return found
