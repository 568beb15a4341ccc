"""What each difference between two jobs costs by the model: one at a time, applied to the first job, and all together."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NamedTuple

from steptime.answer.result import Estimate, estimate
from steptime.base.config import ConfigError, build
from steptime.job.job import Job

LAYOUT_KEYS = ("tp", "pp", "cp", "dp", "ep", "sp", "replicas")
PIPELINE = ("vpp", "schedule", "layers_per_stage", "embedding_and_loss_count_as_layers")
WORDS_ONLY = ("name", "source")
"""Keys of a model that change no cost."""


class Setting(NamedTuple):
    """One setting in which two jobs differ; None where a job does not have it."""

    path: str
    a: Any
    b: Any


class Difference(NamedTuple):
    """Settings that change together, and their effect on the first job."""

    settings: list[Setting]
    step_s: float | None
    """The first job's step with these settings of the second; None where it cannot run."""
    step_change_s: float | None
    rate_change: float | None
    """Relative change of tokens per second and device, for differences in tokens per step or devices."""
    peak_change_bytes: float | None
    """Change of the reserved peak of the worst stage."""
    problem: str = ""
    """Why it cannot run by itself."""


class Differences(NamedTuple):
    """All differences of two jobs."""

    a: Estimate
    b: Estimate
    each: list[Difference]
    interaction_s: float | None
    """What all together change beyond the sum of the single changes; None where one cannot run by itself."""
    peak_interaction_bytes: float | None
    """The same of the reserved peak of the worst stage."""

    @property
    def together_s(self) -> float:
        """The change of the step with all settings of the second job."""
        return self.b.step_s - self.a.step_s

    @property
    def together_peak_bytes(self) -> float:
        """The change of the reserved peak with all settings of the second job."""
        return self.b.memory.peak_reserved_bytes - self.a.memory.peak_reserved_bytes

    @property
    def rate_interaction(self) -> float:
        """What all together change tokens per second and device beyond the product of the single effects, as a share."""
        alone = 1.0
        for one in self.each:
            alone *= 1.0 + (one.rate_change or 0.0)
        return rate_of(self.b) / rate_of(self.a) / alone - 1.0


_OVERLAPS = {axis: (axis,) for axis in ("tp", "cp", "pp", "ep")} | {"dp": ("dp", "cp")}
"""Setting of overlap -> the axes over whose ranks it sends: without a second rank there is nothing to overlap."""


def differences(a: Job, b: Job) -> Differences:
    """Every difference, applied to `a` alone.

    Settings that depend on each other are one difference: the degrees of a layout with the same number of devices, and settings
    that cannot run without another.
    """
    ours, theirs = _plain(a.to_config()), _plain(b.to_config())
    before, after = estimate(a), estimate(b)
    idle = {
        f"performance.overlap.{axis}"
        for axis, shared in _OVERLAPS.items()
        if all(getattr(job.parallelism, other) == 1 for other in shared for job in (a, b))
    }
    changed = [one for one in settings(ours, theirs) if one.path not in idle]
    groups = _grouped(changed, same_devices=before.devices == after.devices)
    each = [_alone(ours, group, before) for group in groups]
    stuck = [d for d in each if d.step_s is None]
    if len(stuck) > 1:  # they may only run together
        merged = _alone(ours, [one for d in stuck for one in d.settings], before)
        if merged.step_s is not None:
            each = [merged, *(d for d in each if d.step_s is not None)]
    each = _joined(ours, each, before)
    order = sorted(each, key=lambda d: -abs(d.rate_change) if d.rate_change is not None else 1.0)
    found = Differences(before, after, order, None, None)
    if any(d.step_s is None for d in each):
        return found
    return found._replace(
        interaction_s=found.together_s - sum(d.step_change_s or 0.0 for d in each),
        peak_interaction_bytes=found.together_peak_bytes - sum(d.peak_change_bytes or 0.0 for d in each),
    )


def _joined(ours: dict[str, Any], each: list[Difference], before: Estimate) -> list[Difference]:
    """A difference that cannot run by itself joins the first other one with which it can."""
    for stuck in [d for d in each if d.step_s is None]:
        for other in [d for d in each if d.step_s is not None]:
            both = _alone(ours, [*other.settings, *stuck.settings], before)
            if both.step_s is not None:
                each = [both if d is other else d for d in each if d is not stuck]
                break
    return each


def settings(a: Any, b: Any, path: str = "") -> list[Setting]:
    """The settings in which two configs differ, by dotted path."""
    if isinstance(a, dict) and isinstance(b, dict):
        prefix = f"{path}." if path else ""
        return [one for key in {**a, **b} for one in settings(a.get(key), b.get(key), f"{prefix}{key}")]
    return [] if a == b else [Setting(path, a, b)]


def leaves(a: Any, b: Any, path: str = "") -> list[Setting]:
    """The same, with a mapping that only one of them has expanded key by key."""
    found = settings(a, b, path)
    whole = [one for one in found if isinstance(one.a or one.b, dict) and None in one]
    deeper = {one.path: leaves(one.a or {}, one.b or {}, one.path) for one in whole}
    return [leaf for one in found for leaf in deeper.get(one.path, [one])]


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved config without what changes no cost."""
    model = {key: value for key, value in config["model"].items() if key not in WORDS_ONLY}
    return {key: value for key, value in config.items() if key not in {"notes", "run"}} | {"model": model}


def _grouped(found: list[Setting], *, same_devices: bool) -> list[list[Setting]]:
    """Settings that change together: the degrees where both jobs have as many devices, the pipeline's shape, recomputation."""
    groups: dict[str, list[Setting]] = {}
    for one in found:
        section, _, key = one.path.partition(".")
        group = one.path
        if section == "parallelism" and key in LAYOUT_KEYS:
            group = "layout" if same_devices else one.path
        elif (
            section == "parallelism" and key in PIPELINE
        ) or key == "overlap.pp":  # without interleaving nothing overlaps
            group = "pipeline"
        elif key.startswith(("recompute", "activation_checkpointing_type")):
            group = "recompute"
        elif section == "hardware":
            group = "hardware"
        elif key.startswith("fsdp") or key == "zero_level":
            group = "sharding"
        groups.setdefault(group, []).append(one)
    return list(groups.values())


def _alone(ours: dict[str, Any], group: list[Setting], before: Estimate) -> Difference:
    """The first job with some settings of the second."""
    config = deepcopy(ours)
    for one in group:
        _put(config, one)
    try:
        found = estimate(build(Job, config))
    except ConfigError as error:
        return Difference(group, None, None, None, None, error.problems[0])
    peak = found.memory.peak_reserved_bytes - before.memory.peak_reserved_bytes
    rate = rate_of(found) / rate_of(before) - 1.0
    return Difference(group, found.step_s, found.step_s - before.step_s, rate, peak)


def rate_of(estimate: Estimate) -> float:
    """Tokens per second and device."""
    return estimate.throughput.tokens_per_s_per_device


def _put(config: dict[str, Any], setting: Setting) -> None:
    """Put a setting's second value in, or take it out where the second job has none; a dotted key of overrides is one key."""
    *parents, last = setting.path.split(".")
    if parents[:2] == ["hardware", "overrides"]:
        parents, last = parents[:2], ".".join([*parents[2:], last])
    node = config
    for key in parents:
        node = node.setdefault(key, {})
    if setting.b is None:
        node.pop(last, None)
    else:
        node[last] = setting.b
