"""The parser, and types of option values: fractions, counts, lists."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser whose problems are one line each, like those of a plan."""

    first = "PLAN"
    """The first argument, for messages."""
    subcommands: Collection[str] = ()
    """Those of the program, for one that stands after the plan."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2 after one line; for an unknown option it suggests the closest one."""
        wrong = message.removeprefix("unrecognized arguments: ")
        if wrong != message:
            if not wrong.startswith("-"):
                one = (
                    self._second(wrong)
                    if self.prog == "3dtrn"
                    else f"one argument too many: {wrong}; {self._where(wrong)}"
                )
                self.exit(2, f"{self.prog}: {one}\n")
            planned = any("PLAN" in str(each.metavar) for each in self._actions if not each.option_strings)
            if planned and "--model" in wrong.replace("=", " ").split():
                written = "3dtrn init plan.yaml --model NAME --machine NAME --devices N"
                self.exit(2, f"{self.prog}: takes a PLAN, not --model; {written} writes one\n")
            meant = self._meant(wrong.partition(" ")[0].partition("=")[0].lstrip("-"))
            message += f"; did you mean '--{meant}'?" if meant else f"; {self.prog} --help lists all"
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}\n")

    def _where(self, word: str) -> str:
        """Where an argument belongs that the subcommand does not take by itself."""
        options = {name for action in self._actions for name in action.option_strings}
        if {"--measurements", "--log"} <= options:
            csv, log = f"a CSV of measured runs is --measurements {word}", f"a training log --log {word}"
            return f"{csv}, {log}, the plan of a log --plan {word}"
        return f"{self.prog} --help lists its arguments"

    def _meant(self, option: str) -> str:
        """The option that an unknown one probably means: of the same key of a plan, or spelled alike; "" for none."""
        from steptime.base.config import closest
        from steptime.job.names import meant_path

        known = [name.lstrip("-") for action in self._actions for name in action.option_strings]
        key = meant_path(option.rpartition(".")[2])
        for same in (key, f"{option}s", option.removesuffix("s")):
            if same in known:
                return same
        return f"set {key}=..." if "." in key and "set" in known else closest(option, known)

    def _second(self, words: str) -> str:
        """What to write where a report of one plan gets several words."""
        from pathlib import Path

        if self.first == Parser.first:  # an option stands first
            return f"one file at a time, not also {words}; a script and its arguments are one string: 'SCRIPT ARG ...'"
        every = [self.first, *words.split()]
        if named := next((word for word in every if word in self.subcommands), None):
            return f"the subcommand comes first: 3dtrn {' '.join([named, *(word for word in every if word != named)])}"
        if self.first.isidentifier() and not Path(self.first).exists():
            return f"no subcommand {self.first!r}; for a report: 3dtrn {words}"
        return f"one PLAN at a time; to compare: 3dtrn diff {' '.join(every)}"


def decoded(text: str) -> str:
    """Text without the lone surrogates that represent bytes which are not UTF-8; no output could encode them."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def new_file(text: str) -> str:
    """The name of a file to write, which - is not: the report is on standard output."""
    if text == "-":
        raise argparse.ArgumentTypeError("- is no file name, and standard output has the report; give a file")
    return text


def share(text: str) -> float:
    """A fraction between 0 and 1, as 0.4 or 40%."""
    try:
        value = float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        meant = value if 1.0 < value <= 100.0 and not text.endswith("%") else 40.0
        raise argparse.ArgumentTypeError(f"invalid fraction {text!r}; use {meant / 100.0:g} or {meant:g}%")
    return value


def whole(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number (got {text})") from None


def words(text: str) -> list[str]:
    """Words separated by commas."""
    return [word for word in text.replace(" ", "").split(",") if word]


def parts(text: str) -> frozenset[str]:
    """Parts of a benchmark; by default all."""
    known = ("sweeps", "block", "step", "exact")
    if unknown := [word for word in words(text) if word not in known]:
        raise argparse.ArgumentTypeError(f"unknown benchmark part {unknown[0]!r}; use {', '.join(known)}")
    return frozenset(words(text) or known)


def positive_count(text: str) -> int:
    """A number of rows, 1 or more."""
    if not count(text):
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def count(text: str) -> int:
    """A number of rows, 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"invalid count {text!r}; use a whole number such as 10")
    return int(text)
