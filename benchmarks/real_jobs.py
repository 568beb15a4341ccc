"""Errors of peak memory on Megatron-LM's own test jobs, whose logs have torch's allocator to the byte.

    python benchmarks/real_jobs.py

Prints the table of docs/validation.md. `fit` or `test` says nothing here: no constant is fitted to these jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from accuracy import own_tests

from steptime.validation.job_memory import EXPERTS
from steptime.validation.judgement import Judgement

KINDS = ("dense", EXPERTS, "hybrid", "latent attention")
LARGE_BYTES = 10e9


def figures(errors: Iterable[float], *shares: float) -> list[str]:
    """Mean and quantiles of the absolute errors in percent, as cells: the first share, the mean, the others."""
    found = sorted(100.0 * abs(error) for error in errors)
    ends = [found[min(int(share * len(found)), len(found) - 1)] for share in shares]
    return [f"{value:.2f}" for value in (ends[0], sum(found) / len(found), *ends[1:])]


def line(name: str, jobs: Sequence[Judgement]) -> str:
    """One row of the table."""
    between = [held.persisting[1] / held.persisting[0] - 1.0 for j in jobs if (held := j.allocator) and held.persisting]
    peak = [j.memory_error for j in jobs if j.memory_error is not None]
    cells = [name, str(len(jobs)), *figures(between, 0.5, 1.0), *figures(peak, 0.5, 0.9, 1.0)]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    print("| error in % | n | between steps: median | mean | worst | peak: median | mean | p90 | worst |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    jobs = {f"{kind}, `{split}`": own_tests(split, kind) for kind in KINDS for split in ("test", "fit")}
    dense = [j for name, found in jobs.items() if name.startswith("dense") for j in found]
    jobs["dense above 10 GB"] = [j for j in dense if (j.measured_bytes or 0.0) > LARGE_BYTES]
    for name, found in jobs.items():
        if found:
            print(line(name, found))


if __name__ == "__main__":
    main()
