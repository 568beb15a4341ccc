"""Checks that import Megatron-Core, in a process of their own: that changes what torch compiles and which pickles it trusts."""

from __future__ import annotations

from pathlib import Path

import forked
import pytest

FOLDER = Path(__file__).parent
CHECKS = {
    "mcore_cuda_graphs": "graphs of experts are those that Megatron accepts",
    "mcore_offload": "offload is that of Megatron's manager",
    "mcore_hybrid_optimizer": "states lie where Megatron's hybrid optimizer puts them",
}
"""File and what it checks."""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What pytest says of all of them, one line per test."""
    script = tmp_path_factory.mktemp("alone") / "run_pytest.py"
    script.write_text("import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))", encoding="utf-8")
    files = [str(FOLDER / f"{name}.py") for name in CHECKS]
    done = forked.run(forked.server("mcore_imports"), script, "-q", "-rA", "-n0", "-p", "no:cacheprovider", *files)
    assert done.stdout, done.stderr
    return done


@pytest.mark.parametrize("name", CHECKS, ids=CHECKS.get)
def test_every_check_passes(said, name):
    own = [line.split()[0] for line in said.stdout.splitlines() if f"/{name}.py::" in line]
    assert own, said.stdout
    assert set(own) == {"PASSED"}, said.stdout


def test_nothing_else_went_wrong(said):
    assert said.returncode == 0, said.stdout + said.stderr
