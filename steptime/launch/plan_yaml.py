"""A plan as the YAML that `Job.load` reads back to the same Job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from steptime.base.document import scalar
from steptime.job.job import Job
from steptime.launch.reading import Reading, to_job


def plan_yaml(plan: Reading | Job) -> str:
    """The plan as YAML: everything that it sets; the rest is left to its software profile.

    A reading is checked first, and its file named at the top.

    Raises:
        ConfigError: a reading that is not a valid job (see `to_job`).
    """
    if isinstance(plan, Job):
        return _document(plan)
    source = re.sub(r"[^ -~]+", "?", " ".join(plan.source.split()))
    return f"# {source}: {plan.framework}\n{_document(to_job(plan))}"


def _document(job: Job) -> str:
    data = job.model_dump(exclude_unset=True, exclude_none=True)
    if job.devices is not None:  # of which dp is the rest
        data["parallelism"].pop("dp", None)
        data = {"devices": data.pop("devices"), **data}
    return mapping_yaml(data)


def mapping_yaml(data: Mapping[str, Any]) -> str:
    """Plain data as the YAML that `base.document` reads back to the same."""
    said = _plain(data)
    return yaml.dump(said, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=120)


def _plain(value: Any) -> Any:
    """Mappings, lists and scalars only."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | frozenset | set):
        return [_plain(item) for item in (sorted(value) if isinstance(value, frozenset | set) else value)]
    return value


class _Dumper(yaml.SafeDumper):
    """Quotes text that our reader would read as a number although PyYAML does not, and repeats what YAML would alias."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        """No aliases."""
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = None if scalar(value) == value and isinstance(scalar(value), str) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)
