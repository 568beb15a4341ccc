"""Megatron-LM: its launch scripts, lists of flags, and the dump of arguments that its logs begin with, as a config."""

from __future__ import annotations

from collections.abc import Iterable

from steptime.config import ConfigError
from steptime.launch.reading import Reading


def read_megatron(path: str, text: str, env: dict[str, str] | None = None) -> Reading:
    """A launch script, a log that begins with a dump of arguments, or a file of flags alone, as a config.

    Raises:
        ConfigError: one line per problem.
    """
    raise ConfigError(f"{path}: {len(text)} {env}")


def read_dump(lines: Iterable[str]) -> dict[str, str]:
    """Argument -> text of the dump that a Megatron log begins with; reads no further than its end.

    Prefixes of ranks, time stamps and colours are taken off.

    Raises:
        ConfigError: there is no dump, or it is cut in the middle.
    """
    raise ConfigError(f"{lines}")


def from_arguments(arguments: dict[str, str], source: str, *, world_size: int | None = None) -> Reading:
    """The config that Megatron-LM's arguments stand for, by the names that its dump prints.

    Raises:
        ConfigError: one line per problem: unknown arguments, missing ones, a world size that contradicts the layout.
    """
    raise ConfigError(f"{arguments} {source} {world_size}")
