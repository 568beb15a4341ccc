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
from pathlib import Path
from time import perf_counter, process_time

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parents[1]
PLAN = ROOT / "configs" / "gpt3_175b_h100.yaml"


def main() -> None:
    """Print one line per space, the scalar loop, the process and its memory."""
    import numpy as np

    from steptime import Job, estimate
    from steptime.search.run import run
    from steptime.search.search import Asked
    from steptime.search.space import Axes

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=4096)
    parser.add_argument("--sample", type=int, default=40)
    options = parser.parse_args()
    job = Job.load(PLAN)
    blocks = [{"granularity": "full", "method": "block", "n_layers": n} for n in range(1, 96)]
    spaces = {
        "the usual axes": Axes(),
        "every count of recomputed layers": Axes(
            {"performance.activation_checkpointing_type": ("none", "selective"), "performance.recompute": tuple(blocks)}
        ),
    }
    for name, axes in spaces.items():
        start = process_time()
        found = run(job, Asked((options.devices,), (job.data.gbs,), axes))
        seconds = process_time() - start
        counts = found.counts
        print(
            f"{name}: {counts.points:,} layouts, {counts.evaluated:,} can run, {seconds:.2f} s: "
            f"{counts.evaluated / seconds:,.0f} computed a second, {counts.points / seconds:,.0f} of the cross product"
        )
    draw = random.Random(1)
    of = draw.choices(found.found, weights=[len(of.row) for of in found.found], k=options.sample)
    layouts = [job.replace(**one.block.changes(int(one.choice[0]), int(one.row[0]))) for one in of]
    start = process_time()
    for layout in layouts:
        estimate(layout)
    each = (process_time() - start) / len(layouts)
    print(f"one by one: {1.0 / each:,.1f} a second")
    start = perf_counter()
    command = [sys.executable, "-c", "import sys; from steptime.commands.cli import main; sys.exit(main())"]
    subprocess.run(
        [*command, "search", str(PLAN), "--devices", str(options.devices), "--csv", "--top", "3"],
        check=True, stdout=subprocess.DEVNULL, cwd=ROOT,
    )  # fmt: skip
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"the whole process: {perf_counter() - start:.2f} s by the clock, {used.ru_utime + used.ru_stime:.2f} s of CPU, "
        f"{used.ru_maxrss / 1024:.0f} MB; {os.cpu_count()} cores, numpy {np.__version__}"
    )


if __name__ == "__main__":
    main()
