"""The answer, before any breakdown: the job, whether it fits, step time, and MFU."""

from __future__ import annotations

from steptime.answer.result import Estimate
from steptime.base.rows import Fix, Saving
from steptime.base.words import counted
from steptime.report.breakdown import part_name
from steptime.report.format import COUNT, SI, gib, number, percent, quantity, seconds, whole
from steptime.report.table import Fact, FactList, Table, Tone

_WIDEST = 5

VERDICTS: dict[str, tuple[str, Tone]] = {
    "fits": ("FITS", "good"),
    "tight": ("TIGHT", "warn"),
    "does_not_fit": ("DOES NOT FIT", "bad"),
}
RULE = (
    "FITS: the upper estimate of needed memory (p90 of reserved memory, plus context and communicators) is within capacity; "
    "DOES NOT FIT: the lower estimate (allocated memory, plus the same) exceeds capacity; TIGHT: otherwise"
)
"""How the verdict is made, in one sentence."""


def headline(estimate: Estimate) -> list[str]:
    """The job in brief: model, devices, layout, batch."""
    job = estimate.job
    machine = job.machine.name.removesuffix("-node")  # it may be the name of a rack or cluster
    node = counted(estimate.nodes, f"{machine} node")
    params = estimate.params
    active = f", {quantity(params.active, COUNT)} active" if params.active != params.total else ""
    model = f"{job.model.name or 'unnamed model'}, {quantity(params.total, COUNT)} parameters{active}"
    devices = f"{estimate.devices:,} x {job.machine.accelerator.name} ({node})"
    data = job.data
    batch = f"gbs {data.gbs:,} x {data.seqlen:,} tokens, micro-batch {data.microbatch_sz}"
    return [*_pair(model, devices), *_pair(layout_words(estimate), batch)]


def phrases(line: str) -> list[str]:
    """The phrases of a line that are aligned in columns."""
    return [part.strip() for part in line.split("  ") if part.strip()]


def _pair(left: str, right: str) -> list[str]:
    """Two texts on one line where they fit, the right one in its middle; else on two lines."""
    if len(left) + 2 + len(right) > 80:
        return [left, "  " + right]
    start = max(len(left) + 2, min(40, 80 - len(right)))
    return [left.ljust(start) + right]


def layout_words(estimate: Estimate) -> str:
    """Degrees that are set or above one: "tp 8  pp 4  dp 32  vpp 5  sp  zero 1"."""
    job, spread = estimate.job, estimate.job.parallelism
    words = [f"{axis} {getattr(spread, axis)}" for axis in ("tp", "pp", "dp")]
    words += [
        f"{axis} {getattr(spread, axis)}" for axis in ("vpp", "cp", "ep", "replicas") if getattr(spread, axis) > 1
    ]
    words += ["sp"] if job.sp else []
    words += ["fsdp"] if spread.fsdp else [f"zero {job.zero_level}"]
    return "  ".join(words)


def answer(estimate: Estimate, *, brief: bool = False) -> FactList:
    """Verdict, step, MFU; with `brief` one line each on the parts of time and memory."""
    word, tone = VERDICTS[estimate.memory.verdict]
    rate = estimate.throughput
    peak = f"{quantity(rate.peak_flops_used, SI, 'FLOP/s')} {rate.peak_dtype} dense"
    step = [seconds(estimate.time.step_s), quantity(rate.tokens_per_s, COUNT) + " tokens/s"]
    step.append(number(rate.tokens_per_s_per_device, 4) + " tokens/s/device")
    step.append(number(rate.model_tflops_per_device) + " TFLOP/s/device")
    mfu = [
        f"{percent(rate.mfu)} of {peak} (causal attention halved)",
        f"{percent(rate.mfu_full_attention)} with full attention counted (PaLM, torchtitan)",
        f"{percent(rate.hfu)} HFU, with recomputation counted",
    ]
    facts = [
        Fact(word, [_room(estimate)], tone),
        Fact("STEP", ["   ".join(step), *interval(estimate, brief=brief)]),
        Fact("MFU", mfu[:1] if brief else mfu),
        *(Fact("HOST", [line]) for line in host(estimate)),
    ]
    rest = (
        [Fact("TIME", [_widest(estimate)]), Fact("MEMORY", [_memory_contents(estimate)])]
        if brief
        else [Fact("WORK", _work(estimate))]
    )
    return FactList("", [*facts, *_whole_run(estimate), *rest])


