"""One request of the what-if page: a plan as YAML and changes to it become the changed plan and its report.

The browser's text is treated as data only: a plan of a page names no file (`refuse_files`), and its size is bounded before
anything is estimated.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from steptime.answer.result import Estimate, estimate
from steptime.base.config import ConfigError, ConfigProblem, show
from steptime.base.document import parse_mapping
from steptime.base.words import counted
from steptime.hardware.machine import is_shipped
from steptime.job.edit import put
from steptime.job.job import Job
from steptime.launch.plan_yaml import mapping_yaml
from steptime.report.diff_tables import diff
from steptime.report.format import percent, seconds
from steptime.report.headline import VERDICTS
from steptime.report.page import whole_page
from steptime.report.page.markup import Html, join
from steptime.report.page.page_tables import plain_table
from steptime.serve.fields import FIELDS, values
from steptime.timing.timeline import Timeline

MOST_ACTIONS = 150_000
"""Most forwards and backwards of a step that a page waits for."""
MOST_LAYERS = 2_000
NAME = "plan"
"""Name of the text in error lines."""


class PageRequest(NamedTuple):
    """A request of the page."""

    yaml: str
    changes: dict[str, Any]
    """By dotted path; None removes a setting."""
    devices: int | None
    """Total number of devices: dp follows from the other degrees."""
    pinned: str
    """A plan to compare with, "" for none."""
    full: bool
    """Whether to send the whole report instead of only answer, memory and step."""
    best: bool = False
    """Whether to replace the plan's layout with the best one for its devices."""


def read_request(data: Any) -> PageRequest:
    """A request's JSON, every field of its type.

    Raises:
        ConfigError: a field is missing or of another type.
    """
    asked = data if isinstance(data, dict) else {}
    yaml, changes, devices, pinned = (asked.get(key) for key in ("yaml", "set", "devices", "pinned"))
    known = {field.path for field in FIELDS}
    sound = isinstance(yaml, str) and isinstance(pinned, str | None) and isinstance(changes, dict | None)
    sound = sound and (devices is None or (isinstance(devices, int) and not isinstance(devices, bool)))
    if not sound or not all(path in known and plain(value) for path, value in (changes or {}).items()):
        raise ConfigError("unknown request; reload the page")
    return PageRequest(
        str(yaml), dict(changes or {}), devices, pinned or "", asked.get("full") is True, asked.get("best") is True
    )


def plain(value: Any) -> bool:
    """Whether a value of a field is a word, a number, a bool or nothing."""
    return value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= 200)


def answer(asked: PageRequest, files: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The changed plan, the values of the fields, and the report or the problems.

    `files`: machine files that the command line named, which a plan may keep.
    """
    text, note = asked.yaml, ""
    try:
        data, problems = changed(parse_mapping(asked.yaml, NAME), asked)
        text = mapping_yaml(data)
        job = job_of(data, files, problems)
        if asked.best:
            note = put_best(data, job)
            text, job = mapping_yaml(data), job_of(data, files)
        found = estimate(job)
        compared = compare(asked.pinned, found, files) if asked.pinned and asked.full else join()
    except ConfigError as error:
        return {"ok": False, "yaml": text, "errors": [{"path": one.path, "line": one.line} for one in error.details]}
    timeline = Timeline(found.timing)
    html = whole_page.report(found, timeline) if asked.full else whole_page.first_sections(found)
    drawn = whole_page.data(found, timeline) if asked.full else {}
    told = f"{VERDICTS[found.memory.verdict][0]}, {seconds(found.step_s)} a step, MFU {percent(found.throughput.mfu)}"
    said = {
        "ok": True,
        "yaml": text,
        "note": note,
        "told": told,
        "values": values(data, job),
        "devices": found.devices,
        "html": html,
    }
    return said | {"data": drawn, "compare": compared, "title": whole_page.title(found)}


def changed(data: dict[str, Any], asked: PageRequest) -> tuple[dict[str, Any], list[ConfigProblem]]:
    """The plan with the changes applied, and those that cannot be applied."""
    problems: list[ConfigProblem] = []
    for path, value in asked.changes.items():
        try:
            if value is None:
                drop(data, path)
            else:
                put(data, path, value)
        except ConfigError as error:
            problems += error.details
    if asked.devices is not None:
        drop(data, "parallelism.dp")
        drop(data, "hardware.nodes")
        data["devices"] = asked.devices
    elif "parallelism.dp" in asked.changes:
        data.pop("devices", None)
        drop(data, "hardware.nodes")
    return data, problems


def put_best(data: dict[str, Any], job: Job) -> str:
    """Give a plan the fastest layout that fits; reports how many there were and what changes.

    Raises:
        ConfigError: no layout can run, or none fits.
    """
    from steptime.search.changes import words
    from steptime.search.run import search

    found = search(job)
    if found.best is None:
        raise ConfigError(f"search: none of {found.counts.evaluated:,} layouts fits on these devices")
    for path, value in found.best.changes.items():
        put(data, path, value)
    return f"best of {counted(found.counts.evaluated, 'layout')}: {words(found.best.changes) or 'the plan unchanged'}"


def drop(data: dict[str, Any], path: str) -> None:
    """Remove a setting, where it exists."""
    *parents, last = path.split(".")
    node: Any = data
    for key in parents:
        node = node.get(key) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node.pop(last, None)


def job_of(data: dict[str, Any], files: frozenset[str], before: Iterable[ConfigProblem] = ()) -> Job:
    """The job of a page's plan; `before`: problems found before it.

    Raises:
        ConfigError: it cannot run, names a file, or is too large for an interactive estimate.
    """
    problems = [*before, *refuse_files(data, files)]
    if problems:
        raise ConfigError(problems)
    job = Job.load(mapping_yaml(data))
    p = job.parallelism
    actions = 2 * p.pp * p.vpp * job.microbatches
    if actions > MOST_ACTIONS:
        line = (
            f"data.gbs: {actions:,} forwards and backwards a step are too many for this page (at most {MOST_ACTIONS:,})"
        )
        problems.append(ConfigProblem(f"{line}; use the command line", "data.gbs"))
    if job.model.n_layers > MOST_LAYERS:
        line = f"model.n_layers: too many for this page (at most {MOST_LAYERS:,}; got {job.model.n_layers:,})"
        problems.append(ConfigProblem(line, "model.n_layers"))
    if problems:
        raise ConfigError(problems)
    return job


def refuse_files(data: dict[str, Any], files: frozenset[str]) -> Iterable[ConfigProblem]:
    """Values of a plan that would be read from a file of this machine."""
    model, hardware = data.get("model"), data.get("hardware")
    if isinstance(model, dict) and "hf" in model:
        yield ConfigProblem("model.hf: the page cannot read files; start it with 3dtrn serve PLAN", "model.hf")
    name = hardware.get("node_type") if isinstance(hardware, dict) else hardware
    if isinstance(name, str) and name not in files and not is_shipped(name):
        line = f"hardware.node_type: unknown machine (got {show(name)}); the page cannot read machine files"
        yield ConfigProblem(line, "hardware.node_type")


def compare(pinned: str, found: Estimate, files: frozenset[str]) -> Html:
    """The pinned plan compared with this one.

    Raises:
        ConfigError: the pinned plan cannot run.
    """
    other = estimate(job_of(parse_mapping(pinned, "pinned plan"), files))
    return join(*(plain_table(table) for table in diff((other, found), ("pinned", "now"), whole=True)))
