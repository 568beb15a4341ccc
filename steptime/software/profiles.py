"""The files of software profiles: one may extend another, and may have releases.

A file that says `extends: megatron-core` holds only what differs. Its `releases` map a release to what that release changes;
a job names one as `nemo@24.09`, and without one means the framework as it usually is. What a line of extensions starts with
is its `family`: rules ask it what can run.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from steptime.base.config import ConfigError, ConfigProblem, near, show
from steptime.base.document import shipped, shipped_names

_FOLDER = Path(__file__).parents[1] / "data" / "software"
_KEY = "performance.software"
_HUGGING_FACE = ("accelerate", "accelerate-ddp", "deepspeed")
TRAINERS: dict[str, tuple[str, ...]] = {
    "mcore": ("megatron-core",),
    "bridge": ("megatron-bridge",),
    "primus": ("megatron-core", "torchtitan"),
    **dict.fromkeys(
        ("transformers", "huggingface", "trl", "axolotl", "llamafactory", "swift", "ms-swift"), _HUGGING_FACE
    ),
    "gpt-neox": ("megatron-deepspeed",),
    "maxtext": ("xla",),
    "levanter": ("xla",),
    "jax": ("xla",),
    "olmo": ("fsdp2", "torch"),
    "olmo-core": ("fsdp2", "torch"),
    "torchtune": ("fsdp2", "torch"),
    "openrlhf": ("deepspeed",),
    "verl": ("accelerate", "accelerate-ddp", "megatron-core"),
    "nemo-rl": ("fsdp2", "megatron-core"),
    "slime": ("megatron-core",),
    "mindspeed": ("megatron-core",),
    "composer": ("llm-foundry",),
    "lightning": ("fsdp2", "deepspeed", "torch"),
    "unsloth": ("accelerate-ddp",),
    "zero3": ("deepspeed",),
    "titan": ("torchtitan",),
    "fsdp": ("fsdp2",),
    "ddp": ("torch",),
    "pytorch": ("torch", "fsdp2"),
}
"""Trainers that have no profile of their own -> the profiles of what they train with."""


@cache
def profile_names() -> list[str]:
    """Names of all profiles, without releases."""
    return shipped_names(_FOLDER)


@cache
def _file(path: Path) -> dict[str, Any]:
    """The content of a profile's own file; not to be changed."""
    return dict(shipped(path))


def profile_mapping(said: str) -> dict[str, Any]:
    """The fields of the profile `said`, a name or name@release, including those of the profiles that it extends.

    Raises:
        ConfigError: the name or the release is unknown (one line, with the near match).
    """
    name, at, release = said.partition("@")
    if name not in profile_names():
        used = TRAINERS.get(name.lower().replace("_", "-").replace(" ", "-"))
        fix = f"; use {' or '.join(used)}" if used else near(name, profile_names())
        line = f"{_KEY}: unknown profile (got {show(name)}){fix}"
        raise ConfigError(ConfigProblem(line, _KEY))
    own = dict(_file(_FOLDER / f"{name}.yaml"))
    releases = {str(key): value for key, value in own.pop("releases", {}).items()}
    if at and release not in releases:
        known = f"; known: {', '.join(releases)}" if releases else f"; {name} has no releases, use {name}"
        raise ConfigError(ConfigProblem(f"{_KEY}: unknown release of {name} (got {show(release)}){known}", _KEY))
    base = own.pop("extends", None)
    fields = over(profile_mapping(base), own) if base else {"family": name} | own
    if at:
        fields = over(fields, releases[release] or {})
    return fields | {"name": said, "as_of": "" if at else str(own.get("as_of", ""))}


def over(base: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """`base` updated with `fields`; overlaps and sources are merged key by key."""
    joined = {key: base[key] | fields[key] for key in ("overlap", "sources") if key in base and key in fields}
    return base | fields | joined


@cache
def extended(name: str) -> str:
    """The profile that a profile extends; "" for none."""
    return str(_file(_FOLDER / f"{name}.yaml").get("extends", "")) if name in profile_names() else ""


def without_release(name: str) -> str:
    """A profile's name without the release that it may have: automodel@2026-06 is automodel."""
    return name.partition("@")[0]


def profile_releases(name: str) -> list[str]:
    """Releases that a profile distinguishes, oldest first."""
    return [str(key) for key in _file(_FOLDER / f"{name}.yaml").get("releases", {})]
