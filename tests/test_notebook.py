"""The notebooks of the docs run, and show what they show now; `--update-golden` writes their outputs anew.

Cells with the tag `measured` show figures of the machine that ran them: they must run and say something, and are not compared.
Where they are not written anew, the benchmark among them takes less time over a quarter of the layers and tokens.
"""

from __future__ import annotations

import os
import re
from copy import deepcopy
from pathlib import Path

import nbformat
import pytest
from fork_server import SELDOM
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
SHORTER = {"--seconds 4 --steps 5": "--seconds 0.02 --steps 2 --set model.n_layers=1 --set data.seqlen=128"}
"""What the notebook asks of `3dtrn bench`, and what it is asked here."""
NOTEBOOKS = sorted((ROOT / "docs").glob("*.ipynb"))


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture(scope="module")
def recorded(path):
    return nbformat.read(path, as_version=4)


@pytest.fixture(scope="module")
def kernel():
    """A kernel of this environment in the folder of the notebooks, which import the same modules: one after the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
        patch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
        manager, client = start_new_kernel(cwd=str(ROOT / "docs"), extra_arguments=["--HistoryManager.enabled=False"])
    client.stop_channels()  # each notebook has a client of its own
    yield manager
    manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def executed(recorded, path, kernel, request):
    """The notebook run from top to bottom, as in a new kernel: no name is left of the one before, and cells count from 1.

    An error in a cell fails here.
    """
    notebook = deepcopy(recorded)
    if path.stem == "measure_machine" and not request.config.getoption("--update-golden"):
        for asked, shorter in SHORTER.items():
            assert sum(asked in cell.source for cell in notebook.cells) == 1
            for cell in notebook.cells:
                cell.source = cell.source.replace(asked, shorter)
    seldom = f"import gc\ngc.freeze()\ngc.set_threshold(*{SELDOM})"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(f"{seldom}\n%reset -f\nget_ipython().execution_count = 1"))
    client = NotebookClient(notebook, km=kernel, timeout=600, record_timing=False, coalesce_streams=True)
    try:
        client.execute()
    finally:
        client.kc.stop_channels()
    del notebook.cells[0]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.execution_count -= 1  # the client counts the cell put first too, the kernel does not
    return notebook


def test_outputs_are_those_of_now(path, recorded, executed, update_golden):
    if update_golden and outputs(recorded) != outputs(executed):
        nbformat.write(executed, path)
        recorded = executed
    assert outputs(recorded) == outputs(executed), (
        f"{path.name} is out of date; if the new outputs are right: pytest tests/test_notebook.py --update-golden"
    )


def outputs(notebook):
    return [cell.get("outputs", []) for cell in notebook.cells if "measured" not in cell.metadata.get("tags", [])]


def test_every_cell_says_something(executed):
    cells = [cell for cell in executed.cells if cell.cell_type == "code"]
    assert len(cells) >= 4
    assert all(cell.outputs for cell in cells if not cell.source.startswith("%%capture"))
    assert all(len(cell.source.splitlines()) <= 25 for cell in cells)


def test_shows_the_estimate_as_tables(path, executed):
    outputs_ = [out for cell in executed.cells for out in cell.get("outputs", [])]
    found = [out.data["text/html"] for out in outputs_ if "text/html" in out.get("data", {})]
    assert found or path.stem == "why_slow"
    assert all(html.count("<table>") >= 5 for html in found)


def test_predictions_on_the_measured_machine_are_in_reach(path, executed):
    """Other tests share the cores, so a step may take several times as long as the sweeps promise."""
    if path.stem != "measure_machine":
        return
    said = "".join(out.get("text", "") for cell in executed.cells for out in cell.get("outputs", []))
    measured, predicted = map(float, re.search(r"measured ([\d.]+) s, predicted ([\d.]+) s", said).groups())
    assert 0.1 < predicted / measured < 10
    assert "allocated memory differs by 0 bytes" in said
