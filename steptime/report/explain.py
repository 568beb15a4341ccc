"""One figure of a report explained: its formula with the job's numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from math import prod

from steptime.answer.flops import attention_flops_per_token, linear_flops_per_token, scan_flops_per_token
from steptime.answer.result import Estimate
from steptime.answer.tables import kind_label
from steptime.base.rows import CollectiveRow, GemmRow
from steptime.base.words import counted
from steptime.cost import compute
from steptime.cost.product_rates import asymptote_of, grouped_rate, wgrad_share
from steptime.cost.rates import Rates, peak_dtype
from steptime.model.ops import Gemm
from steptime.report import explain_interval
from steptime.report.breakdown import part_name
from steptime.report.details import pipeline
from steptime.report.explain_layers import experts
from steptime.report.explain_parts import PARTS
from steptime.report.explain_rates import (
    collective_facts,
    exchange_facts,
    gemm_constants,
    links,
    network_constants,
    overlap_fact,
    phases,
    priced,
    waves,
)
from steptime.report.explain_run import scaling, whole_run
from steptime.report.explain_stage import stage_named, worst_stage
from steptime.report.explain_terms import page_of
from steptime.report.format import BINARY, COUNT, SI, percent, quantity, seconds, whole
from steptime.report.table import Fact, FactList


class UnknownNameError(LookupError):
    """No figure has that name; the message lists the valid ones."""


def names(estimate: Estimate) -> list[str]:
    """All that can be explained: totals, then matrix multiplies, then collectives."""
    rows = [row.name for row in estimate.gemms] + [row.name for row in estimate.collectives]
    stages = [f"stage {row.stage}" for row in estimate.memory.stages]
    parts = [part for part in PARTS if estimate.time.parts_s.get(part)]
    absent = {"experts": not estimate.job.model.moe, "run": not estimate.run}
    totals = [name for name in _TOTALS if not absent.get(name)]
    return list(dict.fromkeys([*totals, *parts, *stages, *rows]))


def explain(estimate: Estimate, name: str) -> list[FactList]:
    """The formula of one name; a part of the step may be named by its key (memory_bound) or as in reports (memory-bound kernels).

    Raises:
        UnknownNameError: if no total, matrix multiply or collective is called `name`.
    """
    name = _KEYS.get(name.lower(), name)
    if name in _TOTALS and name in names(estimate):
        return [_TOTALS[name](estimate)]
    if name in PARTS:
        return [PARTS[name](estimate)]
    if of_stage := stage_named(estimate, name):
        return [of_stage]
    products: dict[tuple[object, ...], GemmRow] = {}
    for row in estimate.gemms:
        if row.name == name:
            products.setdefault((row.pass_, *row[4:]), row)
    links = [row for row in estimate.collectives if row.name == name]
    calls = [_collective(row, estimate) for row in links]
    found = [_gemm(row, estimate) for row in products.values()] + calls
    if products:
        found.append(_gemm_sources(next(iter(products.values())), estimate))
    if calls:
        found.append(network_constants(estimate, calls))
    page = page_of({row.axis for row in estimate.collectives}, name)
    if page in PARTS or page in names(estimate):
        found += explain(estimate, page)
    if not found:
        known = names(estimate)
        near = get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "names: " + ", ".join(known)
        raise UnknownNameError(f"{name}: this plan has no such name; {hint}")
    return found


def _gemm(row: GemmRow, estimate: Estimate) -> FactList:
    """FLOPs over the sustained rate against bytes over the memory rate."""
    peak = _peak(row, estimate)
    rate, moved = row.flops / row.compute_s, row.input_bytes + row.weight_bytes + row.output_bytes
    slower = max(row.compute_s, row.bandwidth_s)
    bound = "arithmetic" if row.compute_s >= row.bandwidth_s else "memory"
    work = quantity(row.flops, SI, "FLOP")
    per_call = row.flops / (2.0 * row.m * row.n * row.k)
    batch = "" if abs(per_call - 1.0) < 1e-9 else f"{whole(per_call)} x "
    parts = " + ".join(quantity(x, BINARY) for x in (row.input_bytes, row.weight_bytes, row.output_bytes))
    total = row.count_per_step * row.time_s
    facts = [
        Fact("work", [f"{batch}2 m n k = {batch}2 x {whole(row.m)} x {whole(row.n)} x {whole(row.k)} = {work}"]),
        Fact(
            "rate", [f"{quantity(rate, SI, 'FLOP/s')} = {quantity(peak, SI, 'FLOP/s')} dense peak x {rate / peak:.3f}"]
        ),
        Fact("", [_shape(row, rate, estimate)]),
        Fact("waves", [waves(row, _op(row, estimate), estimate.timing.rates)]),
        Fact("math", [f"work / rate = {seconds(row.compute_s)}"]),
        Fact("bytes", [f"input + weight + output = {parts} = {quantity(moved, BINARY)}"]),
        Fact("memory", [f"bytes / {quantity(moved / row.bandwidth_s, SI, 'B/s')} = {seconds(row.bandwidth_s)}"]),
        Fact(
            "time",
            [f"max(math, memory) + {seconds(row.time_s - slower)} launch = {seconds(row.time_s)}, limited by {bound}"],
        ),
        Fact(
            "per step", [f"{_times(row.count_per_step)} = {_of_step(total, estimate)}, a device of stage {row.stage}"]
        ),
    ]
    return FactList(f"{row.name}, {row.pass_}", facts)


def _gemm_sources(row: GemmRow, estimate: Estimate) -> FactList:
    """The sustained rate of a product's dtype, and the constants of all."""
    rates, software, op = estimate.timing.rates, estimate.job.software, _op(row, estimate)
    if op.recipe:
        return gemm_constants(estimate, asymptote_of(op, rates), _dtype(op, estimate))
    return gemm_constants(estimate, rates.gemm_flops, software.compute_dtype)


