"""Parts of the step that are summed over layers and micro-batches, explained: launch gaps, recomputation, experts."""

from __future__ import annotations

from typing import NamedTuple

from steptime.answer.result import Estimate
from steptime.answer.tables import kind_label, layer_counts
from steptime.base.words import counted
from steptime.cost.host import COMPILED_HOST, DTENSOR_HOST, launch_host_s
from steptime.cost.nodes import run_by_host
from steptime.cost.part_seconds import call_names
from steptime.cost.work import Work
from steptime.job.parts import Part
from steptime.model.ops import Comm, Gemm, Op
from steptime.model.routing import Rows
from steptime.model.segments import find_segments, replayed, rerun
from steptime.report.breakdown import part_title
from steptime.report.constants import constant, machine_source, setting_source
from steptime.report.format import percent, seconds, whole
from steptime.report.kernel_table import op_times
from steptime.report.table import Fact, FactList
from steptime.software.efficiency import efficiency
from steptime.timing.part_times import COMPILED_GAP, GRAPHED_GAP, HALVES, gap_layers, more_launches


class _Factor(NamedTuple):
    """A factor on the gaps of a layer."""

    name: str
    value: float
    meaning: str


def launch(estimate: Estimate) -> FactList:
    """Gaps between kernels of each kind of layer, and where the host launches more slowly than the device runs.

    Every part of the busiest stage has its lines, which sum to the part of the step (`timing.part_times.part_gap_s`,
    `cost.part_seconds.wait_for_host`).
    """
    software, parts = estimate.job.software, estimate.timing.parts.of
    gaps, waits, factors = [], [], dict.fromkeys(_of_all(estimate))
    around_s = float(estimate.timing.optimizer.around_s)
    sums_s = {"gaps": 0.0, "waits for the host": 0.0, "outside the micro-batches": around_s}
    for part, count in _counts(estimate).items():
        times = _times(part, count, estimate)
        works = {"forward": parts[part].forward, "backward": parts[part].backward}
        gap_s = sum(float(work.launch_s - work.host_s) for work in works.values())
        sums_s["gaps"] += gap_s * count * estimate.job.microbatches
        if gap_s:
            own = [*_of_all(estimate), *_of_part(part, estimate)]
            factors |= dict.fromkeys(own)
            product = "".join(f" x {one.name} {one.value:.5g}" for one in own if one.value != 1.0)
            gaps.append(
                f"{_prefix(part, estimate)}layer_gap_s {seconds(software.timing.layer_gap_s)}{product} x {times} = "
                f"{_of_step(gap_s, count, estimate)}"
            )
        for way, work in works.items():
            sums_s["waits for the host"] += float(work.host_s) * count * estimate.job.microbatches
            if work.host_s:
                waits.append(
                    f"{_prefix(part, estimate)}{way} {_wait(work, estimate)} = {seconds(float(work.host_s))} x {times} = "
                    f"{_of_step(float(work.host_s), count, estimate)}"
                )
    each = f"{seconds(_each(estimate))} for each {'node' if run_by_host(software.timing) else 'launch'}"
    when = "added to" if software.timing.blocking_launches else "the device waits where that exceeds"
    facts = [
        Fact("gaps", gaps or ["none"]),
        Fact("source", [f"{software.name}: {software.sources.get('layer_gap_s', 'assumed')}"]),
        Fact("factors", [f"{one.name} {one.value:.5g}: {one.meaning}" for one in factors]),
        Fact("host", [f"{each}, {when} the seconds of a layer's kernels", *waits]),
        Fact("host rate", host_rate(estimate)),
        *_outside(estimate, around_s),
        Fact("sum", [f"{_added(sums_s)} = {seconds(sum(sums_s.values()))}"]),
    ]
    return FactList(part_title(estimate, "launch"), facts)


def _outside(estimate: Estimate, around_s: float) -> list[Fact]:
    """The host's seconds of a step outside its micro-batches."""
    said = [f"step_host_s {seconds(around_s)}", setting_source(estimate.job, "step_host_s")]
    return [Fact("host, step", said)] if around_s else []


def _added(sums_s: dict[str, float]) -> str:
    """The terms of a sum, without those that are zero."""
    return " + ".join(f"{seconds(value)} {name}" for name, value in sums_s.items() if value) or "0 s"


def _each(estimate: Estimate) -> float:
    """The host's seconds for a launch, or for a node of a traced graph."""
    software = estimate.job.software
    timing = software.timing
    return timing.node_s if run_by_host(timing) else float(launch_host_s(software, estimate.job.parallelism.tp))


