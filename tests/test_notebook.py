"""The notebook of the docs runs, and shows what it shows now; `--update-golden` writes its outputs anew."""

from __future__ import annotations

import os
from copy import deepcopy
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "estimate.ipynb"


@pytest.fixture(scope="module")
def recorded():
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def executed(recorded):
    """The notebook run from top to bottom in a kernel of this environment; an error in a cell fails here."""
    notebook = deepcopy(recorded)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
        patch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
        client = NotebookClient(
            notebook,
            timeout=60,
            kernel_name="python3",
            resources={"metadata": {"path": str(NOTEBOOK.parent)}},
            record_timing=False,
            coalesce_streams=True,
        )
        client.execute()
    return notebook


def test_outputs_are_those_of_now(recorded, executed, update_golden):
    if update_golden:
        nbformat.write(executed, NOTEBOOK)
        recorded = executed
    assert outputs(recorded) == outputs(executed), (
        "docs/estimate.ipynb is out of date; if the new outputs are right: pytest tests/test_notebook.py --update-golden"
    )


def outputs(notebook):
    return [cell.get("outputs", []) for cell in notebook.cells]


def test_every_cell_says_something(executed):
    cells = [cell for cell in executed.cells if cell.cell_type == "code"]
    assert len(cells) >= 8
    assert all(cell.outputs for cell in cells)


def test_shows_the_estimate_as_tables(executed):
    html = executed.cells[-1].outputs[0].data["text/html"]
    assert html.count("<table>") >= 5
