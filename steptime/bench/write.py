"""The files of one benchmark's results: results.json and machine.yaml."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    from steptime.bench.conclude import Conclusion
    from steptime.bench.device import BenchDevice
    from steptime.bench.run import Raw


class BenchResults(NamedTuple):
    """One benchmark on the root: measurements, conclusions, and file locations."""

    world_line: str
    device: BenchDevice
    raw: Raw
    found: Conclusion
    document: dict[str, Any]
    """results.json."""
    files: list[str]


def write(folder: Path, run: BenchResults) -> BenchResults:
    """Write results.json; returns the run with the names of its files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(run.document, indent=1) + "\n", encoding="utf-8")
    files = ["machine.yaml"] if run.found.machine else []
    return run._replace(files=[str(folder / name) for name in [*files, "results.json"]])
