"""A plan as the YAML that `Job.load` reads back to the same Job."""

from __future__ import annotations

import re
from typing import Any

import yaml

from steptime.config import Config
from steptime.document import scalar
from steptime.job import Job
from steptime.launch.reading import Reading, to_job


def plan_yaml(plan: Reading | Job) -> str:
    """The plan as YAML: what a reading says, or all that a job resolves to.

    A reading is checked first; its file is named at the top.

    Raises:
        ConfigError: a reading that is no job (see `to_job`).
    """
    if isinstance(plan, Job):
        return _document(plan.to_config())
    to_job(plan)
    head = f"# {' '.join(plan.source.split())}: {plan.framework}\n"
    return re.sub(r"[^\n\t\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd]", "?", head) + _document(plan.config)


def _document(config: dict[str, Any]) -> str:
    return yaml.dump(_plain(config), Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=120)


def _plain(value: Any) -> Any:
    """Mappings, lists and scalars alone."""
    if isinstance(value, Config):
        value = value.model_dump(exclude_unset=True)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | frozenset | set):
        return [_plain(item) for item in (sorted(value) if isinstance(value, frozenset | set) else value)]
    return value


class _Dumper(yaml.SafeDumper):
    """Quotes what our reader would take for a number though PyYAML does not, and repeats what YAML would alias."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        """Nothing is shared."""
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = None if scalar(value) == value and isinstance(scalar(value), str) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)
