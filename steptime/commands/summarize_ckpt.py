"""The command `summarize-ckpt`: parses, calls, prints, returns an exit code."""

from __future__ import annotations

import argparse
import json
import os
import sys
from fnmatch import fnmatchcase
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, TextIO

from steptime.checkpoint import against_plan, identity, model_yaml
from steptime.checkpoint.api import summarize_checkpoint
from steptime.checkpoint.dtypes import short
from steptime.checkpoint.escape import escaped
from steptime.checkpoint.jsonable import problem
from steptime.checkpoint.records import Problem
from steptime.report.checkpoint_summary import report
from steptime.report.format import BINARY, DECIMAL
from steptime.report.table import style_of

if TYPE_CHECKING:
    from steptime.checkpoint.api import Summary
    from steptime.checkpoint.records import StoredTensor

EPILOG = """exit codes: 0 ok, 1 problems found (with --diff: the structures differ, with --model: they
disagree), 2 nothing could be read. Only headers and metadata are read; nothing in the checkpoint is executed."""
MAX_DIFF = 200


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="summarize-ckpt", description="What is in a checkpoint, from its headers alone.", epilog=EPILOG
    )
    parser.add_argument("path", help="a checkpoint file or directory")
    parser.add_argument("--depth", type=int, default=1, help="levels of the module tree (default 1)")
    parser.add_argument("--tensors", nargs="?", const="*", metavar="GLOB", help="list tensors whose name matches")
    parser.add_argument(
        "--json", nargs="?", const="summary", choices=["summary", "full"], help="print JSON (full: with tensors)"
    )
    parser.add_argument("--emit-config", metavar="FILE", help="write the model section of a 3dtrn config")
    parser.add_argument("--model", metavar="PLAN", help="compare with a 3dtrn config")
    parser.add_argument("--diff", metavar="OTHER", help="compare names, shapes and types with another checkpoint")
    parser.add_argument("--id", action="store_true", help="print only the structural hash")
    parser.add_argument("--strict", action="store_true", help="warnings count as problems")
    parser.add_argument("--all", action="store_true", help="read every save of a directory, not only the newest")
    parser.add_argument("--units", choices=["iec", "si"], default="iec", help="GiB (iec) or GB (si)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 0, 1 or 2. A reader that goes away (`| head`) is no error."""
    options = _parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a name that the terminal's encoding lacks is written as \x..
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _run(options)
        sys.stdout.flush()
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            return _closed()
        return _refuse(error)
    except KeyboardInterrupt:
        return 130
    return code


def _say(words: str, stream: TextIO | None = None, end: str = "\n") -> None:
    """Write a line; progress is shown at once."""
    out = stream or sys.stdout
    out.write(words + end)
    if not end:
        out.flush()


def _closed() -> int:
    """The reader went away: nothing more can be said, and nothing is wrong."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _refuse(error: Exception) -> int:
    """A plan that cannot be read, or a file that cannot be written: one line per problem."""
    for line in str(error).splitlines():
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
    if options.tensors:
        _list(_matching(summary, options.tensors))
    else:
        units = BINARY if options.units == "iec" else DECIMAL
        _say(report(summary, options.depth, units, style_of(sys.stdout)), end="")
    _emit(summary, options)
    return max(summary.exit_code, _plan(summary, options))


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
        _say(f"summarize-ckpt: {where}: {escaped(item.message, 600)} [{item.code}]", sys.stderr)


def _matching(summary: Summary, pattern: str) -> list[StoredTensor]:
    return [tensor for tensor in summary.tensors if fnmatchcase(tensor.name, pattern)]


def _list(tensors: list[StoredTensor]) -> None:
    for tensor in tensors:
        whole = f" of {list(tensor.global_shape)}" if tensor.global_shape not in (None, tensor.shape) else ""
        notes = [tensor.role if tensor.role not in ("", "model") else "", tensor.note]
        notes.append(f"= {tensor.alias_of}" if tensor.alias_of else "")
        notes.append(tensor.file)
        note = "  ".join(part for part in notes if part)
        shape = f"{list(tensor.shape)}{whole}"
        _say(f"{escaped(tensor.name)}  {short(tensor.dtype)} {shape}{'  ' + escaped(note) if note else ''}")


def _json(summary: Summary, options: argparse.Namespace) -> int:
    tensors = None
    if options.tensors or options.json == "full":
        tensors = _matching(summary, options.tensors or "*")
    document = summary.to_dict(tensors)
    try:
        _compared(summary, options, document)
        _emit(summary, options)
    except (ValueError, OSError) as error:  # the other side is unusable: still one document, which says so
        document["problems"] += [problem(Problem("REFUSED", line)) for line in str(error).splitlines()]
        document["exit_code"] = 2
    json.dump(document, sys.stdout, allow_nan=False, separators=(",", ":"))
    _say("")
    return int(document["exit_code"])


def _compared(summary: Summary, options: argparse.Namespace, document: dict[str, Any]) -> None:
    """Add what --diff and --model find to the JSON document."""
    if options.diff:
        other = _summarize(options, options.diff)
        document["diff"] = identity.difference(summary.model, other.model) if other.sections else None
        document["problems"] += [] if other.sections else [problem(item) for item in other.all_problems]
        document["exit_code"] = max(summary.exit_code, other.exit_code, int(bool(document["diff"])))
    if options.model and summary.sections:
        document["plan"] = None
        found = against_plan.compare(summary, against_plan.load(options.model))
        document["plan"] = found.to_dict()
        document["exit_code"] = max(document["exit_code"], int(not found.agrees))


def _diff(summary: Summary, options: argparse.Namespace) -> int:
    other = _summarize(options, options.diff)
    if not other.sections:
        _print_failure(other)
        return 2
    lines = identity.difference(summary.model, other.model)
    for line in lines[:MAX_DIFF]:
        _say(escaped(line, 1000))
    if len(lines) > MAX_DIFF:
        _say(f"and {len(lines) - MAX_DIFF} more differences")
    if not lines:
        _say(f"same names, shapes and types: {len(summary.model)} tensors, id {summary.id}")
    return max(summary.exit_code, other.exit_code, int(bool(lines)))


def _plan(summary: Summary, options: argparse.Namespace) -> int:
    """Compare with the plan, where asked for: 1 when they disagree."""
    if not options.model:
        return 0
    found = against_plan.compare(summary, against_plan.load(options.model))
    _say("\n".join(against_plan.lines(found)))
    return int(not found.agrees)


def _emit(summary: Summary, options: argparse.Namespace) -> None:
    """Write the inferred model, where asked for."""
    if options.emit_config and summary.sections:
        if not summary.architecture:
            raise ValueError(f"{options.emit_config}: not written: no transformer found in names and shapes")
        with open(options.emit_config, "w", encoding="utf-8") as file:  # noqa: PTH123 - the name as it was given
            file.write(model_yaml.model_yaml(summary))
