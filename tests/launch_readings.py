"""What the tests of launch files share: reading a fixture, its golden text, and that a saved plan is the same job."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from steptime.base.config import ConfigError
from steptime.job.job import Job
from steptime.launch.read import read as read_file
from steptime.launch.reading import to_job

DATA = Path(__file__).parent / "data" / "launch"
REFUSED = "; not modeled; --allow-unmodeled ignores it"
HARDWARE = {"hardware.node_type": "dgx-h100"}


def read(reader, name, sets=None, env=None):
    """The reading of a fixture; FILE.py:FUNCTION names a function."""
    file = DATA / (name.partition(".py:")[0] + ".py" if ".py:" in name else name)
    return reader(name, file.read_text(encoding="utf-8"), env or {}, sets)


def job(tmp_path, name, text, **sets):
    """The job of a file with that text, whatever its kind; `parallelism__dp=8` is --set parallelism.dp=8."""
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return job_of(path, **sets)


def job_of(path, **sets):
    """The job of a file; `sets` as of `job`."""
    sets = HARDWARE | {key.replace("__", "."): value for key, value in sets.items()}
    return to_job(read_file("auto", str(path), sets), sets)


def golden_text(reading):
    """The config, the framework, and the keys that are defaults or left out."""
    shown = {
        "framework": reading.framework,
        "config": reading.config,
        "approximated": [f"{flag.name}: {flag.value}" for flag in reading.of("approximated")],
        "unmodeled": [f"{flag.name}: {flag.value}" for flag in reading.of("unmodeled")],
        "default": [f"{flag.name}: {flag.value}" for flag in reading.of("default")],
    }
    return yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=130)


def saved_and_read_back(reading, sets=None):
    """The job of a reading, which its config and its resolved config as YAML give again."""
    job = to_job(reading, {**HARDWARE, **(sets or {})}, allow_unmodeled=True)
    plain = reading.config | {"hardware": HARDWARE["hardware.node_type"]}
    if job.notes:
        plain["notes"] = job.notes
    written = [f"{key}={yaml.safe_dump(value).splitlines()[0]}" for key, value in (sets or {}).items()]
    assert Job.load(yaml.safe_dump(plain), written) == job
    assert Job.load(yaml.safe_dump(job.to_config())) == job
    return job


def one_line(reader, text, name="job", sets=None, env=None):
    """The one error line of a bad text."""
    machine = HARDWARE | (sets or {})
    with pytest.raises(ConfigError) as error:
        to_job(reader(name, text, env or {}, machine if sets else None), machine)
    assert len(error.value.problems) == 1
    assert "\n" not in error.value.problems[0]
    return error.value.problems[0]


def status(reading, name):
    """The status of a key."""
    return next(flag.status for flag in reading.flags if flag.name == name)
