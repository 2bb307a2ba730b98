"""The notebook runs, and its claims (assertions in its cells) hold."""

import pathlib

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = pathlib.Path(__file__).parents[2] / "notebooks" / "quickstart.ipynb"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_quickstart_runs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not c.get("outputs") for c in notebook.cells), "strip the outputs"
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    shown = [
        output["data"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "data" in output
    ]
    assert any("accepted draft" in data.get("text/html", "") for data in shown)
