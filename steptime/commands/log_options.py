"""Options of `3dtrn validate` and `3dtrn diff` for reading a training log."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

KIND = "framework of the log: megatron, torchtitan, nemo"
UNMODELED = "ignore flags of the log that are not modeled"


def add_to_validate(made: argparse.ArgumentParser) -> None:
    """The options of `3dtrn validate` that read logs instead of rows."""
    logs = made.add_argument_group("validate a training log: its own plan, measured vs. predicted")
    logs.add_argument(
        "--log", nargs="+", action="extend", metavar="FILE", help="logs of one job (nodes, restarts), plain or gzip"
    )
    logs.add_argument(
        "--set", dest="sets", action="append", default=[], metavar="A.B=C", help="change a setting in the log's plan"
    )
    logs.add_argument("--from", dest="kind", metavar="KIND", help=KIND)
    logs.add_argument(
        "--plan", metavar="FILE", help="a plan, config or launch script of the job, for a log that prints none"
    )
    logs.add_argument("--save-csv", metavar="OUT.csv", help="append the run as a row for --measurements")
    logs.add_argument("--allow-unmodeled", "--allow-unmodelled", action="store_true", help=UNMODELED)


def add_to_diff(made: argparse.ArgumentParser) -> None:
    """All options of `3dtrn diff`."""
    text = "two or more plans (YAML, JSON, or - for standard input), or a training log and a plan or log"
    made.add_argument("files", metavar="FILE", nargs="*", help=text)
    made.add_argument(
        "--set",
        dest="sets",
        action="append",
        default=[],
        metavar="A.B=C",
        help="change a setting in all plans",
    )
    made.add_argument("--json", action="store_true", help="print as JSON")
    made.add_argument("--html", metavar="FILE", help="write the comparison as an HTML page")
    made.add_argument("--from", dest="kind", metavar="KIND", help=KIND)
    made.add_argument("--allow-unmodeled", "--allow-unmodelled", action="store_true", help=UNMODELED)
