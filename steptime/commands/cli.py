"""The command line: `3dtrn PLAN` and its subcommands. Parses, calls, prints, returns an exit code.

Exit codes: 0 done; 1 answered "no" under --check; 2 bad input. Nothing but the parser is imported before it is needed.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from steptime import __version__
from steptime.commands import launch_options, view_options
from steptime.commands.argument_types import Parser, count, share, whole

if TYPE_CHECKING:
    from collections.abc import Callable

OK, BAD_INPUT, INTERRUPTED = 0, 2, 130

SUBCOMMANDS = {
    "search": "find the best layout on a number of devices",
    "sensitivity": "effect of 10 % more bandwidth, FLOP/s or memory",
    "scale": "step time by data-parallel degree: weak and strong scaling",
    "diff": "compare plans or training logs: settings, step, memory",
    "explain": "show one figure, or a measured row, as formula and numbers",
    "serve": "interactive page to change a plan and see its report",
    "bench": "measure this machine with torch and compare with predictions",
    "validate": "compare measured runs, or a training log, with estimates",
    "init": "write a commented plan to start from",
    "machines": "list the included machines",
    "models": "list the included model presets",
    "show": "print a machine, model or software profile as YAML with sources",
    "schema": "JSON Schema of a plan, for editors",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command line (that of the process by default) and return its exit code."""
    args = sys.argv[1:] if argv is None else argv
    if argv is None:  # a process of our own, which runs for a fifth of a second and needs no pydantic plugins
        _no_plugins()
        gc.disable()
    # streams that the caller closed: writing output is an error, messages are dropped
    for stream, mode in (("stdout", "r"), ("stderr", "w")):
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115  open till the end
    code = _code(args)
    if argv is None and (not args or args[0] not in SUBCOMMANDS):
        _leave(code)
    return code


def _no_plugins() -> None:
    """Keep pydantic from looking for plugins: the search alone would import importlib.metadata, email and zipfile."""
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    name = "pydantic.plugin._loader"

    def loaded(attribute: str) -> object:
        """Other attributes of that module, for later versions of pydantic."""
        if attribute.startswith("__"):  # queries of the import system
            raise AttributeError(attribute)
        sys.modules.pop(name)
        return getattr(import_module(name), attribute)

    stand_in = ModuleType(name)
    vars(stand_in).update(get_plugins=tuple, __getattr__=loaded)
    sys.modules[name] = stand_in


def _code(args: list[str]) -> int:
    """Run, and turn what ends a command early into an exit code."""
    try:
        return _run(args)
    except SystemExit as stop:  # argparse: help and usage errors
        return stop.code if isinstance(stop.code, int) else OK
    except KeyboardInterrupt:
        return INTERRUPTED


def _leave(code: int) -> None:
    """End the process of a report immediately: freeing its objects one by one takes a sixth of its time."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # the interpreter reports at exit what it could not write
        return
    os._exit(code)


def _run(args: list[str]) -> int:
    """Parse, run, and turn bad input into one line per problem."""
    name = args[0] if args and args[0] in SUBCOMMANDS else ""
    given = (args[1:] if name else args) or ([] if name else ["--help"])
    if not name and (meant := _misspelt(args)):
        sys.stderr.write(f"{args[0]}: no such file, and no subcommand; did you mean {meant}?\n")
        return BAD_INPUT
    made = parser(name)
    mixed = name in {"explain", "diff"}  # arguments may follow --set
    options = made.parse_intermixed_args(given) if mixed else made.parse_args(given)
    options.typed = args
    from steptime.base.config import ConfigError
    from steptime.commands import console
    from steptime.commands import plans as commands
    from steptime.report.table import unstyled

    run: Callable[[argparse.Namespace, console.Printer], int] = getattr(commands, name or "report")
    try:
        out = console.Printer(options.color, ascii_only=options.ascii)
        if not name and options.completion:
            from steptime.commands import completion

            out.text(completion.script(options.completion, {each: parser(each) for each in ("", *SUBCOMMANDS)}))
            return OK
        return run(options, out)
    except ConfigError as error:
        sys.stderr.writelines(unstyled(problem) + "\n" for problem in error.problems)
        return BAD_INPUT


def _misspelt(args: list[str]) -> str | None:
    """The subcommand that a mistyped first word probably means, if it is not a file."""
    from pathlib import Path

    if not args or args[0].startswith("-") or Path(args[0]).exists():
        return None
    from difflib import get_close_matches

    return next(iter(get_close_matches(args[0], SUBCOMMANDS, n=1, cutoff=0.75)), None)


def parser(name: str = "") -> argparse.ArgumentParser:
    """The parser of a subcommand, or of the bare `3dtrn PLAN`."""
    made = Parser(
        prog=f"3dtrn {name}".rstrip(),
        description=_about(name),
        epilog=None if name else _subcommand_help(),
        formatter_class=_help,
        allow_abbrev=False,
    )
    _ARGUMENTS.get(name, _no_arguments)(made)
    made.add_argument(
        "--color", choices=["auto", "always", "never"], default="auto", help="auto: on a terminal, unless NO_COLOR"
    )
    made.add_argument("--ascii", action="store_true", help="ASCII output only")
    if not name:
        made.add_argument("--completion", choices=("bash", "zsh", "fish"), help="print a completion script for a shell")
        made.add_argument("--version", action="version", version=f"3dtrn (steptime) {__version__}")
    return made


def _help(prog: str) -> argparse.HelpFormatter:
    """Help for 80 columns; asking for the terminal's width would import shutil and its compressors."""
    return argparse.RawDescriptionHelpFormatter(prog, width=80)


