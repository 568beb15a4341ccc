"""The command line: `3dtrn PLAN` and its subcommands. Parses, calls, prints, returns an exit code.

Exit codes: 0 done; 1 answered "no" under --check, or nothing fits in a search; 2 bad input; 130 interrupted. Nothing but the
parser is imported before it is needed.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable
from importlib import import_module

from steptime import __version__
from steptime.commands.argument_types import Parser
from steptime.commands.options import ADD

OK, BAD_INPUT, INTERRUPTED = 0, 2, 130

SUBCOMMANDS = {
    "search": "find the best layout on a number of devices",
    "sensitivity": "effect of 10 % more bandwidth, FLOP/s or memory",
    "scale": "step time by data-parallel degree: weak and strong scaling",
    "diff": "compare plans, launch files, logs: settings, step, memory",
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
OWN_MODULE = frozenset({"search", "diff", "explain", "serve", "bench", "init"})
"""Subcommands with their own module, NAME_command; all others run in `plans`."""


def main(argv: list[str] | None = None) -> int:
    """Run one command line (that of the process by default) and return its exit code."""
    args = sys.argv[1:] if argv is None else argv
    if argv is None:  # a process of our own, which runs for a fifth of a second
        gc.disable()
    # streams that the caller closed: writing output is an error, messages are dropped
    for stream, mode in (("stdout", "r"), ("stderr", "w")):
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115  open till the end
    code = _code(args)
    if argv is None and (not args or args[0] not in SUBCOMMANDS):
        _leave(code)
    return code


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
    own_parser = parser(name)
    own_parser.subcommands = SUBCOMMANDS
    if given and not given[0].startswith("-"):
        own_parser.first = given[0]
    mixed = name in {"explain", "diff"}  # arguments may follow --set
    options = own_parser.parse_intermixed_args(given) if mixed else own_parser.parse_args(given)
    options.typed = args
    from steptime.base.config import ConfigError
    from steptime.commands import console

    try:
        out = console.Printer(options.color, ascii_only=options.ascii, as_json=getattr(options, "json", False))
        if not name and options.completion:
            from steptime.commands import completion

            out.text(completion.script(options.completion, {each: parser(each) for each in ("", *SUBCOMMANDS)}))
            return OK
        module = import_module(f"steptime.commands.{f'{name}_command' if name in OWN_MODULE else 'plans'}")
        run: Callable[[argparse.Namespace, console.Printer], int] = getattr(module, name or "report")
        return run(options, out)
    except ConfigError as error:
        console.tell(error.problems)
        return BAD_INPUT


def _misspelt(args: list[str]) -> str | None:
    """The subcommand that a mistyped first word probably means, if it is not a file."""
    from pathlib import Path

    if not args or args[0].startswith("-") or Path(args[0]).exists():
        return None
    from difflib import get_close_matches

    return next(iter(get_close_matches(args[0], SUBCOMMANDS, n=1, cutoff=0.75)), None)


def parser(name: str = "") -> Parser:
    """The parser of a subcommand, or of the bare `3dtrn PLAN`."""
    parser = Parser(
        prog=f"3dtrn {name}".rstrip(),
        description=_about(name),
        epilog=None if name else _subcommand_help(),
        formatter_class=_help,
        allow_abbrev=False,
    )
    if name in ADD:
        ADD[name](parser)
    parser.add_argument(
        "--color", choices=["auto", "always", "never"], default="auto", help="auto: on a terminal, unless NO_COLOR"
    )
    parser.add_argument("--ascii", action="store_true", help="ASCII output only")
    if not name:
        parser.add_argument(
            "--completion", choices=("bash", "zsh", "fish"), help="print a completion script for a shell"
        )
        parser.add_argument("--version", action="version", version=f"3dtrn (steptime) {__version__}")
    return parser


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
    head = "subcommands (3dtrn NAME --help; for a file with such a name use ./NAME):"
    codes = [
        "exit codes: 0 ok; 1 --check or --min-mfu failed, or nothing fits in a search;",
        "2 bad input; 130 interrupted",
    ]
    return "\n".join([head, *lines, "", *codes])
