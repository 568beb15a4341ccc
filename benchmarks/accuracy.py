"""Errors on the shipped measured runs in brief: the second table of the README; docs/validation.md has all of it.

python benchmarks/accuracy.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from steptime.report.validation import cells
from steptime.validation.compare import Judgement, judge
from steptime.validation.measurements import shipped
from steptime.validation.summary import headline, memory_errors, stats, step_errors

NVIDIA = ("NeMo", "Megatron-LM", "NeMo Megatron")


def line(name: str, errors: Iterable[tuple[tuple[str, ...], float]]) -> str:
    """One row of the table."""
    found = stats(errors)
    return f"| {name} | {' | '.join(cells(found._asdict()))} |\n" if found else ""


def main() -> None:
    """Print the table: step times of test rows, then peak memory."""
    judged = [judge(row) for row in shipped()]
    test = [j for j in headline(judged) if j.row.text("split") == "test"]

    def step(name: str, wanted: Callable[[Judgement], bool]) -> str:
        return line(f"step time, {name}", step_errors(j for j in test if wanted(j)))

    print("| what | rows | cells | median | mean | p90 | bias |\n|---|---:|---:|---:|---:|---:|---:|")
    print(step("all dense bf16 and fp16 runs", lambda _: True), end="")
    print(
        step("NeMo on H100", lambda j: j.row.text("framework").startswith("NeMo") and "h100" in j.accelerator), end=""
    )
    print(step("Megatron-LM and NeMo", lambda j: j.row.text("framework").startswith(NVIDIA)), end="")
    print(step("other trainers", lambda j: not j.row.text("framework").startswith(NVIDIA)), end="")
    simumax = [j for j in judged if j.row.group == "simumax"]
    print(line("peak allocated memory, Megatron-LM on 8 x B200 (fit and test)", memory_errors(simumax)), end="")


if __name__ == "__main__":
    main()
