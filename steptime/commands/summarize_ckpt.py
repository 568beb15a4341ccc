"""The command `summarize-ckpt`: parses, calls, prints, returns an exit code."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from fnmatch import fnmatchcase
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, TextIO

from steptime.base.collector import without_collector
from steptime.base.streams import abandon, abandon_unless_writable
from steptime.base.words import counted
from steptime.checkpoint import against_plan, difference, model_yaml
from steptime.checkpoint.api import summarize_checkpoint
from steptime.checkpoint.dtypes import short
from steptime.checkpoint.escape import escaped
from steptime.checkpoint.jsonable import problem
from steptime.checkpoint.jsonable import tensor as listed
from steptime.checkpoint.stored_records import Problem
from steptime.commands.argument_types import Parser, count
from steptime.report.checkpoint_plan import text as plan_text
from steptime.report.checkpoint_summary import report
from steptime.report.format import BINARY, DECIMAL
from steptime.report.table import PLAIN, WIDTH, style_of

if TYPE_CHECKING:
    from steptime.checkpoint.api import Summary
    from steptime.checkpoint.stored_records import StoredTensor
    from steptime.report.table import Style

EPILOG = """exit codes: 0 ok, 1 problems found (with --diff: the structures differ, with --model: they
disagree), 2 nothing could be read. Only headers and metadata are read; nothing in the checkpoint is executed."""
MAX_DIFF = 200
CHUNK = 10_000  # tensors per write
MAX_WIDTH = 200
JSON = ("summary", "full")


class RefusedError(Exception):
    """Bad input other than the checkpoint: a plan that cannot be read, a file that cannot be written. One line per problem."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="summarize-ckpt", description="Summarize a checkpoint from its headers only.", epilog=EPILOG)
    parser.add_argument("path", nargs="?", help="a checkpoint file or directory")
    parser.add_argument("--depth", type=count, help="levels of the module tree (default 1)")
    parser.add_argument("--tensors", nargs="?", const="*", metavar="GLOB", help="list tensors whose name matches")
    parser.add_argument("--json", nargs="?", const="summary", metavar="full", help="print JSON (full: with tensors)")
    parser.add_argument(
        "--emit-config", metavar="FILE", help="write the model section of a 3dtrn plan (-: print only this)"
    )
    parser.add_argument("--model", metavar="PLAN", help="compare with a 3dtrn plan")
    parser.add_argument("--diff", metavar="OTHER", help="compare names, shapes and dtypes with another checkpoint")
    parser.add_argument("--id", action="store_true", help="print only the structural hash (no other option allowed)")
    parser.add_argument("--strict", action="store_true", help="warnings count as problems")
    parser.add_argument("--all", action="store_true", help="read every save of a directory, not only the newest")
    parser.add_argument("--units", choices=["iec", "si"], help="GiB (iec, the default) or GB (si)")
    return parser


