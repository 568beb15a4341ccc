"""Damaged, rearranged and random input at every door: no traceback, no hang, nothing executed, no answer that cannot be true.

    python benchmarks/fuzz.py [DOOR ...] [--first N] [--cases N] [--minutes M] [--seeds FOLDER ...] [--keep FOLDER]

Doors: plans (every key drawn at random), files (plans as people write them, damaged), machines, tables, configs (Hugging Face's),
launches, logs, calibrations, server, checkpoints; all of them without a word. A case is a number, so that --first N --cases 1
--keep FOLDER shows one again. --minutes is CPU time of each door; --seeds adds launch files, or checkpoints, a folder each.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import fuzz_files
import fuzz_plans
import fuzz_server
import fuzzing
from fuzzing import Door


def _checkpoints(folders: list[Path]) -> Door:
    import fuzz_checkpoint

    return fuzz_checkpoint.door(folders)


DOORS: dict[str, Callable[[list[Path]], Door]] = {
    "plans": lambda _: fuzz_plans.door(),
    "files": lambda _: fuzz_files.plans(),
    "machines": lambda _: fuzz_files.machines(),
    "tables": lambda _: fuzz_files.tables(),
    "configs": lambda _: fuzz_files.configs(),
    "launches": fuzz_files.launches,
    "logs": lambda _: fuzz_files.logs(),
    "calibrations": lambda _: fuzz_files.calibrations(),
    "server": lambda _: fuzz_server.door(),
    "checkpoints": _checkpoints,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Damaged, rearranged and random input at every door.")
    parser.add_argument("doors", nargs="*", metavar="DOOR", help=", ".join(DOORS))
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--cases", type=int, default=1 << 30, help="how many of each door")
    parser.add_argument("--minutes", type=float, default=1.0, help="CPU time of each door")
    parser.add_argument("--seeds", type=Path, nargs="*", default=[], help="folders of whole inputs")
    parser.add_argument("--keep", type=Path, help="where failing cases are kept")
    options = parser.parse_args()
    if unknown := set(options.doors) - DOORS.keys():
        parser.error(f"no door is called {', '.join(sorted(unknown))}; they are {', '.join(DOORS)}")
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, resource.getrlimit(resource.RLIMIT_AS)[1]))
    bad = 0
    for name in options.doors or DOORS:
        began = time.process_time()
        asked = fuzzing.Run(options.first, options.cases, options.minutes, options.keep)
        tries, failed = fuzzing.run(name, DOORS[name](options.seeds), asked)
        spent = f"{(time.process_time() - began) / 60:.1f} min of CPU"
        print(f"{name}: {tries:,} cases, {spent}: {len(failed)} fail {failed[:20]}", flush=True)
        bad += len(failed)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
