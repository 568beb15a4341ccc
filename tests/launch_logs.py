"""Lines of training logs, as the frameworks print them; sources beside each."""

from __future__ import annotations

import json
import re
from pathlib import Path

from steptime.commands import cli

LOGS = Path(__file__).parent / "data" / "launch" / "logs"
MEGATRON = LOGS / "megatron-llama3-8b.log"
BEGIN, END = (
    "------------------------ arguments ------------------------",
    "-------------------- end of arguments ---------------------",
)


def dump(**changes: object) -> list[str]:
    """The argument dump of the Llama 3 8B log with arguments changed (megatron/training/arguments.py, _print_args)."""
    lines = MEGATRON.read_text().splitlines()
    found = dict(
        re.match(r"  (\w+) \.+ (.*)", line).groups() for line in lines[lines.index(BEGIN) + 1 : lines.index(END)]
    )
    found |= {name: str(value) for name, value in changes.items()}
    return [BEGIN, *(f"  {name} {'.' * (48 - len(name))} {value}" for name, value in found.items()), END]


def head(**changes: object) -> list[str]:
    """What stands before the first iteration: the dump and the vocabulary."""
    return [*dump(**changes), " > padded vocab (size: 128256) with 0 dummy tokens (new size: 128256)", "training ..."]


def iteration(number: int, ms: float, *, batch: int = 128, tflops: float | None = None, total: int = 1000) -> str:
    """megatron/training/training.py, training_log."""
    rate = "" if tflops is None else f" throughput per GPU (TFLOP/s/GPU): {tflops:.1f} |"
    return (
        f" [2025-11-03 10:00:00] iteration {number:8d}/{total:8d} | consumed samples: {number * batch:12d} | "
        f"elapsed time per iteration (ms): {ms:.1f} |{rate} learning rate: 3.000000E-05 | global batch size: {batch:5d} | "
        "lm loss: 1.100000E+01 | loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   0 | number of nan "
        "iterations:   0 |"
    )


def memory(rank: int, allocated: float, reserved: float, after: int = 2) -> str:
    """megatron/training/utils, report_memory: MB of 2**20 bytes."""
    return (
        f"[Rank {rank}] (after {after} iterations) memory (MB) | allocated: {allocated / 2:.2f} | max allocated: "
        f"{allocated:.2f} | reserved: {reserved:.2f} | max reserved: {reserved:.2f}"
    )


def write(path: Path, lines: list[str]) -> str:
    """A log file; its name."""
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def run(capsys, *args):
    """Exit code, output and errors of `3dtrn validate`."""
    code = cli.main(["validate", *map(str, args)])
    return (code, *capsys.readouterr())


def document(capsys, *args):
    """What it prints as JSON."""
    code, out, err = run(capsys, *args, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)
