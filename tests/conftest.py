"""Options and fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptime.commands import cli

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite recorded outputs (tests/golden, docs)")


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
