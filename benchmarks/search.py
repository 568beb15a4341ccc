"""How fast the search is: layouts a second and core, beside estimates of a sample of the same space one by one.

    python benchmarks/search.py [--devices 4096] [--sample 40]

Times are CPU seconds of one process on one thread, so that a busy machine does not change them. The whole process of the command
line is timed by the clock.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

from steptime import Job, estimate
from steptime.search.run import run
from steptime.search.search import Asked, Search
from steptime.search.space import Axes

ROOT = Path(__file__).parents[1]
PLAN, EXPERTS = ROOT / "configs" / "gpt3_175b_h100.yaml", ROOT / "configs" / "deepseek_v3.yaml"


def main() -> None:
    """Print one line per space, the scalar loop, the process and its memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=4096)
    parser.add_argument("--sample", type=int, default=40)
    options = parser.parse_args()
    whole_process(options.devices)  # first: a process starts with the most memory that its parent has had
    found = space("the usual axes", PLAN, options.devices)
    one_by_one(found, options.sample)
    blocks = [{"granularity": "full", "method": "block", "n_layers": n} for n in range(1, 96)]
    words = ("none", "selective")
    counted = {"performance.activation_checkpointing_type": words, "performance.recompute": tuple(blocks)}
    space("every count of recomputed layers", PLAN, options.devices, counted)
    space("experts, the usual axes", EXPERTS)


def space(name: str, plan: Path, devices: int | None = None, axes: Mapping[str, Any] | None = None) -> Search:
    """Search one space and print how long it took."""
    job = Job.load(plan)
    start = process_time()
    found = run(job, Asked((devices or job.parallelism.devices,), (job.data.gbs,), Axes(axes or {})))
    seconds = process_time() - start
    counts = found.counts
    print(
        f"{name}: {counts.points:,} layouts, {counts.evaluated:,} can run, {seconds:.2f} s: "
        f"{counts.evaluated / seconds:,.0f} computed a second, {counts.points / seconds:,.0f} of the cross product"
    )
    return found


def one_by_one(found: Search, sample: int) -> None:
    """Estimate a sample of the layouts by themselves."""
    of = random.Random(1).choices(found.found, weights=[len(of.row) for of in found.found], k=sample)
    layouts = [found.plan.replace(**one.block.changes(int(one.choice[0]), int(one.row[0]))) for one in of]
    start = process_time()
    for layout in layouts:
        estimate(layout)
    print(f"one by one: {len(layouts) / (process_time() - start):,.1f} a second")


def whole_process(devices: int) -> None:
    """Run the command itself."""
    start = perf_counter()
    command = [sys.executable, "-c", "import sys; from steptime.commands.cli import main; sys.exit(main())"]
    subprocess.run(
        [*command, "search", str(PLAN), "--devices", str(devices), "--csv", "--top", "3"],
        check=True, stdout=subprocess.DEVNULL, cwd=ROOT,
    )  # fmt: skip
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"the whole process: {perf_counter() - start:.2f} s by the clock, {used.ru_utime + used.ru_stime:.2f} s of CPU, "
        f"{used.ru_maxrss / 1024:.0f} MB; {os.cpu_count()} cores, numpy {np.__version__}"
    )


if __name__ == "__main__":
    main()
