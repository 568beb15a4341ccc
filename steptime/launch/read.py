"""One door to the readers of launch files: a kind and a path in, a `Reading` out."""

from __future__ import annotations

import os
from importlib import import_module

from steptime.config import ConfigError, near
from steptime.document import read_source
from steptime.launch.reading import Reading

KINDS = {
    "megatron": ("steptime.launch.megatron", "read_megatron"),
    "torchtitan": ("steptime.launch.torchtitan", "read_torchtitan"),
    "nemo": ("steptime.launch.nemo", "read_nemo"),
    "deepspeed": ("steptime.launch.deepspeed", "read_deepspeed"),
}
"""Kind of launch file -> module and function (path, text, env) that read it; a module is imported when it is asked for."""


def read(kind: str, path: str) -> Reading:
    """The launch file at `path` as a config, its variables filled in from the environment.

    Raises:
        ConfigError: the kind is unknown, the file cannot be read, or it is no launch file of that framework.
    """
    if kind not in KINDS:
        raise ConfigError(f"--from {kind}: unknown kind{near(kind, KINDS)}")
    module, function = KINDS[kind]
    text, name = read_source(path)
    found: Reading = getattr(import_module(module), function)(name, text, dict(os.environ))
    return found
