"""The notebook runs from its first cell to its last, headless, and shows what it says it shows."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "fine_tune.ipynb"


@pytest.mark.early
def test_the_notebook_runs_and_its_model_has_learnt(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("TMPDIR", "/tmp")  # Ray's sockets lie below it, and their names may not be long
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    data = [output.data for output in shown if output.output_type == "display_data"]
    assert any("image/png" in one for one in data)
    assert any("<svg" in one.get("text/html", "") for one in data)
    (told,) = (one.text for one in shown if one.output_type == "stream" and "mean_action_error" in one.text)
    figures = {line.split()[0]: float(line.split()[1]) for line in told.splitlines()}
    assert figures["action_error"] < figures["mean_action_error"]


def test_the_notebook_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in notebook.cells)
