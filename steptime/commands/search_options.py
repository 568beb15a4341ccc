"""Options of `3dtrn search`, `scale` and `sensitivity`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.commands import view_options
from steptime.commands.argument_types import positive_count, words

if TYPE_CHECKING:
    import argparse


def _config(made: argparse.ArgumentParser) -> None:
    made.add_argument("config", metavar="PLAN", help="a YAML or JSON file, or - for standard input")
    made.add_argument(
        "--set", dest="sets", action="append", default=[], metavar="A.B=C", help="change a setting; may be repeated"
    )


def add_scale(made: argparse.ArgumentParser) -> None:
    """All options of `3dtrn scale`."""
    view_options.add_to_scale(made)
    made.add_argument("--best", action="store_true", help="search the best layout of each size")
    made.add_argument(
        "--devices", metavar="LOW:HIGH", help="with --best, the sizes; LOW:HIGH doubles (default: 1 to 8 x the plan's)"
    )


def add_sensitivity(made: argparse.ArgumentParser) -> None:
    """All options of `3dtrn sensitivity`."""
    _config(made)
    made.add_argument("--json", action="store_true", help="rows in SI units")
    made.add_argument("--plot", metavar="FILE", help="bar chart; .png, .svg or .pdf")


def add(made: argparse.ArgumentParser) -> None:
    """All options of `3dtrn search`."""
    made.add_argument(
        "config", metavar="PLAN", nargs="?", help="a YAML or JSON file, or -; parallelism may be left out"
    )
    made.add_argument("--model", metavar="NAME", help="model preset (3dtrn models); PLAN is then optional")
    made.add_argument(
        "--set", dest="sets", action="append", default=[], metavar="A.B=C", help="change a setting; may be repeated"
    )
    made.add_argument(
        "--devices", metavar="N|LOW:HIGH", help="number of devices; LOW:HIGH doubles (default: the plan's)"
    )
    made.add_argument("--gbs", metavar="N|LOW:HIGH", help="sequences per step; LOW:HIGH doubles (default: the plan's)")
    made.add_argument("--fix", action="append", default=[], metavar="K=V", help="fix an axis or a setting: tp=8")
    made.add_argument(
        "--over",
        action="append",
        default=[],
        metavar="K=A,B",
        help="try these values: performance.precision=bf16,mxfp8",
    )
    made.add_argument("--machine", type=words, default=[], metavar="A,B", help="try these machines")
    made.add_argument("--objective", choices=("step", "cost", "energy", "memory"), default="step", help="what counts")
    made.add_argument(
        "--top", type=positive_count, default=5, metavar="N", help="number of layouts to show (default: 5)"
    )
    made.add_argument("--pareto", action="store_true", help="show only the Pareto front of memory and the objective")
    form = made.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="layouts with their plans, in SI units")
    form.add_argument("--csv", action="store_true", help="print the best layouts as CSV")
    made.add_argument("--plot", metavar="FILE", help="draw memory against step time; .png, .svg or .pdf")
    made.add_argument("--html", metavar="FILE", help="write the result as an HTML page")
    made.add_argument("--save", metavar="BEST.yaml", help="write the best plan to FILE")