def _peak(row: GemmRow, estimate: Estimate) -> float:
    """Dense peak of the dtype that a product runs in."""
    device, software, op = estimate.job.machine.accelerator, estimate.job.software, _op(row, estimate)
    of_experts = op.recipe is not None and op.recipe.of_experts
    if not of_experts and (software.recipe is None or op.recipe):
        return estimate.throughput.peak_flops_used
    return device.peak_flops[_dtype(op, estimate)]


def _dtype(op: Gemm, estimate: Estimate) -> str:
    """The rate of the device that a product runs at."""
    device, software = estimate.job.machine.accelerator, estimate.job.software
    if op.recipe is not None and op.recipe.of_experts:
        return next(rate for rate in op.recipe.rates if rate in device.peak_flops)
    return peak_dtype(device, software.precision if op.recipe else software.compute_dtype)


def _op(row: GemmRow, estimate: Estimate) -> Gemm:
    """The matrix multiply of a row."""
    parts = (*estimate.assembly.kinds, estimate.assembly.head)
    named = {
        kind_label(estimate.assembly, part) + op.name: op for part in parts for op in part.ops if isinstance(op, Gemm)
    }
    return named[row.name]


def _shape(row: GemmRow, rate: float, estimate: Estimate) -> str:
    """A rate as the sustained one times the factors for depth, kind of product, and waves of tiles."""
    rates, op = estimate.timing.rates, _op(row, estimate)
    sustained = asymptote_of(op, rates)
    overhead = compute.depth_overhead(op, rates)
    kinds = {name: share for name, share in _kinds(row, op, rates) if share != 1.0}
    rest = rate / (sustained * row.k / (row.k + overhead) * prod(kinds.values()))
    at = f"{quantity(sustained, SI, 'FLOP/s')} sustained x {whole(row.k)} / ({whole(row.k)} + {overhead:.4g})"
    said = "".join(f" x {name} {share:.3g}" for name, share in kinds.items())
    return f"= {at}{said} x {rest:.3f} for waves of tiles"


def _kinds(row: GemmRow, op: Gemm, rates: Rates) -> Iterator[tuple[str, float]]:
    """Factors on the usual rate for this kind of product."""
    if op.recipe:
        yield "fp32 accumulation", {"forward": op.recipe.forward_rate}.get(row.pass_, op.recipe.backward_rate)
    elif not compute.aligned(op):
        yield "no tensor cores", rates.plain_share
    if op.params:
        yield "WGRAD_RATE", {"wgrad": wgrad_share(op, compute.WGRAD_RATE)}.get(row.pass_, 1.0)
    if op.routed:
        rows = whole(float(op.m))
        yield f"{rows} / ({rows} + GROUP_ROWS {compute.GROUP_ROWS:g}) =", float(op.m / (op.m + compute.GROUP_ROWS))
        yield "grouped", grouped_rate(op, rates)


def _collective(row: CollectiveRow, estimate: Estimate) -> FactList:
    """Latency and wire time of one call, and its exposed part."""
    rate = row.bytes / row.bandwidth_s if row.bandwidth_s else 0.0
    total, call = row.count_per_step * row.time_s, priced(row, estimate)
    facts = [
        Fact("group", [f"{counted(row.ranks, 'rank')} along {row.axis}, over {row.tier}"]),
        Fact("tensor", [f"{quantity(row.bytes, BINARY)} in full"]),
        *(collective_facts(row, call) if call else phases(row, exchange_facts(row, estimate))),
        Fact("", [f"{quantity(rate, SI, 'B/s')} of the whole tensor{_ring(row)}"]),
        *(Fact("links", [line]) for line in links(row, estimate)),
        Fact("call", [f"latency + wire + ramp = {seconds(row.time_s)}"]),
        Fact("per step", [f"{_times(row.count_per_step)} = {seconds(total)}"]),
        overlap_fact(row, call),
    ]
    if row.exposed_s:
        facts.append(Fact("share", [_of_step(row.exposed_s, estimate)]))
    return FactList(f"{row.name} ({row.kind.replace('_', '-')})", facts)