def host_rate(estimate: Estimate) -> list[str]:
    """The host's seconds of one launch as those of its profile times a factor, each with its source."""
    job, software = estimate.job, estimate.job.software
    if run_by_host(software.timing):
        idle = constant("cost.nodes.IDLE_SHARE").said
        share = (
            []
            if software.timing.step_graph == "simplified"
            else [f"a node without effect takes IDLE_SHARE of it, {idle}"]
        )
        return [
            f"hardware.host.node_s {seconds(software.timing.node_s)} ({machine_source(job, 'host.node_s')})",
            *share,
        ]
    usual, each = software.timing.host_kernel_s, float(launch_host_s(software, job.parallelism.tp))
    source = setting_source(job, "host_kernel_s")
    if not each or each == usual:
        graphs = "; CUDA graphs launch everything" if not each and usual else ""
        return [f"host_kernel_s {seconds(usual)} ({source}){graphs}"]
    compiled = software.kernels.compile != "none"
    name, value = ("COMPILED_HOST", COMPILED_HOST) if compiled else ("DTENSOR_HOST", DTENSOR_HOST)
    why = (
        f"compile {software.kernels.compile}"
        if compiled
        else f"eager launches on DTensors, as tp is {job.parallelism.tp:g}"
    )
    product = f"host_kernel_s {seconds(usual)} x {name} {value:g} = {seconds(each)}"
    return [f"{product} ({why})", f"host_kernel_s: {source}", f"{name} {constant(f'cost.host.{name}').said}"]


def _of_all(estimate: Estimate) -> list[_Factor]:
    """Factors on the gaps of every layer, as `timing.part_times.layer_gap_s` has them."""
    software = estimate.job.software
    found = [_Factor(software.name, estimate.timing.rates.slowness, "its kernels and gaps (data/efficiency.yaml)")]
    if of := software.recipe:
        more = efficiency().recipe_gap - 1.0
        found.append(_Factor(of.name, 1.0 + more * of.gaps, f"1 + {more:.4g} x {of.gaps:g} for its casts"))
    if software.kernels.compile != "none":
        found.append(_Factor("COMPILED_GAP", COMPILED_GAP, "torch.compile joins kernels"))
    return found


def _of_part(part: Part, estimate: Estimate) -> list[_Factor]:
    """Factors on the gaps of one part, as `timing.part_times.part_gap_s` has them."""
    graphs, found = estimate.job.software.timing.cuda_graphs, []
    if part is estimate.assembly.head:
        found.append(_Factor("depths", float(estimate.job.model.mtp), "layers of multi-token prediction"))
    elif part.kind in HALVES:
        found.append(_Factor("norms", 0.5, "one norm of two"))
    layers = gap_layers(estimate.assembly, part)
    share = float(more_launches(part.ops, graphs, layers)) if layers else 1.0
    if share != 1.0:
        graphed = f"; of those in CUDA graphs {GRAPHED_GAP:g} of the gaps remain" if graphs else ""
        found.append(
            _Factor("launches", share, f"{_name(part, estimate)}: launches over those of a dense layer{graphed}")
        )
    return found


def _wait(work: Work, estimate: Estimate) -> str:
    """The host's seconds to launch the kernels of one layer, less those of the kernels unless it waits for each."""
    software = estimate.job.software
    each, graph = _each(estimate), run_by_host(software.timing)
    times = float(work.nodes_s) / each if graph else work.kernels
    launched = f"{counted(round(times), 'node' if graph else 'launch')} x {seconds(each)}"
    on_device = times * each - float(work.host_s)
    return launched if software.timing.blocking_launches else f"{launched} - {seconds(on_device)} of kernels"


def recompute(estimate: Estimate) -> FactList:
    """What backward runs again on the busiest stage, by kind of layer: the ops, and the seconds of one layer.

    The lines sum to the part of the step; collectives that run again count in the parts of communication.
    """
    said, timing = estimate.job.recompute, estimate.timing
    modules = f" ({', '.join(sorted(map(str, said.modules)))})" if said.modules else ""
    counts: dict[tuple[Part, int], float] = {}
    works: dict[tuple[Part, int], Work] = {}
    for chunk in estimate.assembly.stages[timing.busiest]:
        for times, part, work in timing.parts.replays(chunk):
            key = (part, id(work))
            counts[key], works[key] = counts.get(key, 0.0) + times, work
    facts = [Fact("granularity", [said.granularity + modules + ("" if works else ": nothing runs again")])]
    for key, work in works.items():
        part, (times, each_s) = key[0], (counts[key], float(work.seconds - work.comm_s))
        if not each_s:
            continue
        terms = {
            "matrix multiplies": work.gemm_s,
            "attention": work.attention_s,
            "memory-bound kernels": work.memory_s,
            "launch gaps": work.launch_s,
        }
        sums = " + ".join(f"{seconds(float(value))} {name}" for name, value in terms.items() if value)
        total = f"{seconds(each_s)} x {_times(part, times, estimate)} = {_of_step(each_s, times, estimate)}"
        names = ", ".join(op.name for op in _replayed_ops(part, work, estimate))
        facts.append(Fact(_name(part, estimate), [f"runs again: {names}", f"{sums} = {seconds(each_s)}", total]))
    if any(work.calls for work in works.values()):
        facts.append(Fact("collectives", ["those that run again (.again) are in the parts of communication"]))
    return FactList(part_title(estimate, "recompute"), facts)


