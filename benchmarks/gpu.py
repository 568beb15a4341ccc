"""Llama 1B to 8B on one GPU: `python benchmarks/gpu.py --out benchmarks/results/h200`.

The machine is measured once; then every plan runs in a process of its own, and the machine predicts it. No constant comes from
the steps. Plans whose results are there are not run again, so a run that was cut off goes on where it stopped; a plan that fails
(out of memory, say) is named, and the others run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tabulate import tabulate

CONFIG = Path(__file__).parents[1] / "configs" / "bench" / "gpu_llama3_1b.yaml"
GIB = 2.0**30


class Plan(NamedTuple):
    """One training job on one device, a micro-batch a step."""

    model: str
    seqlen: int
    microbatch_sz: int
    recompute: str

    @property
    def name(self) -> str:
        """As its folder is called."""
        return f"{self.model}_s{self.seqlen}_b{self.microbatch_sz}_{self.recompute}"

    @property
    def sets(self) -> list[str]:
        """What it changes in CONFIG."""
        return [
            f"model={self.model}",
            f"data.seqlen={self.seqlen}",
            f"data.microbatch_sz={self.microbatch_sz}",
            f"data.gbs={self.microbatch_sz}",
            f"performance.activation_checkpointing_type={self.recompute}",
        ]


PLANS = [
    *(Plan("llama3-1b", 2048, b, "none") for b in (1, 4)),
    *(Plan("llama3-1b", 4096, 2, recompute) for recompute in ("none", "selective", "full")),
    *(Plan("llama3-1b", 8192, 2, recompute) for recompute in ("none", "full")),
    *(Plan("llama3-3b", 2048, b, "none") for b in (1, 2)),
    *(Plan("llama3-3b", 4096, 2, recompute) for recompute in ("none", "selective", "full")),
    *(Plan("llama3-8b", 2048, b, "none") for b in (1, 2)),
    *(Plan("llama3-8b", 4096, 1, recompute) for recompute in ("none", "selective", "full")),
    Plan("llama3-8b", 4096, 4, "full"),
    Plan("llama3-8b", 8192, 1, "full"),
]


def bench(folder: Path, *arguments: str) -> dict[str, Any]:
    """One benchmark in a process of its own, or what it left before."""
    path = folder / "results.json"
    if not path.exists():
        command = [sys.executable, "-m", "steptime.bench", str(CONFIG), "--out", str(folder), *arguments]
        subprocess.run(command, check=True)
    return dict(json.loads(path.read_text(encoding="utf-8")))


def sets(settings: list[str]) -> list[str]:
    """As arguments."""
    return [word for setting in settings for word in ("--set", setting)]


def measured(out: Path, plan: Plan, machine: Path, steps: int, *, trace: bool) -> dict[str, Any]:
    """One plan's row: its step and its memory, predicted and measured."""
    settings = sets([*plan.sets, f"hardware.node_type={machine}"])
    found = bench(out / plan.name, "--only", "step", "--steps", str(steps), *settings, *["--trace"] * trace)
    (step,) = found["steps"]
    row = {"plan": plan.name, "step s": step["median_s"], "predicted s": step["predicted_step_s"]}
    for kind in ("allocated", "reserved"):
        (held,), (expected,) = step[f"{kind}_peak_bytes"], step[f"predicted_{kind}_bytes"]
        row |= {f"{kind} GiB": held and held / GIB, f"predicted {kind}": expected / GIB}
    return row


def errors(rows: list[dict[str, Any]]) -> list[str]:
    """Mean and worst absolute error of each figure, and its bias."""
    lines = []
    for name, predicted in (
        ("step s", "predicted s"),
        *((f"{k} GiB", f"predicted {k}") for k in ("allocated", "reserved")),
    ):
        found = [row[predicted] / row[name] - 1.0 for row in rows if row[name]]
        if found:
            sizes = [abs(error) for error in found]
            figures = (sum(sizes) / len(sizes), max(sizes), sum(found) / len(found))
            mean, worst, bias = (f"{100.0 * figure:+.1f} %" for figure in figures)
            lines.append(f"{name.split()[0]}: mean {mean[1:]}, worst {worst[1:]}, bias {bias}, {len(found)} plans")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plans", default="", help="only plans with this in their name")
    parser.add_argument("--seconds", default="90", help="of the sweeps that measure the machine")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    bench(options.out / "machine", "--only", "sweeps,block", "--seconds", options.seconds)
    machine = options.out / "machine" / "machine.yaml"
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    for plan in (plan for plan in PLANS if options.plans in plan.name):
        trace = plan == Plan("llama3-8b", 4096, 1, "none")
        try:
            rows.append(measured(options.out, plan, machine, options.steps, trace=trace))
        except subprocess.CalledProcessError as error:
            failed.append(f"{plan.name}: failed with {error.returncode}; why: {options.out / plan.name / 'bench.log'}")
        table = tabulate(rows, headers="keys", tablefmt="github", floatfmt=".4g")
        text = "\n".join([f"`{' '.join(sys.argv)}`", "", table, "", *errors(rows), *failed, ""])
        (options.out / "predicted_vs_measured.md").write_text(text, encoding="utf-8")
    print((options.out / "predicted_vs_measured.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
