"""Shared by all commands: standard output with its style, and loading a config with its file's name before its problems."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from steptime.base.config import ConfigError
from steptime.base.streams import abandon
from steptime.report.table import ReportSection, style_of, to_text, unstyled

if TYPE_CHECKING:
    from steptime.job.job import Job


class Printer:
    """Standard output with its style: only characters that the terminal's encoding has; silent when the reader has left."""

    def __init__(self, color: str, *, ascii_only: bool, as_json: bool = False) -> None:
        self.style = style_of(sys.stdout, color, ascii_only=ascii_only)
        self.as_json = as_json

    def text(self, text: str) -> None:
        """Print text that includes its final line break; an escape code in it comes from an input file and is replaced."""
        self.painted(unstyled(text))

    def painted(self, text: str) -> None:
        """Print text that `style` has painted, whose parts were free of escape codes before."""
        try:
            sys.stdout.write(self.style.fold(text))
            sys.stdout.flush()
        except BrokenPipeError:
            abandon(sys.stdout)
        except OSError as error:  # a full disk, or closed by the caller
            abandon(sys.stdout)
            raise ConfigError(f"cannot write to standard output ({error.strerror or 'closed'})") from None

    def sections(self, sections: Sequence[ReportSection]) -> None:
        """Print sections with an empty line between."""
        self.painted(to_text(sections, self.style))

    def answer(self, document: Callable[[], Any], sections: Callable[[], Sequence[ReportSection]]) -> None:
        """Print the JSON document under --json, else the sections; only what is printed is made."""
        if self.as_json:
            self.json(document())
        else:
            self.sections(sections())

    def json(self, document: Any) -> None:
        """Print a JSON document; NaN or infinity in it is a bug and raises."""
        import json

        self.text(json.dumps(document, indent=2, allow_nan=False) + "\n")


def tell(problems: Iterable[str]) -> None:
    """Problems on standard error, one a line; an escape code in them comes from an input file and is replaced."""
    sys.stderr.writelines(unstyled(problem) + "\n" for problem in problems)


def load(source: str, sets: list[str]) -> Job:
    """The job of a config, its problems led by the file's name.

    Raises:
        ConfigError: `plan.yaml: parallelism.tpp: ...`, one line per problem.
    """
    from steptime.job.job import Job

    label = "standard input" if source == "-" else source
    try:
        return Job.load(source, sets=sets)
    except ConfigError as error:
        raise ConfigError(p if p.startswith((label, "--set ")) else f"{label}: {p}" for p in error.problems) from None
