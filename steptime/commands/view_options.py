"""Options that write an estimate in other forms than text: `--html`, `--trace`, `--trace-memory`, `--plot`, `--watch`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.commands.argument_types import count

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from steptime.answer.result import Estimate


def add_to_report(made: ArgumentParser) -> None:
    """The options of the bare `3dtrn PLAN`."""
    made.add_argument("--html", metavar="FILE", help="write the report as an HTML page")
    made.add_argument("--trace", metavar="FILE", help="one step as a trace for Perfetto; .json or .json.gz")
    made.add_argument("--trace-memory", metavar="FILE", help="memory over one step for pytorch.org/memory_viz; .pickle")
    made.add_argument("--plot", metavar="FILE", help="the report as a picture: .png, .svg or .pdf (extra plot)")
    made.add_argument("--watch", action="store_true", help="print the report again when PLAN changes, until Ctrl-C")


def add_to_scale(made: ArgumentParser) -> None:
    """The options of `3dtrn scale`."""
    made.add_argument("config", metavar="PLAN", help="a YAML or JSON file, or - for standard input")
    made.add_argument(
        "--set", dest="sets", action="append", default=[], metavar="A.B=C", help="change a setting; may be repeated"
    )
    made.add_argument("--json", action="store_true", help="rows in SI units")
    made.add_argument("--plot", metavar="FILE", help="efficiency over devices: .png, .svg or .pdf (extra plot)")


def add_to_serve(made: ArgumentParser) -> None:
    """The options of `3dtrn serve`."""
    made.add_argument("config", metavar="PLAN", nargs="?", help="plan to start from; a YAML or JSON file")
    made.add_argument(
        "--set", dest="sets", action="append", default=[], metavar="A.B=C", help="change a setting of PLAN"
    )
    made.add_argument(
        "--port", type=count, default=8765, metavar="N", help="port to listen on; 0 picks a free one (default: 8765)"
    )
    made.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on (default: loopback only)",
    )


def check(options: Namespace) -> None:
    """Whether the requested files can be written, checked before anything is estimated.

    Raises:
        ConfigError: a suffix of no known format, or no such folder.
    """
    if options.plot is not None:
        from steptime.report import plot_style

        plot_style.check(options.plot)
    if options.html is not None:
        check_html(options.html)
    if options.trace is not None:
        from steptime.report import trace
        from steptime.report.written import check_path

        check_path("--trace", options.trace, trace.SUFFIXES)
    if options.trace_memory is not None:
        from steptime.report import memory_snapshot
        from steptime.report.written import check_path

        check_path("--trace-memory", options.trace_memory, memory_snapshot.SUFFIXES)


def check_html(path: str) -> None:
    """Whether a page can be written there.

    Raises:
        ConfigError: a suffix of no page, or no such folder.
    """
    from steptime.report.page import document
    from steptime.report.written import check_path

    check_path("--html", path, document.SUFFIXES)


def write(options: Namespace, estimate: Estimate) -> None:
    """Write the requested files.

    Raises:
        ConfigError: a file cannot be written.
    """
    if options.html is not None:
        from steptime.report.page import document

        document.write(estimate, options.html)
    if options.trace is not None:
        from steptime.report import trace

        trace.write(estimate, options.trace)
    if options.trace_memory is not None:
        from steptime.report import memory_snapshot

        memory_snapshot.write(estimate, options.trace_memory)
    if options.plot is not None:
        from steptime.report import plot_estimate

        plot_estimate.draw(estimate, options.plot)
