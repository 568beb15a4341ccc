"""The wheel, built and run in an empty environment; what importing and running costs; one version everywhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

import steptime

ROOT = Path(__file__).parents[1]
PLAN = ROOT / "configs" / "llama3_70b.yaml"
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = DECLARED["project"]
HEAVY = {"numpy", "torch", "tabulate", "megatron", "matplotlib"}


def run(*command, cwd=ROOT, **env):
    """A process's output; nothing of this environment's Python settings reaches it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=inherited | env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    """The environment variables of a build: a path with what builds need, installed once for all of them.

    `.ci/run` builds as users do, each time in an environment of its own.
    """
    folder = tmp_path_factory.mktemp("backend")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--no-compile", "--target", folder, *DECLARED["build-system"]["requires"])
    return {"PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def built(tmp_path_factory, backend):
    """What is built of two copies that lie elsewhere, once the sdist and the wheel from it, once both from the tree: folders."""
    folders = []
    for name, how in (("first", ("build", "--no-isolation", "--outdir")), ("second", ("hatchling", "build", "-d"))):
        folder = tmp_path_factory.mktemp(name)
        ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "shared", "results")
        shutil.copytree(ROOT, folder / "tree", ignore=ignored)
        made = (sys.executable, "-m", *how, folder / "dist")
        run(*made, cwd=folder / "tree", SOURCE_DATE_EPOCH="1767225600", **backend)
        folders.append(folder / "dist")
    return folders


@pytest.fixture(scope="module")
def wheel(built):
    return next(built[0].glob("*.whl"))


@pytest.fixture(scope="module")
def user(tmp_path_factory, wheel):
    """The scripts' folder of an environment that holds the wheel and what it asks for, and nothing else."""
    folder = tmp_path_factory.mktemp("user")
    venv.create(folder)
    scripts = folder / ("Scripts" if os.name == "nt" else "bin")
    pip = [sys.executable, "-m", "pip", "--python", scripts / "python", "--disable-pip-version-check"]
    run(*pip, "install", "--quiet", "--no-compile", wheel)
    return scripts


def test_wheel_and_sdist_are_the_same_bytes_each_time(built):
    """Built from two copies that lie elsewhere, at other times (SOURCE_DATE_EPOCH, reproducible-builds.org).

    A wheel from the sdist is the one from the tree: the sdist lacks nothing of it.
    """
    first, second = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in built)
    assert {Path(name).suffix for name in first} == {".whl", ".gz"}
    assert first == second


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    files = (path for path in (ROOT / "steptime").rglob("*") if path.suffix in {".py", ".yaml", ".typed"})
    assert {path.relative_to(ROOT).as_posix() for path in files} <= inside
    assert "steptime/py.typed" in inside
    assert sum(name.startswith("steptime/data/") and name.endswith(".yaml") for name in inside) > 150
    assert {name.split("/")[0] for name in inside} == {"steptime", f"steptime-{steptime.__version__}.dist-info"}


def test_the_wheel_asks_for_little(wheel):
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"steptime-{steptime.__version__}.dist-info/METADATA").decode()
    fields = HeaderParser().parsestr(text)
    needed = [entry for entry in fields.get_all("Requires-Dist") if "extra ==" not in entry]
    assert {re.split(r"[^\w-]", entry)[0] for entry in needed} == {
        "pyyaml",
        "pydantic",
        "pydantic-core",
        "numpy",
        "tabulate",
    }
    assert fields["Requires-Python"] == ">=3.11"
    assert fields["License-Expression"] == "Apache-2.0"


def test_the_installed_command_prints_the_report(user, tmp_path):
    """Outside the checkout, as a user would, and the same report as from the checkout."""
    report = run(user / "3dtrn", PLAN, cwd=tmp_path)
    assert report.startswith("llama3-70b")
    assert "FITS" in report
    assert report == here()
    assert json.loads(run(user / "3dtrn", PLAN, "--json", cwd=tmp_path))["schema"] == "3dtrn/1"


def here():
    return run(
        sys.executable, "-c", f"from steptime.commands.cli import main; main([{str(PLAN)!r}])", PYTHONPATH=str(ROOT)
    )


def test_the_installed_commands_find_their_data(user, tmp_path):
    assert "dgx-h100" in run(user / "3dtrn", "machines", cwd=tmp_path)
    assert "llama3-70b" in run(user / "3dtrn", "models", cwd=tmp_path)
    assert run(user / "3dtrn", "--version", cwd=tmp_path).split()[-1] == steptime.__version__


def test_the_checkpoint_command_starts(user, tmp_path):
    assert run(user / "summarize-ckpt", "--help", cwd=tmp_path).startswith("usage: summarize-ckpt")


def test_every_public_name_can_be_imported(user, tmp_path):
    names = ", ".join(steptime.__all__)
    program = f"from steptime import {names}; print(estimate(Job.load({str(PLAN)!r})))"
    assert run(user / "python", "-c", program, cwd=tmp_path).startswith("<Estimate llama3-70b")


def modules_after(program):
    """Names of the modules that a program has loaded in this environment, where torch and numpy are."""
    tail = "; import sys; sys.stderr.flush(); print(); print('loaded', *sys.modules)"
    out = run(sys.executable, "-c", program + tail, PYTHONPATH=str(ROOT))
    return {name.partition(".")[0] for name in out.splitlines()[-1].split()[1:]}


def test_a_report_imports_neither_numpy_nor_torch():
    loaded = modules_after(f"from steptime.commands.cli import main; main([{str(PLAN)!r}])")
    assert "pydantic_core" in loaded
    assert not (HEAVY | {"pydantic"}) & loaded


def test_importing_the_package_imports_nothing_heavy():
    assert not (HEAVY | {"pydantic_core", "yaml", "argparse"}) & modules_after("import steptime")


def test_the_function_estimate_is_not_hidden_by_the_module():
    program = (
        "import steptime.answer.result, steptime.base.rows; from steptime import estimate; print(callable(estimate))"
    )
    assert run(sys.executable, "-c", program, PYTHONPATH=str(ROOT)).strip() == "True"


def test_public_names_are_listed_and_others_refused():
    assert set(steptime.__all__) <= set(dir(steptime))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = steptime.nothing


def test_classifiers_are_the_versions_that_are_tested():
    """.ci/run runs what needs no torch on every interpreter that it finds, and with the lowest versions allowed."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    tested = {"3.11", *re.findall(r"\"python (3\.\d+)\"", script)}
    said = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line}
    assert said == tested


def test_release_notes_are_a_section_of_the_changelog(capsys):
    from release_notes import notes

    text = notes(steptime.__version__)
    assert text.startswith(f"# steptime {steptime.__version__}\n")
    assert "### Added" in text or "## Added" in text
    assert "[Unreleased]" not in text
    paragraphs = text.split("\n\n")  # a list item, a heading or a paragraph has one line each
    assert not [line for part in paragraphs for line in part.splitlines()[1:] if not line.startswith(("- ", "#"))]
    assert f"pip install steptime=={steptime.__version__}" in text
    with pytest.raises(SystemExit, match=r"9\.9\.9"):
        notes("9.9.9")


def test_one_version_everywhere():
    version = steptime.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## [{version}] - " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_scripts_are_those_documented():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(PROJECT["scripts"]) == {"3dtrn", "summarize-ckpt"}
    assert all(f"`{script} " in readme for script in PROJECT["scripts"])


def test_the_frameworks_that_tests_compare_with_are_pinned():
    assert {"torch==2.13.0", "megatron-core==0.16.1"} <= set(PROJECT["optional-dependencies"]["test"])
