"""Numbers worked out from formulas: rates are those that a test's machine states, nothing fitted over them."""

from __future__ import annotations

import pytest

from steptime.software.efficiency import NOTHING_FITTED, using


@pytest.fixture(autouse=True)
def _nothing_fitted():
    with using(NOTHING_FITTED):
        yield
