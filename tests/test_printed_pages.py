"""Pages as Chromium prints them: what is read together stays on one sheet.

Collected where a Chromium and poppler's pdftotext are installed (conftest.py).
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from steptime import Job, estimate
from steptime.report.page import whole_page

CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.fixture(scope="module")
def sheets(tmp_path_factory, browser):
    """The text of every sheet of a report of 16 stages."""
    folder = tmp_path_factory.mktemp("printed")
    page, pdf = folder / "page.html", folder / "page.pdf"
    page.write_text(whole_page.page(estimate(Job.load(CONFIGS / "deepseek_v3.yaml"))), encoding="utf-8")
    browser.open(page.as_uri())
    browser.printed(pdf)
    return subprocess.run(["pdftotext", "-layout", pdf, "-"], capture_output=True, text=True, check=True).stdout.split(
        "\f"
    )


def sheet(sheets, text):
    """The one sheet with a text."""
    (at,) = [at for at, words in enumerate(sheets) if text in words]
    return sheets[at]


def test_memory_bars_are_on_the_sheet_of_their_heading_and_legend(sheets):
    bars = sheet(sheets, "Memory of a device, by stage")
    assert "outside the allocator" in bars
    assert "usable memory" in bars
    assert all(f"stage {stage} " in bars for stage in range(16))


def test_the_schedule_is_on_the_sheet_of_its_heading_and_legend(sheets):
    """The picture has no text: the note below it is moved with it."""
    assert "wheel or + and - zoom" in sheet(sheets, "The step in time")
    assert "wait for the slowest replica" in sheet(sheets, "The step in time")


def test_a_table_longer_than_a_sheet_has_its_headings_on_every_sheet(sheets):
    rows = [words for words in sheets if words.count("arithmetic") > 3]
    assert len(rows) > 2
    assert all("projection" in words and "of step" in words for words in rows)