def _replayed_ops(part: Part, work: Work, estimate: Estimate) -> list[Op]:
    """The ops that a replay of a part runs."""
    job, times, ops = estimate.job, estimate.timing.parts, part.ops
    early = job.software.activations.recompute_stops_early
    if work is times.of[part].forward:
        return ops
    if work is times.whole_replays.get(part):
        return [ops[i] for i in replayed(ops, 0, len(ops) - 1, stops_early=early)]
    modules = estimate.assembly.head_modules if part is estimate.assembly.head else job.recompute.modules
    segments = find_segments(ops, modules, compiled=job.software.kernels.compile != "none")
    return [ops[i] for segment in segments for i in rerun(ops, segment, stops_early=early)]


def _counts(estimate: Estimate) -> dict[Part, float]:
    """The parts of the busiest stage, and how many of each a micro-batch runs through."""
    chunks, assembly = estimate.assembly.stages[estimate.timing.busiest], estimate.assembly
    ends = {assembly.embedding: sum(c.embedding for c in chunks), assembly.head: sum(c.head for c in chunks)}
    return {part: float(count) for part, count in {**layer_counts(chunks), **ends}.items() if count}


def _name(part: Part, estimate: Estimate) -> str:
    """A part as the names of its kernels begin."""
    assembly = estimate.assembly
    if part in assembly.kinds:
        return kind_label(assembly, part).rstrip(".") or "layers"
    return "head" if part is assembly.head else "embedding"


def _prefix(part: Part, estimate: Estimate) -> str:
    """The name of a part where there are several kinds of it, with a colon."""
    name = _name(part, estimate)
    return "" if name == "layers" else f"{name}: "


def _times(part: Part, count: float, estimate: Estimate) -> str:
    """How often a step runs a part."""
    layers = f"{counted(count, 'layer')} x " if part in estimate.assembly.kinds else ""
    return f"{layers}{counted(estimate.job.microbatches, 'micro-batch')}"


def _of_step(each_s: float, count: float, estimate: Estimate) -> str:
    """Seconds of all runs of a part in a step."""
    return seconds(each_s * count * estimate.job.microbatches)


ROLES = frozenset({"router", "moe", "moe_act", "shared_experts"})
"""Roles of the ops of a layer with experts, except attention and norms."""


def experts(estimate: Estimate) -> FactList:
    """The experts of one device, the rows of each, and every op of theirs on the busiest stage, in the layer's order."""
    job = estimate.job
    moe, p = job.model.moe, job.parallelism
    if moe is None:
        raise ValueError("model.moe: not set, so there are no experts")
    kernels = [row for row in op_times(estimate) if row.op is not None and row.op.role in ROLES]
    layers = [op for part in estimate.assembly.kinds for op in part.ops]
    products = [op for op in layers if isinstance(op, Gemm) and op.routed]
    own = f"{moe.n_experts / p.ep:g} on a device (ep {p.ep:g}, etp {p.etp:g})"
    facts = [Fact("experts", [f"{moe.n_experts}, {moe.experts_per_token} of them for each token; {own}"])]
    if products:
        routed = Rows(moe, job.model.hidden_sz, estimate.assembly.shard)
        kept = float(routed.sent) / float(routed.tokens)  # experts per token without those dropped, or with padding
        rows = f"{whole(float(routed.tokens))} tokens of a device x {kept:.5g} x ep {p.ep:g}"
        rows += (f" x etp {p.etp:g}" if p.etp != 1 else "") + f" / {moe.n_experts}"
        rows += f" x load {products[0].load:g}" if products[0].load != 1.0 else ""
        facts.append(Fact("rows", [f"{whole(float(products[0].m))} per expert and micro-batch: {rows}"]))
    for row in kernels:
        each = f"{seconds(row.forward_s)} forward + {seconds(row.backward_s)} backward"
        name = row.name if row.forward_s else f"{row.name}, casts"
        facts.append(Fact(name, [f"{whole(row.times)} x ({each}) = {seconds(row.step_s)}"]))
    names = {name for op in layers if isinstance(op, Comm) and op.role in ROLES for name in call_names(op.name)}
    sent = [row for row in estimate.collectives if row.name in names]
    for call in sent:
        text = f"{whole(call.count_per_step)} x {seconds(call.time_s)}, {seconds(call.exposed_s)} exposed, over {call.tier}"
        facts.append(Fact(call.name, [text]))
    total = sum(row.step_s for row in kernels) + sum(call.exposed_s for call in sent)
    facts.append(Fact("each", ["3dtrn explain PLAN NAME has FLOPs over rate, or latency and bytes over rate"]))
    share = percent(total / estimate.step_s)
    return FactList(f"experts: {seconds(total)}, {share} of the step, without recomputation and launch gaps", facts)


def calls(times: float, forward_s: float, backward_s: float, estimate: Estimate) -> str:
    """Calls of a step with the seconds of each, their sum, and its share of the step."""
    total = times * (forward_s + backward_s)
    share = percent(total / estimate.step_s)
    return (
        f"{whole(times)} x ({seconds(forward_s)} forward + {seconds(backward_s)} backward) = {seconds(total)}, {share}"
    )