def _options(argv: list[str] | None) -> argparse.Namespace:
    """The arguments; an argument after --json or --tensors is the path where no other is given. Exits with 2 on misuse."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.json not in (None, *JSON):
        if options.path is not None:
            parser.error(f"--json {options.json}: use --json or --json=full; the path is {options.path}")
        options.path, options.json = options.json, JSON[0]
    if options.path is None and options.tensors not in (None, "*"):
        options.path, options.tensors = options.tensors, "*"
    if options.path is None:
        parser.error("PATH is required")
    others = [
        name for name, value in vars(options).items() if name not in ("path", "id") and value not in (None, False)
    ]
    given = [f"--{name.replace('_', '-')}" for name in others]
    if options.id and given:
        parser.error(f"--id: not together with {', '.join(given)}")
    prints = [name for name in given if name not in ("--emit-config", "--strict", "--all")]
    if options.emit_config == "-" and prints:
        parser.error(f"--emit-config -: not together with {', '.join(prints)}")
    return options


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 0, 1 or 2. A closed reader (`| head`) is no error."""
    options = _options(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # characters that the terminal's encoding lacks are written as \x..
            stream.reconfigure(errors="backslashreplace")
    try:
        with without_collector():
            code = _run(options)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        abandon(sys.stdout)
        return 0
    except RefusedError as error:
        return _refuse(error.problems)
    except OSError as error:
        abandon_unless_writable(sys.stdout)
        return _refuse([f"cannot write to standard output ({error.strerror})"])
    except KeyboardInterrupt:
        return 130
    return code


def _say(words: str, stream: TextIO | None = None, end: str = "\n") -> None:
    """Write a line; progress is shown at once."""
    out = stream or sys.stdout
    if out is not None:  # None: the caller closed it, as with >&-
        out.write(words + end)
        if not end:
            out.flush()


def _refuse(problems: list[str]) -> int:
    """A plan that cannot be read, or a file that cannot be written: one line per problem."""
    for line in problems:
        _say(f"summarize-ckpt: {escaped(line, 600)}", sys.stderr)
    return 2


def _run(options: argparse.Namespace) -> int:
    summary = _summarize(options, options.path)
    if options.json:
        return _json(summary, options)
    if not summary.sections:
        _print_failure(summary)
        return 2
    if options.id:
        _say(summary.id)
        return summary.exit_code
    if options.diff:
        return _diff(summary, options)
    if options.emit_config == "-":
        _say(_model(summary, "-"), end="")
        return summary.exit_code
    if options.tensors:
        _list(_matching(summary, options.tensors), len({tensor.file for tensor in summary.tensors}) > 1)
    else:
        units = DECIMAL if options.units == "si" else BINARY
        depth = 1 if options.depth is None else options.depth
        _say(report(summary, depth, units, _style()), end="")
    _emit(summary, options)
    return max(summary.exit_code, _plan(summary, options))


def _style() -> Style:
    """Colors and width of the terminal; 80 columns if the output is not a terminal."""
    if sys.stdout is None:
        return PLAIN
    style = style_of(sys.stdout)
    wide = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    return style._replace(width=max(WIDTH, min(wide, MAX_WIDTH)))


def _summarize(options: argparse.Namespace, path: str) -> Summary:
    progress = _progress if sys.stderr.isatty() and not options.json else None
    summary = summarize_checkpoint(path, everything=options.all, strict=options.strict, progress=progress)
    if progress is not None:
        _say("\r\x1b[K", sys.stderr, end="")
    return summary


def _progress(done: int, total: int) -> None:
    if total > 64 and done % 32 == 0:
        _say(f"\r{done} of {total} files", sys.stderr, end="")


def _print_failure(summary: Summary) -> None:
    for item in summary.all_problems:
        where = escaped(item.file or summary.path)
        _say(f"summarize-ckpt: {where}: {escaped(item.message, 600)}", sys.stderr)


def _matching(summary: Summary, pattern: str) -> list[StoredTensor]:
    return [tensor for tensor in summary.tensors if fnmatchcase(tensor.name, pattern)]


def _list(tensors: list[StoredTensor], several: bool) -> None:
    """A line for each tensor, with its file where there are `several`."""
    for tensor in tensors:
        whole = f" of {list(tensor.global_shape)}" if tensor.global_shape not in (None, tensor.shape) else ""
        notes = [tensor.role if tensor.role not in ("", "model") else "", tensor.note]
        notes.append(f"= {tensor.alias_of}" if tensor.alias_of else "")
        notes.append(tensor.file if several else "")
        note = "  ".join(part for part in notes if part)
        shape = f"{list(tensor.shape)}{whole}"
        _say(f"{escaped(tensor.name)}  {short(tensor.dtype)} {shape}{'  ' + escaped(note) if note else ''}")


def _json(summary: Summary, options: argparse.Namespace) -> int:
    document = summary.to_dict()
    try:
        _compared(summary, options, document)
        _emit(summary, options)
    except RefusedError as error:  # the other side is unusable: still one document, with the reason
        document["problems"] += [problem(Problem("REFUSED", line)) for line in error.problems]
        document["exit_code"] = 2
    full = options.tensors or options.json == "full"
    _write_json(document, _matching(summary, options.tensors or "*") if full else None)
    return int(document["exit_code"])


def _write_json(document: dict[str, Any], tensors: list[StoredTensor] | None) -> None:
    """One line at a time; a million tensors are never in memory as one document."""
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    if tensors is None:
        _say(text)
        return
    _say(f'{text[:-1]},"tensors":[', end="")
    for at in range(0, len(tensors), CHUNK):
        rows = json.dumps([listed(item) for item in tensors[at : at + CHUNK]], separators=(",", ":"))
        _say(("," if at else "") + rows[1:-1], end="")
    _say("]}")


def _compared(summary: Summary, options: argparse.Namespace, document: dict[str, Any]) -> None:
    """Add the results of --diff and --model to the JSON document."""
    if options.diff:
        other = _summarize(options, options.diff)
        document["diff"] = _differences(summary, other) if other.sections else None
        document["problems"] += [] if other.sections else [problem(item) for item in other.all_problems]
        document["exit_code"] = max(summary.exit_code, other.exit_code, int(bool(document["diff"])))
    if options.model and summary.sections:
        document["plan"] = None
        found = against_plan.compare(summary, _counts(options.model))
        document["plan"] = found.to_dict()
        document["exit_code"] = max(document["exit_code"], int(not found.agrees))


def _diff(summary: Summary, options: argparse.Namespace) -> int:
    other = _summarize(options, options.diff)
    if not other.sections:
        _print_failure(other)
        return 2
    note, found = difference.difference(summary.structure, other.structure)
    lines = [*([note] if note else []), *difference.folded(found)]
    for line in lines[:MAX_DIFF]:
        _say(escaped(line, 1000))
    if len(lines) > MAX_DIFF:
        _say(f"and {len(lines) - MAX_DIFF} more differences")
    if not found:
        names = "shapes and types are the same" if note else "same names, shapes and types"
        _say(f"{names}: {counted(len(summary.model), 'tensor')}" + ("" if note else f", id {summary.id}"))
    return max(summary.exit_code, other.exit_code, int(bool(lines)))


def _differences(summary: Summary, other: Summary) -> list[str]:
    note, lines = difference.difference(summary.structure, other.structure)
    return [*([note] if note else []), *map(str, lines)]


def _plan(summary: Summary, options: argparse.Namespace) -> int:
    """Compare with the plan, where asked for: 1 when they disagree."""
    if not options.model:
        return 0
    found = against_plan.compare(summary, _counts(options.model))
    _say(plan_text(found, _style()))
    return int(not found.agrees)


def _counts(path: str) -> against_plan.PlanCounts:
    """What a plan holds. Raises `RefusedError`."""
    from steptime.base.config import ConfigError  # and with it pydantic, which nothing else here needs

    try:
        return against_plan.load(path)
    except ConfigError as error:
        raise RefusedError(error.problems) from None


def _emit(summary: Summary, options: argparse.Namespace) -> None:
    """Write the inferred model, where asked for. Raises `RefusedError`."""
    if not options.emit_config or not summary.sections:
        return
    text = _model(summary, options.emit_config)
    try:
        with open(options.emit_config, "w", encoding="utf-8") as file:  # noqa: PTH123 - the name as it was given
            file.write(text)
    except OSError as error:
        raise RefusedError([f"--emit-config {options.emit_config}: cannot be written ({error.strerror})"]) from None


def _model(summary: Summary, target: str) -> str:
    """The inferred `model` section. Raises `RefusedError` where there is not one transformer."""
    if not summary.architecture:
        several = f"{len(summary.models)} models here: give one of them" if summary.models else ""
        why = several or "no transformer found in names and shapes"
        raise RefusedError([f"{target}: not written: {why}"])
    return model_yaml.model_yaml(summary)
