"""The parts of the step, on the busiest stage; they sum to the step."""

from __future__ import annotations

from steptime.base.rows import Pipeline, Time
from steptime.cost.work import Work
from steptime.job.mesh import comm_part
from steptime.schedule import in_flight
from steptime.timing.step_time import StepTime, run_pipeline

Seconds = dict[str, float]


def step_parts(timing: StepTime) -> Time:
    """Exposed seconds by kind of work, and the communication that is hidden."""
    m, stage = timing.job.microbatches, timing.busiest
    parts: Seconds = dict.fromkeys(("gemm", "attention", "memory_bound", "launch", "recompute", "tp_comm"), 0.0)
    hidden: Seconds = {"tp_comm": 0.0}
    for chunk in timing.assembly.stages[stage]:
        for times, part in timing.parts.works(chunk):
            for work in (timing.parts.of[part].forward, timing.parts.of[part].backward):
                add_work(parts, hidden, work, times * m)
        for times, _, work in timing.parts.replays(chunk):
            parts["recompute"] += times * m * (work.seconds - work.comm_s)
            add_comm(parts, hidden, work, times * m)
    if timing.job.parallelism.pp > 1:
        parts["bubble"] = pipeline(timing).bubble_s
        idle_s = timing.walk.makespan_s - timing.walk.busy_s[stage]
        parts["pp_comm"] = timing.passes * idle_s - parts["bubble"]
    add_after(timing, parts, hidden)
    return Time(
        timing.step_s,
        {name: seconds for name, seconds in parts.items() if seconds or name in {"gemm", "attention"}},
        {name: seconds for name, seconds in hidden.items() if seconds},
    )


def host_seconds(timing: StepTime) -> dict[str, float]:
    """Seconds that the busiest stage waits for its host, by the part of the step that they are counted in."""
    found = {"launch": 0.0, "recompute": 0.0}
    for chunk in timing.assembly.stages[timing.busiest]:
        for times, part in timing.parts.works(chunk):
            found["launch"] += times * sum(float(work.host_s) for work in timing.parts.of[part][:2])
        found["recompute"] += sum(times * float(work.host_s) for times, _, work in timing.parts.replays(chunk))
    return {part: each * timing.job.microbatches for part, each in found.items()}


def add_after(timing: StepTime, parts: Seconds, hidden: Seconds) -> None:
    """Data parallelism, embedding, optimizer, the host's own part and stragglers."""
    parts["dp_comm"] = timing.fsdp_exposed_s
    if timing.dp:
        parts["dp_comm"] += timing.dp.reduce_exposed_s + timing.dp.gather_exposed_s
        stages = [calls[timing.busiest] for calls in (timing.dp.reductions, timing.dp.gathers) if calls]
        total = sum(call.cost.time_s * call.times for stage in stages for chunk in stage for call in chunk)
        hidden["dp_comm"] = max(0.0, total - parts["dp_comm"])
    elif timing.fsdp:
        total = timing.job.microbatches * timing.fsdp.network_s
        copies = timing.job.microbatches * timing.fsdp.copies_s
        # stages gather, copy and reduce one after the other as a pipeline fills and drains
        parts["dp_comm"] = min(max(0.0, timing.fsdp_exposed_s - copies), timing.job.parallelism.pp * total)
        parts["memory_bound"] += timing.fsdp_exposed_s - parts["dp_comm"]
        hidden["dp_comm"] = max(0.0, total - parts["dp_comm"])
    parts["tp_comm"] += timing.norm_reduce.time_s
    parts["embedding_comm"] = timing.embedding_reduce.time_s
    host = timing.optimizer.host
    parts["optimizer"], parts["host_optimizer"] = float(timing.optimizer.device_s), float(host.waited_s)
    parts["host_comm"] = parts.get("host_comm", 0.0) + float(host.copied_s)
    hidden["host_comm"] = hidden.get("host_comm", 0.0) + float(host.hidden_s)
    parts["launch"] += float(timing.optimizer.around_s)
    parts["stragglers"] = timing.straggler_s


def add_work(parts: dict[str, float], hidden: dict[str, float], work: Work, times: float) -> None:
    """Add one direction of one part."""
    parts["gemm"] += times * work.gemm_s
    parts["attention"] += times * work.attention_s
    parts["memory_bound"] += times * work.memory_s
    parts["launch"] += times * work.launch_s
    add_comm(parts, hidden, work, times)


def add_comm(parts: dict[str, float], hidden: dict[str, float], work: Work, times: float) -> None:
    """Add its communication by part."""
    for call in work.calls:
        name = comm_part(call.axis)
        parts[name] = parts.get(name, 0.0) + times * call.exposed_s
        hidden[name] = hidden.get(name, 0.0) + times * call.hidden_s


def pipeline(timing: StepTime) -> Pipeline:
    """Bubble and in-flight counts. The bubble is the idle time of the busiest stage when sends are free."""
    job, p, walked = timing.job, timing.job.parallelism, timing.walk
    bubble = 0.0
    if p.pp > 1:
        free = run_pipeline(job, timing.chunks, [0.0] * len(timing.boundary_costs))
        bubble = timing.passes * (free.makespan_s - free.busy_s[timing.busiest])
    counts = in_flight(job.schedule, p.pp, p.vpp, job.schedule_microbatches, p.microbatch_group_sz)
    return Pipeline(job.schedule, p.pp, job.microbatches, bubble, walked.idle_fraction, counts)


def hardware_flops(timing: StepTime) -> float:
    """FLOPs that all devices run in a step, recomputation included."""
    p, parts, total = timing.job.parallelism, timing.parts, 0.0
    for chunk in timing.assembly.chunks:
        total += sum(
            [n * (parts.of[part].forward.flops + parts.of[part].backward.flops) for n, part in parts.works(chunk)]
        )
        total += sum([n * work.flops for n, _, work in parts.replays(chunk)])
    return total * timing.job.microbatches * p.tp * p.cp * p.dp