HOST_SHARE = 0.25
"""Share of launch gaps in the step above which the answer says what waits for the host."""


def host(estimate: Estimate) -> list[str]:
    """That the device waits for its host, where launch gaps take much of the step."""
    time = estimate.time
    return estimate.host_bound if time.parts_s.get("launch", 0.0) > HOST_SHARE * time.step_s else []


def _widest(estimate: Estimate) -> str:
    """The largest parts of the step, in percent."""
    time = estimate.time
    parts = sorted(time.parts_s.items(), key=lambda part: -part[1])
    shown = [(name, value / time.step_s) for name, value in parts if value >= 0.02 * time.step_s][:_WIDEST]
    return ", ".join(f"{part_name(name)} {100.0 * share:.0f} %" for name, share in shown)


def _memory_contents(estimate: Estimate) -> str:
    """Contents of the fullest stage at its peak."""
    row = estimate.memory.stages[estimate.memory.worst_stage]
    parts = (
        ("parameters", row.params_bytes),
        ("gradients", row.gradients_bytes),
        ("optimizer", row.optimizer_bytes),
        ("activations and transients", row.activations_bytes + row.transient_bytes),
    )
    return ", ".join(f"{name} {gib(size)}" for name, size in parts) + f"; reserved {gib(row.reserved_bytes)} GiB"


def _whole_run(estimate: Estimate) -> list[Fact]:
    """Days and cost, where the plan has a run section with tokens."""
    found = estimate.run or {}
    if not {"days", "tokens"} <= found.keys():
        return []
    days = found.get("wall_days", found["days"])
    counted = f"with {', '.join(found['counted'])}" if found.get("counted") else "training only"
    if "mtbf_s" in found and not any("failures" in name for name in found.get("counted", ())):
        counted += " (failures cost nothing without run.restart_s or the checkpoint keys)"
    words = [f"{number(days, 4)} days{_span(estimate, days)} for {quantity(found['tokens'], COUNT)} tokens, {counted}"]
    if "device_hours" in found:
        words.append(f"{quantity(found['device_hours'], COUNT)} device-hours")
    if "cost" in found and "price_per_device_hour" in found:
        whose = "" if found["price_source"].startswith("run.") else f", from {estimate.job.machine.name}"
        words.append(
            f"cost {quantity(found['cost'], COUNT)} ({found['price_per_device_hour']:g} per device-hour{whose})"
        )
    return [Fact("RUN", ["   ".join(words)])]


def _span(estimate: Estimate, days: float) -> str:
    """The 80 % interval of the step, as days."""
    time = estimate.time
    low, high = (days * end / time.step_s for end in (time.step_s_p10, time.step_s_p90))
    return f" (80 % interval {number(low)} to {number(high)})"


def interval(estimate: Estimate, *, brief: bool = False, runs: bool = True) -> list[str]:
    """The range of the measured step in 80 of 100 cases, why it is extrapolated, and the nearest measured `runs`."""
    time = estimate.time
    basis = time.basis
    near = f" ({basis.n} measured {'cell' if basis.n == 1 else 'cells'})" if basis.evidence == "measured nearby" else ""
    far = f" in {len(basis.extrapolation)} ways" if brief and len(basis.extrapolation) > 1 else ""
    span = f"80 % interval {seconds(time.step_s_p10)} to {seconds(time.step_s_p90)}, {basis.evidence}{near}{far}"
    if brief:
        return [span]
    lines = [span, *(f"extrapolated: {text}" for text in basis.extrapolation)]
    for run in basis.nearest if runs else ():
        differs = f"; differs: {', '.join(run['differs'])}" if run.get("differs") else "; the same plan"
        lines.append(f"nearest {run['id']}: measured / predicted {run['measured_over_predicted']:.3f}{differs}")
    return lines


