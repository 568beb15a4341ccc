"""One rank of several small jobs, run one after another.

Of each: losses, truths, peaks; or, with "rows", what `run_steps` measures, and a trace.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from steptime.bench.runnable import as_run
from steptime.bench.runs.engines import lay_out
from steptime.bench.runs.step import allocated, gathered, mean_loss, run_steps
from steptime.bench.runs.training import Trainer
from steptime.bench.runs.truths import layout_truths
from steptime.bench.timings import to_dict
from steptime.job.job import Job

CPU = torch.device("cpu")


def main(folder: Path, *, rows: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seen = {}
    for name, config in json.loads((folder / "cases.json").read_text()).items():
        job, _ = as_run(Job(**config), "cpu")
        if rows:
            row = run_steps(job, CPU, steps=2, warmup=1, trace=folder / "trace" / name)
            seen[name] = {"row": to_dict(row)}
            continue
        trainer = Trainer(lay_out(job, CPU))
        losses = [mean_loss(trainer.laid, trainer.step()) for _ in range(2)]
        truths = [truth._asdict() for truth in layout_truths(trainer)]
        peaks = [peak for peak, _ in gathered(allocated(trainer))]
        seen[name] = {"losses": losses, "truths": truths, "peaks": peaks}
    if dist.get_rank() == 0:
        (folder / "seen.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), rows="rows" in sys.argv[2:])