def _about(name: str) -> str:
    if name:
        text = SUBCOMMANDS[name]
        return text[0].upper() + text[1:] + "."
    return "Predict the memory, step time and MFU of a transformer training job."


def _subcommand_help() -> str:
    width = max(map(len, SUBCOMMANDS))
    lines = [f"  {name:<{width}}  {about}" for name, about in SUBCOMMANDS.items()]
    return "\n".join(
        [
            "subcommands (3dtrn NAME --help; for a file with such a name use ./NAME):",
            *lines,
            "",
            "exit codes: 0 ok, 1 --check or --min-mfu failed, 2 bad input",
        ]
    )


def _no_arguments(made: argparse.ArgumentParser) -> None:
    del made


def _report(made: argparse.ArgumentParser) -> None:
    made.add_argument("config", metavar="PLAN", nargs="?", help="a YAML or JSON file, or - for standard input")
    made.add_argument(
        "--set", dest="sets", action="append", default=[], metavar="A.B=C", help="change a setting; may be repeated"
    )
    _plan_options(made)
    form = made.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help='raw figures in SI units, schema "3dtrn/1"')
    form.add_argument("--brief", action="store_true", help="only the answer: time, memory, one line of assumptions")
    made.add_argument("--assumed", action="store_true", help="list every assumption")
    launch_options.add(made)
    made.add_argument(
        "--calibrate", metavar="FILE", help="your own measured step times: a YAML list of {config, step_s}"
    )
    made.add_argument("--check", action="store_true", help="exit 1 unless the job fits")
    made.add_argument(
        "--min-mfu",
        type=share,
        metavar="X",
        help="exit 1 if the MFU (causal attention halved) is below X: 0.4 or 40%%",
    )
    view_options.add_to_report(made)


def _plan_options(made: argparse.ArgumentParser) -> None:
    """Options that make a plan without a file, or change one."""
    made.add_argument("--model", metavar="NAME", help="model preset (3dtrn models)")
    made.add_argument("--machine", metavar="NAME", help="machine (3dtrn machines)")
    made.add_argument("--devices", type=whole, metavar="N", help="number of devices; data parallelism follows")


def _init(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "path", metavar="FILE", nargs="?", default="plan.yaml", help="file to write, or - (default: plan.yaml)"
    )
    _plan_options(made)


def _explain(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "config",
        metavar="PLAN",
        nargs="?",
        help="a YAML or JSON file, - for standard input, or the id of a measured row",
    )
    made.add_argument(
        "name", metavar="NAME", nargs="?", help="a matrix multiply, a collective or a total; omit to list all"
    )
    made.add_argument(
        "--set", dest="sets", action="append", default=[], metavar="A.B=C", help="change a setting of the plan"
    )
    made.add_argument(
        "--measurements", metavar="FILE.csv", help="look up the row in this file, not in the included ones"
    )
    made.add_argument("--yaml", action="store_true", help="for a row, print only its plan")
    made.add_argument(
        "--trace", metavar="FILE", nargs="+", help="torch.profiler traces, one per rank: measured vs. predicted"
    )
    made.add_argument("--json", action="store_true", help="print as JSON")
    made.add_argument("--key", metavar="A.B", help="explain a key of a plan; no PLAN needed")


def _validate(made: argparse.ArgumentParser) -> None:
    made.add_argument("--measurements", metavar="FILE.csv", help="your own measured runs (default: included ones)")
    made.add_argument("--source", metavar="S", help="only rows whose source is S or whose id contains S")
    made.add_argument("--gpu", metavar="G", help="only rows whose gpu contains G")
    made.add_argument(
        "--split", default="all", metavar="fit|test|all", help="rows used for fitting constants, or held-out rows"
    )
    made.add_argument(
        "--profile",
        choices=("known", "unknown"),
        default="known",
        help="use the framework release of each row, or only the framework name (default: known)",
    )
    made.add_argument("--worst", type=count, default=10, metavar="N", help="largest errors to list (default: 10)")
    made.add_argument("--json", action="store_true", help="print the summary and every row as JSON")
    made.add_argument("--plot", metavar="FILE", help="plot predicted against measured; .png, .svg or .pdf")
    _add("log_options", "add_to_validate", made)


def _listing(made: argparse.ArgumentParser) -> None:
    made.add_argument("--json", action="store_true", help="raw figures in SI units")


def _show(made: argparse.ArgumentParser) -> None:
    _listing(made)
    made.add_argument("name", metavar="NAME", help="a machine, model, accelerator or software profile")


def _add(module: str, name: str, made: argparse.ArgumentParser) -> None:
    """Options that another module adds, imported when its subcommand is asked for."""
    getattr(import_module(f"steptime.commands.{module}"), name)(made)


_ARGUMENTS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "": _report,
    "search": partial(_add, "search_options", "add"),
    "sensitivity": partial(_add, "search_options", "add_sensitivity"),
    "scale": partial(_add, "search_options", "add_scale"),
    "diff": partial(_add, "log_options", "add_to_diff"),
    "explain": _explain,
    "bench": partial(_add, "bench_options", "add"),
    "serve": view_options.add_to_serve,
    "init": _init,
    "validate": _validate,
    "show": _show,
    "machines": _listing,
    "models": _listing,
}
