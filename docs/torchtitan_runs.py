"""The table of docs/launch.md: torchtitan's own runs, each its job config as a user has it, beside what torchtitan measured.

python docs/torchtitan_runs.py
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from steptime import Job, estimate
from steptime.launch.torchtitan.job_config import read_torchtitan

TABLES = "benchmarks/llama3_h100_202412_torchtitan.md"
RUNS = "dsv3_scaling_experiment_results.md"
COMPILE: dict[str, Any] = {"training": {"compile": True}}
FLOAT8: dict[str, Any] = COMPILE | {
    "model": {"converters": ["float8"]},
    "float8": {"enable_fsdp_float8_all_gather": True, "filter_fqns": ["output"]},
}


class Run(NamedTuple):
    """A model and its layout, the keys that its job config changes, and what its source measured (torchtitan@31a17bfd)."""

    name: str
    devices: int
    machine: str
    keys: dict[str, Any]
    tokens_per_s: float
    reserved_gib: float
    source: str


def llama(flavor: str, batch: int, mode: str, **parallelism: int) -> dict[str, Any]:
    """The keys of a Llama 3 of 2024."""
    return {
        "model": {"name": "llama3", "flavor": flavor},
        "training": {"batch_size": batch, "seq_len": 8192},
        "activation_checkpoint": {"mode": mode, "selective_ac_option": "op"},
        "parallelism": parallelism,
    }


DEEPSEEK = {
    "model": {"name": "deepseek_v3", "flavor": "16B"},
    "training": {"local_batch_size": 16, "seq_len": 4096},
    "activation_checkpoint": {"mode": "full"},
    "parallelism": {"expert_parallel_degree": 4},
    "compile": {"enable": True, "components": ["loss"]},
}
GRAND_TETON = "grand-teton-h100"
B8 = llama("8B", 2, "selective")
B70 = llama("70B", 16, "full", tensor_parallel_degree=8)


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Sections of both."""
    return {name: {**first.get(name, {}), **second.get(name, {})} for name in {**first, **second}}


FLOAT8_ASYNC = merged(FLOAT8, {"parallelism": {"enable_async_tensor_parallel": True}})
MEASURED = (
    Run("Llama 3.1 8B, FSDP 8", 8, GRAND_TETON, B8, 5762, 82.4, TABLES),
    Run("the same, torch.compile", 8, GRAND_TETON, merged(B8, COMPILE), 6667, 77.0, TABLES),
    Run("the same, torch.compile, float8", 8, GRAND_TETON, merged(B8, FLOAT8), 8532, 76.8, TABLES),
    Run("Llama 3.1 8B, FSDP 128", 128, GRAND_TETON, B8, 5605, 67.0, TABLES),
    Run("the same, torch.compile", 128, GRAND_TETON, merged(B8, COMPILE), 6514, 62.0, TABLES),
    Run("the same, torch.compile, float8", 128, GRAND_TETON, merged(B8, FLOAT8), 8380, 61.8, TABLES),
    Run(
        "Llama 3.1 70B, FSDP 32, TP 8, torch.compile, float8", 256, GRAND_TETON, merged(B70, FLOAT8), 829, 71.9, TABLES
    ),
    Run("the same, asynchronous TP", 256, GRAND_TETON, merged(B70, FLOAT8_ASYNC), 876, 67.6, TABLES),
    Run("DeepSeek-V3 16B, FSDP 8, EP 4, loss compiled", 8, f"{GRAND_TETON}-700w", DEEPSEEK, 10160, 68.76, RUNS),
)
"""Of all but the last no constant was fitted, and none of them is a row of the collection; the last is one, marked fit."""


def toml(keys: dict[str, Any]) -> str:
    """Sections and keys as a job config has them."""
    lines = []
    for section, values in keys.items():
        lines += [f"[{section}]", *(f"{key} = {_value(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value).replace("'", '"')


def predicted(run: Run) -> tuple[float, float]:
    """Tokens/s/device, and GiB reserved on the worst stage."""
    read = read_torchtitan("job.toml", toml(run.keys), {"WORLD_SIZE": str(run.devices)})
    job = Job(**read.config, hardware=run.machine)
    found = estimate(job)
    speed = job.data.gbs * job.data.seqlen / run.devices / found.step_s
    return speed, found.memory.peak_reserved_bytes / 2**30


def row(run: Run) -> list[str]:
    """Predicted and measured of one run."""
    speed, gib = predicted(run)
    sizes = (
        (f"{speed:,.0f}", f"{run.tokens_per_s:,.0f}", speed / run.tokens_per_s),
        (f"{gib:.1f}", f"{run.reserved_gib:.1f}", gib / run.reserved_gib),
    )
    return [run.name, *(cell for one, other, ratio in sizes for cell in (one, other, f"{100 * (ratio - 1):+.0f} %"))]


def main() -> None:
    """Print the table."""
    header = ["run", "tokens/s/device", "measured", "off by", "GiB reserved", "measured", "off by"]
    sys.stdout.write(f"| {' | '.join(header)} |\n|---|{'---:|' * 6}\n")
    for run in MEASURED:
        sys.stdout.write(f"| {' | '.join(row(run))} |\n")


if __name__ == "__main__":
    main()
