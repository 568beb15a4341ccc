"""What the readers of launch scripts, framework configs and logs give back: a config, and where every flag went."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Literal, NamedTuple

from steptime.base.config import ConfigError, build
from steptime.job.edit import put
from steptime.job.job import Job

Status = Literal["used", "irrelevant", "default", "unmodelled"]


class LaunchFlag(NamedTuple):
    """One flag or key of the framework, and what became of it."""

    name: str
    """As the framework spells it: --tensor-model-parallel-size, parallelism.tensor_parallel_degree."""
    value: str
    status: Status
    """used: it is in the config. irrelevant: it changes no cost. default: unsaid, and filled from the framework's own default.
    unmodeled: it changes cost, and no config expresses it."""
    note: str = ""
    """The config key it became, why it is irrelevant, or the release whose default it is."""
    time_only: bool = False
    """Unmodelled, and without effect on memory."""


class Reading(NamedTuple):
    """A launch file as a config."""

    source: str
    """The file's path, as given."""
    framework: str
    """Framework and the release whose defaults fill in: "Megatron-LM (megatron-core 0.16.1)"."""
    config: dict[str, Any]
    """Plain data, as a YAML would hold it: complete and runnable, `hardware` included."""
    flags: list[LaunchFlag]
    left_open: Mapping[str, str] | None = None
    """Config keys that the file leaves open, and why, as an error says it: for where no setting gives them."""

    def of(self, status: Status) -> list[LaunchFlag]:
        """The flags of one status."""
        return [flag for flag in self.flags if flag.status == status]


def to_job(reading: Reading, sets: Mapping[str, Any] | None = None, *, allow_unmodelled: bool = False) -> Job:
    """The job of a launch file; `sets` are dotted keys and values put over its config.

    Raises:
        ConfigError: the layout cannot run, or a flag changes cost and is not modeled, one line each; with `allow_unmodelled`
            such a flag becomes one of the job's notes.
    """
    left_out = [f"{flag.name} {flag.value}: {flag.note}".strip() for flag in reading.of("unmodelled")]
    if left_out and not allow_unmodelled:
        fix = "not modeled; --allow-unmodelled ignores it"
        raise ConfigError(f"{reading.source}: {line}; {fix}" for line in left_out)
    config = deepcopy(reading.config)
    if left_out:
        config["notes"] = [*config.get("notes", []), *(f"ignored (not modeled): {line}" for line in left_out)]
    for path, value in (sets or {}).items():
        put(config, path, value)
    missing = [why for path, why in (reading.left_open or {}).items() if not _said(config, path)]
    if "hardware" not in config:
        missing.append("machine unknown; add --set hardware.node_type=NAME (3dtrn machines)")
    if missing:
        raise ConfigError(f"{reading.source}: {why}" for why in missing)
    try:
        return build(Job, config)
    except ConfigError as error:
        raise ConfigError(f"{reading.source}: {problem}" for problem in error.problems) from None


def _said(config: Mapping[str, Any], path: str) -> bool:
    """Whether a dotted key is there; a section of another form than a mapping has all of its keys."""
    section, _, key = path.partition(".")
    found = config.get(section, {})
    return key in found if isinstance(found, Mapping) else True
