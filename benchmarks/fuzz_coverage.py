"""Input at one door, changed in the direction of code that no input has reached: atheris (libFuzzer) instead of numbers.

    python benchmarks/fuzz_coverage.py DOOR [--minutes M] [--keep FOLDER]

Doors: files, machines, tables, configs, launches, logs, calibrations (`fuzz.py` says of what). Needs `pip install atheris`. A
case that is wrong ends the run: libFuzzer prints the traceback and writes the input as FOLDER/crash-... .
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any
from zlib import crc32

atheris: Any = import_module("atheris")

with atheris.instrument_imports(include=["steptime"]):
    import fuzz_files
    import fuzzing

DOORS = {
    "files": fuzz_files.plans,
    "machines": fuzz_files.machines,
    "tables": fuzz_files.tables,
    "configs": fuzz_files.configs,
    "launches": lambda: fuzz_files.launches([]),
    "logs": fuzz_files.logs,
    "calibrations": fuzz_files.calibrations,
}
LARGEST = 20_000
"""Bytes of an input."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Input changed in the direction of code that none has reached.")
    parser.add_argument("door", choices=DOORS)
    parser.add_argument("--minutes", type=float, default=1.0, help="time of the run")
    parser.add_argument("--keep", type=Path, default=Path(), help="where a failing input is kept")
    options = parser.parse_args()
    door, scratch = DOORS[options.door](), Path(tempfile.mkdtemp())
    assert door.given is not None
    given, watch, folder = door.given, fuzzing.Watch(), scratch / "case"
    watch.folder = str(folder)
    names = sorted(door.whole)
    import_module("ctypes")  # its first import opens a library
    with fuzzing.silenced():
        door.warm(scratch / "warm")
    corpus = scratch / "corpus"
    corpus.mkdir()
    for i, name in enumerate(names):
        (corpus / str(i)).write_bytes(door.whole[name][:LARGEST])

    def once(data: bytes) -> None:
        """One input under the name of a whole one, which its bytes choose, as a command of the door."""
        number = crc32(data)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        case = given(random.Random(number), folder, names[number % len(names)], data)
        wrong = fuzzing.tried(case, 4 * door.seconds, watch)
        if wrong is not None:
            raise RuntimeError(f"{case.told}\n{wrong}")

    def change(data: bytes, most: int, seed: int) -> bytes:
        """Half of the changes are libFuzzer's, half those of values and bytes that people get wrong."""
        draw = random.Random(seed)
        if draw.random() < 0.5:
            with contextlib.suppress(ValueError, TypeError, RecursionError):  # YAML that JSON cannot express
                return fuzz_files.hurt(data, draw, door.whole)[:most]
        return bytes(atheris.Mutate(data, most))

    atheris.Setup(arguments(corpus, options), once, custom_mutator=change)
    atheris.Fuzz()


def arguments(corpus: Path, options: argparse.Namespace) -> list[str]:
    """Options of libFuzzer."""
    return [
        sys.argv[0],
        str(corpus),
        f"-max_total_time={round(60 * options.minutes)}",
        f"-max_len={LARGEST}",
        "-timeout=120",
        "-rss_limit_mb=4000",
        f"-artifact_prefix={options.keep}/",
        "-print_final_stats=1",
        "-verbosity=1",
    ]


if __name__ == "__main__":
    main()
