"""Examples in docstrings give what they say."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import steptime

ROOT = Path(steptime.__file__).parent
WITH_EXAMPLES = sorted(path for path in ROOT.rglob("*.py") if "\n    >>> " in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples(path):
    name = ".".join(("steptime", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    assert doctest.testmod(import_module(name)).failed == 0