def _ring(row: CollectiveRow) -> str:
    """Bus bandwidth, comparable with a link's rate (nccl-tests, doc/PERFORMANCE.md)."""
    share = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0, "all_reduce": 2.0}.get(row.kind)
    if share is None or not row.bandwidth_s:
        return ""
    factor = share * (row.ranks - 1) / row.ranks
    return f" (bus bandwidth {quantity(factor * row.bytes / row.bandwidth_s, SI, 'B/s')})"


def _times(count: float) -> str:
    return f"{whole(count)} {'call' if count == 1 else 'calls'}"


def _of_step(value: float, estimate: Estimate) -> str:
    return f"{seconds(value)}, {percent(value / estimate.time.step_s)} of the step"


def _step(estimate: Estimate) -> FactList:
    time = estimate.time
    widest = sorted(time.parts_s.items(), key=lambda item: -item[1])
    facts = [Fact(part_name(name), [_of_step(value, estimate)]) for name, value in widest if value]
    return FactList(f"step = sum of its parts = {seconds(time.step_s)}", facts)


def _mfu(estimate: Estimate) -> FactList:
    rate, flops, step = estimate.throughput, estimate.flops, estimate.time.step_s
    peak = f"{counted(estimate.devices, 'device')} x {quantity(rate.peak_flops_used, SI, 'FLOP/s')} {rate.peak_dtype} dense"
    ways = (
        ("mfu", flops.model_per_step, rate.mfu, "causal attention halved (Megatron)"),
        ("full", flops.model_per_step_full_attention, rate.mfu_full_attention, "full attention (PaLM, torchtitan)"),
        ("hfu", flops.hardware_per_step, rate.hfu, "all executed FLOPs, including recomputation"),
    )
    data, assembly = estimate.job.data, estimate.assembly
    tokens = float(data.gbs) * data.seqlen
    linear, attention = linear_flops_per_token(assembly), attention_flops_per_token(assembly)
    frozen = linear_flops_per_token(assembly, frozen=True)
    parts = [f"projections and head 6 x {quantity((linear - frozen) / 2.0, COUNT, digits=5)} weights"]
    parts += [f"frozen ones 4 x {quantity(frozen / 2.0, COUNT, digits=5)} weights"] if frozen else []
    if attention:
        parts.append(
            f"attention 3 x {quantity(attention / 2.0, SI, 'FLOP', 4)} (half of 2 n_q_heads (d_qk + d_v) seqlen per layer)"
        )
    if scans := scan_flops_per_token(assembly):
        parts.append(f"scans 3 x {quantity(scans, SI, 'FLOP', 4)}")
    facts = [
        Fact(label, [f"{quantity(work, SI, 'FLOP', 4)} / {seconds(step)} / peak = {percent(share)}; {how}"])
        for label, work, share, how in ways
    ]
    facts.append(
        Fact(
            "model",
            [f"{whole(tokens)} tokens x ({' + '.join(parts)}) = {quantity(flops.model_per_step, SI, 'FLOP', 4)}"],
        )
    )
    return FactList(f"model FLOPs / step / peak, where peak = {peak}", facts)


def _tokens(estimate: Estimate) -> FactList:
    data, rate = estimate.job.data, estimate.throughput
    per_s = quantity(rate.tokens_per_s, COUNT)
    total = f"{data.gbs:,} x {data.seqlen:,} / {seconds(estimate.time.step_s)} = {per_s} tokens/s"
    each = f"over {counted(estimate.devices, 'device')}: {rate.tokens_per_s_per_device:,.1f} tokens/s/device"
    return FactList("gbs x seqlen / step", [Fact("tokens", [total, each])])


def _bubble(estimate: Estimate) -> FactList:
    line = estimate.pipeline
    vpp = estimate.job.parallelism.vpp
    p, m = line.stages, line.microbatches
    m //= estimate.timing.passes
    closed = (p - 1) / (vpp * m + p - 1)
    facts = [
        Fact("closed form", [f"(p - 1) / (v m + p - 1) = ({p} - 1) / ({vpp} x {m} + {p} - 1) = {percent(closed)}"]),
        Fact("mean", [f"{percent(line.bubble_fraction)} of the makespan, over all stages of the walked schedule"]),
        Fact(
            "in the step",
            [f"{_of_step(line.bubble_s, estimate)}: idle time of the busiest stage, {estimate.timing.busiest}"],
        ),
    ]
    shown = pipeline(estimate)
    facts += [fact for fact in (shown.facts if shown else ()) if fact.label != "bubble"]
    return FactList("pipeline bubble (the closed form assumes equal stages and free sends)", facts)


_TOTALS: dict[str, Callable[[Estimate], FactList]] = {
    "step": _step,
    "mfu": _mfu,
    "tokens": _tokens,
    "memory": worst_stage,
    "interval": explain_interval.step,
    "memory_interval": explain_interval.memory,
    "bubble": _bubble,
    "experts": experts,
    "run": whole_run,
    "scaling": scaling,
}

_KEYS = {part_name(key): key for key in (*_TOTALS, *PARTS)}
"""Parts of the step as reports call them, to their keys."""
