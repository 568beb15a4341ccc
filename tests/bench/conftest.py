"""Small shapes: threads only cost."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _one_thread():
    """One thread for torch, where a test file has loaded it."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
