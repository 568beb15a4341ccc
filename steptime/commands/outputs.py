"""The files that a command writes in addition to its text: pages, traces, pictures, plans."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from steptime.base.config import ConfigError
from steptime.report.output_files import check_path, write_file

if TYPE_CHECKING:
    from steptime.answer.result import Estimate

_SUFFIXES = {"html": (".html", ".htm"), "trace": (".json", ".json.gz"), "trace_memory": (".pickle", ".pkl")}


def check(options: Namespace) -> None:
    """Whether the requested files can be written, checked before anything is estimated.

    Raises:
        ConfigError: a suffix of no known format, or no such folder.
    """
    asked = {name: path for name, path in vars(options).items() if path is not None}
    if "plot" in asked:
        from steptime.report import plot_style

        plot_style.check(options.plot)
    for name, suffixes in _SUFFIXES.items():
        if name in asked:
            check_path(f"--{name.replace('_', '-')}", asked[name], suffixes)


def write(options: Namespace, estimate: Estimate) -> None:
    """Write the requested files of an estimate.

    Raises:
        ConfigError: a file cannot be written.
    """
    if options.html is not None:
        from steptime.report.page.whole_page import page

        write_file("--html", options.html, page(estimate).encode("utf-8"))
    if options.trace is not None:
        from steptime.report import trace

        trace.write(estimate, options.trace)
    if options.trace_memory is not None:
        import pickle

        from steptime.report.memory_snapshot import snapshot

        write_file("--trace-memory", options.trace_memory, pickle.dumps(snapshot(estimate), protocol=4))
    if options.plot is not None:
        from steptime.report import plot_estimate

        plot_estimate.draw(estimate, options.plot)


def check_save(path: str) -> None:
    """Refuse, before any work, a path of --save that cannot become a new file.

    Raises:
        ConfigError: the file exists already, or its folder does not.
    """
    if Path(path).exists():
        raise ConfigError(f"--save {path}: file exists; remove it or use another name")
    if not Path(path).parent.is_dir():
        raise ConfigError(f"--save {path}: folder {Path(path).parent} does not exist")


def write_new(path: str, text: str, named: str, fix: str = "remove it or use another name") -> None:
    """Write a new file; a problem begins with `named`.

    Raises:
        ConfigError: it exists already, or cannot be written.
    """
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{named}: file exists; {fix}") from None
    except FileNotFoundError:
        raise ConfigError(f"{named}: folder {Path(path).parent} does not exist") from None
    except OSError as error:
        raise ConfigError(f"{named}: cannot be written ({error.strerror})") from None
