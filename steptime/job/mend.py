"""Problems hidden by a first problem: rules need valid sections, so invalid values are replaced and the plan checked again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steptime.base.config import Config, ConfigError, ConfigProblem, build
from steptime.job.edit import value_at

if TYPE_CHECKING:
    from steptime.base.config import C

REQUIRED: dict[str, tuple[str, ...]] = {
    "parallelism": ("tp", "pp", "dp"),
    "data": ("gbs", "seqlen", "microbatch_sz"),
    "model": ("n_layers", "hidden_sz", "inter_sz", "n_q_heads", "vocab_sz"),
}
_STAND_INS: tuple[tuple[int, str, str], ...] = ((1, "llama3-8b", "dgx-h100"), (5040, "gpt3-175b", "dgx-a100-80"))
"""A number, a model and a machine that replace a bad one. A problem that occurs with all of them is not caused by them."""


def hidden_problems(cls: type[C], data: dict[str, Any], found: ConfigError) -> list[ConfigProblem]:
    """The further problems of a plan that remain whatever replaces the values already reported.

    A suggested key that rejects the value of the unknown one is no problem of the plan.
    """
    suggested = {".".join([*each.path.split(".")[:-1], each.meant]) for each in found.details if each.meant}
    guessed = {path for path in suggested if value_at(data, path) is None}
    first, *others = (_further(cls, data, found.details, *stand_in) for stand_in in _STAND_INS)
    return [each for each in first if each.path not in guessed and all(each in other for other in others)]


def _further(cls: type[C], data: dict[str, Any], problems: list[ConfigProblem], *stand_in: Any) -> list[ConfigProblem]:
    """Problems found round by round: of the devices, of the sections, then by the rules over several sections."""
    further: list[ConfigProblem] = []
    while not any(problem.by_rule for problem in [*problems, *further]):
        try:
            build(cls, mended(data, [*problems, *further], *stand_in))
        except ConfigError as error:
            new = [problem for problem in error.details if problem not in problems and problem not in further]
            if new:
                further += new
                continue
        break
    return further


def mended(
    data: dict[str, Any], problems: list[ConfigProblem], number: int, model: str, machine: str
) -> dict[str, Any]:
    """A copy of `data` without its problems: unknown keys renamed as suggested or removed, bad values replaced or removed."""
    copy: dict[str, Any] = {
        key: value.model_dump(exclude_unset=True)
        if isinstance(value, Config)
        else dict(value)
        if isinstance(value, dict)
        else value
        for key, value in data.items()
    }
    for problem in problems:
        section, _, rest = (problem.path or problem.line.partition(":")[0]).partition(".")
        if section == "devices" or problem.path == "hardware.nodes":
            copy.pop("devices", None)
            _section(copy, "parallelism")["dp"] = number
            if isinstance(hardware := copy.get("hardware"), dict):
                hardware.pop("nodes", None)
        elif problem.unknown:
            _rename(copy, problem)
        elif section == "hardware":
            copy["hardware"] = machine
        elif section == "model" and not (rest in REQUIRED["model"] and _whole_model(copy)):
            copy["model"] = model
        else:
            _replace(copy, section, rest, number)
    return copy


def _section(copy: dict[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(copy.get(name), dict):
        copy[name] = {}
    section: dict[str, Any] = copy[name]
    return section


def _whole_model(copy: dict[str, Any]) -> bool:
    """Whether a model section has fields of its own, which a number can complete."""
    model = copy.get("model")
    return isinstance(model, dict) and not model.keys() & {"preset", "hf"}


def _rename(copy: dict[str, Any], problem: ConfigProblem) -> None:
    *parents, key = problem.path.split(".")
    node: Any = copy
    for part in parents:
        node = node.get(part) if isinstance(node, dict) else None
    if isinstance(node, dict):
        value = node.pop(key, None)
        if problem.meant:
            node.setdefault(problem.meant, value)


def _replace(copy: dict[str, Any], section: str, rest: str, number: int) -> None:
    """A number for a required key, or for all keys of a missing section; an optional key is removed."""
    required = REQUIRED.get(section, ())
    if section not in {*REQUIRED, "performance"}:
        copy.pop(section, None)
    elif rest and isinstance(copy.get(section), dict):
        key = rest.partition(".")[0].partition("[")[0]
        if key in required:
            copy[section][key] = number
        else:
            copy[section].pop(key, None)
    else:
        copy[section] = dict.fromkeys(required, number)
