"""How fast: a whole `3dtrn` process against dlcalc 0.2.0 beside it, estimates per second, memory, the largest pictures.

    python benchmarks/estimate.py

Installs both into environments of their own under a temporary directory (`pip install .`, `pip install dlcalc==0.2.0`), runs them
in turn and compares. Without a network, or an index that has dlcalc, its column is empty. Needs a POSIX system.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
OURS = ROOT / "configs" / "llama3_70b.yaml"
THEIRS = """
model: {n_layers: 80, hidden_sz: 8192, inter_sz: 28672, n_q_heads: 64, n_kv_heads: 8, head_dim: 128, vocab_sz: 128256,
  glu: true, rotary_embeds: true, dropout: false, tie_embeddings: false}
parallelism: {tp: 8, pp: 4, dp: 32, vpp: 5, sp: true, zero_level: 1, n_param_buckets: 5}
performance: {activation_checkpointing_type: selective}
data: {gbs: 2048, seqlen: 8192, microbatch_sz: 1}
hardware: {node_type: p5.48xlarge}
"""
"""The same job in the words that both programs read. dlcalc has no estimate without recomputation, so here it is selective."""
RUNS = 21
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
"""Nothing that would put another steptime before the installed one."""


class Process(NamedTuple):
    """One run of a program."""

    wall_s: float
    cpu_s: float
    peak_mb: float


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        ours = installed(Path(folder) / "ours", str(ROOT))
        theirs = installed(Path(folder) / "theirs", "dlcalc==0.2.0")
        if ours is None:
            sys.exit("pip install . failed")
        plan = Path(folder) / "plan.yaml"
        plan.write_text(THEIRS, encoding="utf-8")
        processes(ours, [str(OURS)], theirs, [str(plan)])
    rates()
    pictures()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"\n{os.cpu_count()} cores, load {load}; Python {sys.version.split()[0]}")


def installed(folder: Path, requirement: str) -> str | None:
    """The `3dtrn` of a fresh environment that holds the requirement; None where pip cannot get it."""
    venv.create(folder, with_pip=True)
    done = subprocess.run(
        [folder / "bin" / "pip", "install", "--quiet", requirement],
        check=False,
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )
    if done.returncode:
        sys.stderr.write(f"{requirement}: {(done.stderr.splitlines() or ['pip failed'])[-1]}\n")
        return None
    return str(folder / "bin" / "3dtrn")


def processes(ours: str, our_args: list[str], theirs: str | None, their_args: list[str]) -> None:
    """Both programs in turn, so that what else the machine does meets both."""
    found: dict[str, list[Process]] = {"steptime": [], "dlcalc": []}
    for _ in range(RUNS + 1):
        found["steptime"].append(run([ours, *our_args]))
        if theirs is not None:
            found["dlcalc"].append(run([theirs, *their_args]))
    mine, other = found["steptime"][1:], found["dlcalc"][1:]  # the first run warms the file cache
    print(f"{f'one process, {RUNS} runs':34}{'steptime':>10}{'dlcalc':>10}{'ratio':>8}{'target':>16}")
    wall = "under 0.2; 4 x"
    show("wall s, best", *(min((p.wall_s for p in runs), default=None) for runs in (mine, other)), ".3f", wall)
    show("wall s, median", *(median(p.wall_s for p in runs) if runs else None for runs in (mine, other)), ".3f")
    show("CPU s, best", *(min((p.cpu_s for p in runs), default=None) for runs in (mine, other)), ".3f")
    show("peak MB", *(max((p.peak_mb for p in runs), default=None) for runs in (mine, other)), ".1f", "under 60")


def show(name: str, mine: float | None, other: float | None, form: str, target: str = "") -> None:
    """One line of the table."""
    ratio = f"{mine / other:.2f}" if mine and other else ""
    columns = [f"{value:{form}}" if value is not None else "" for value in (mine, other)]
    print(f"{name:34}{columns[0]:>10}{columns[1]:>10}{ratio:>8}{target:>16}".rstrip())


def run(command: list[str]) -> Process:
    """Run a program to its end, its output thrown away."""
    start = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT)
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        sys.exit(f"{' '.join(command)}: exit code {child.returncode}")
    scale = 1e6 if sys.platform == "darwin" else 1e3  # ru_maxrss: bytes there, KiB on Linux
    return Process(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * (1.0 if scale == 1e6 else 1.024) / scale)


def rates() -> None:
    """Estimates per CPU second: step, memory of every stage and verdict."""
    seconds = {plan.stem: best_s(plan) for plan in sorted((ROOT / "configs").rglob("*.yaml"))}
    slowest = max(seconds, key=lambda name: seconds[name][0])
    first, again, whole = zip(*seconds.values(), strict=True)
    layouts, each_s = sweep_s()
    lines = {
        f"the median of {len(seconds)} plans": 1.0 / median(again),
        "the first of its model and shard": 1.0 / median(first),
        "with what blocks keep": 1.0 / median(whole),
        f"{layouts} layouts of {OURS.stem}": 1.0 / each_s,
        f"first of all, {slowest}": 1.0 / seconds[slowest][0],
    }
    print(f"\n{'estimates per CPU second':34}{'steptime':>10}{'':18}{'target':>16}")
    for name, rate in lines.items():
        print(f"{name:34}{rate:>10,.0f}{'':18}{'at least 1,500':>16}")


def forget() -> None:
    """Forget what estimates share."""
    from steptime.cost.rates import RATES
    from steptime.job.assembly import LAYOUTS, SHARED
    from steptime.job.parts import PARTS
    from steptime.timing.step_time import PART_TIMES

    for known in (PARTS, LAYOUTS, SHARED, RATES, PART_TIMES):
        known.clear()


def best_s(plan: Path) -> tuple[float, float, float]:
    """CPU seconds of a first estimate, of one whose parts are known, and of that with `Estimate.memory`; the best of several."""
    from steptime import Job, estimate

    first = again = whole = float("inf")
    for _ in range(7):
        jobs = [Job.load(plan) for _ in range(5)]
        forget()
        start = time.process_time()
        estimate(jobs.pop())
        first = min(first, time.process_time() - start)
        start = time.process_time()
        answers = [estimate(job) for job in jobs]
        again = min(again, (time.process_time() - start) / len(jobs))
        _ = [answer.memory.stages for answer in answers]
        whole = min(whole, (time.process_time() - start) / len(jobs))
    return first, again, whole


def sweep_s() -> tuple[int, float]:
    """Layouts of one plan on its devices, and CPU seconds of an estimate of one of them, from nothing known [s]."""
    from steptime import ConfigError, Job, estimate

    plan, jobs = Job.load(OURS), []
    degrees = product((1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 5), (1, 2, 4))
    for tp, pp, vpp, batch in degrees:
        layout = {"parallelism.tp": tp, "parallelism.pp": pp, "parallelism.vpp": vpp, "data.microbatch_sz": batch}
        with suppress(ConfigError):
            dp = plan.parallelism.devices // (tp * pp)
            jobs.append(plan.replace(**layout, **{"parallelism.dp": dp}))
    forget()
    start = time.process_time()
    for job in jobs:
        estimate(job)
    return len(jobs), (time.process_time() - start) / len(jobs)


def pictures() -> None:
    """CPU seconds of the trace and the page of 65,536 actions, also over what `json.loads` takes for the same trace."""
    from steptime import Job, estimate
    from steptime.report import trace
    from steptime.report.page import whole_page

    found = estimate(
        Job(
            model={"preset": "llama3-70b", "n_layers": 128},
            parallelism={"tp": 8, "pp": 64, "dp": 1},
            data={"gbs": 512, "seqlen": 4096, "microbatch_sz": 1},
            hardware="dgx-h100",
        )
    )
    _ = found.step_s
    text = trace.trace(found)
    read_s = least_cpu_s(lambda: json.loads(text))
    print(f"\n{'65,536 actions':34}{'CPU s':>10}{'parse':>10}{'ratio':>8}{'target':>16}")
    for name, made in {"--trace": trace.trace, "--html": whole_page.page}.items():
        took = least_cpu_s(lambda made=made: made(found))
        show(name, took, read_s, ".2f", "under 5" if name == "--trace" else "")
    print(f"ratio: over json.loads of the trace, {len(text) / 1e6:.0f} MB, {read_s:.2f} s")


def least_cpu_s(call: Callable[[], object]) -> float:
    """The least CPU seconds of three calls [s]."""
    taken = []
    for _ in range(3):
        start = time.process_time()
        call()
        taken.append(time.process_time() - start)
    return min(taken)


if __name__ == "__main__":
    main()