def _work(estimate: Estimate) -> list[str]:
    """Parameters and FLOPs, for checking."""
    params, flops = estimate.params, estimate.flops
    tied = f" and {whole(params.tied_copies)} in a tied copy" if params.tied_copies else ""
    model, executed = (quantity(x, SI, "FLOP") for x in (flops.model_per_step, flops.hardware_per_step))
    active = f", {whole(params.active)} active per token" if params.active != params.total else ""
    lora = estimate.job.model.lora
    trained = f", {whole(estimate.trained_params)} trained (LoRA of rank {lora.rank})" if lora else ""
    return [
        f"{whole(params.total)} parameters{active}{trained}{tied}",
        f"{model} per step (model), {executed} executed",
    ]


def _room(estimate: Estimate) -> str:
    """Least and most memory that the worst stage needs; the memory table has the same figures."""
    memory = estimate.memory
    capacity, least, most = memory.capacity_bytes, memory.least_bytes, memory.most_bytes
    where = f"on stage {memory.worst_stage} (highest)" if len(memory.stages) > 1 else "per device"
    told = f"needs {gib(least)} {'or more' if memory.open_ended else f'to {gib(most)}'} of {gib(capacity)} GiB {where}"
    if memory.host_overflows:
        told += f", {gib(memory.host_bytes)} of {gib(memory.host_capacity_bytes or 0.0)} GiB of a node's host"
    if memory.host_overflows and least <= capacity:
        return told
    match memory.verdict:
        case "fits":
            return f"{told}; {gib(capacity - most)} GiB free{_thin(estimate)}"
        case "tight" if memory.open_ended:
            return f"{told}; similar measured runs give no upper bound"
        case "tight":
            return f"{told}; at most {gib(most - capacity)} GiB over"
        case _:
            return f"{told}; at least {gib(least - capacity)} GiB over"


def _thin(estimate: Estimate) -> str:
    """What the free memory means where it is less than the upper half of the interval, whose end is a 90th percentile."""
    memory = estimate.memory
    expected = memory.peak_reserved_bytes + sum(memory.overhead_bytes)
    if memory.capacity_bytes - memory.most_bytes >= memory.most_bytes - expected:
        return ""
    return f", a thin margin: up to 1 run in 10 needs more than {gib(memory.most_bytes)} GiB"


NOTHING_FITS = (
    "tried: recomputation, micro-batch, ZeRO, tp, pp, cp, ep, some of them together; 3dtrn search PLAN tries every layout",
    "else use more devices, or devices with more memory",
)
"""What to do where no change fits."""


def fixes(estimate: Estimate) -> Table | None:
    """The changes with the least step time that make a job fit; None where it fits already."""
    if estimate.memory.fits:
        return None
    rows = []
    for fix in estimate.fixes:
        rows += [[line] for line in typed(fix.set)]
        rows.append([f"    {fix_cost(fix)}"])
    if not rows and estimate.memory.verdict == "tight":
        return None
    heading = "no change found that makes it fit"
    if rows:
        fits = estimate.fixes[0].verdict == "fits"
        heading = (
            f"{'to make it fit' if fits else 'no change found that makes it fit; to make it TIGHT'}, fastest first"
        )
    notes = ["devices and batch stay; 3dtrn search PLAN ranks every layout"] if rows else NOTHING_FITS
    return Table(heading, [], rows, notes)


def fix_cost(fix: Fix | Saving) -> str:
    """Step time and memory with a change."""
    tight = ", tight" if fix.verdict == "tight" else ""
    cost = f"{seconds(fix.step_s)} a step, {100.0 * fix.step_change:+.1f} %"
    return f"{cost}; needs up to {gib(fix.most_bytes)} GiB{tight}"


def typed(settings: str) -> list[str]:
    r"""Settings as typed: on one line where they fit, else one --set per line, which a shell reads as one command.

    >>> typed("--set parallelism.tp=4 --set parallelism.pp=2")
    ['--set parallelism.tp=4 --set parallelism.pp=2']
    >>> typed("--set performance.overlap.ep=true --set performance.moe.dispatcher=flex --set parallelism.tp=2")[0]
    '--set performance.overlap.ep=true \\'
    """
    if len(settings) <= 78:
        return [settings]
    *first, last = ["--set " + setting for setting in settings.removeprefix("--set ").split(" --set ")]
    return [*(f"{line} \\" for line in first), last]
