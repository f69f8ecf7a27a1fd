"""The notebook runs from its first cell to its last, headless, and shows what it says it shows."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from pages import Block, commands

from vlatune.config import RunConfig
from vlatune.flags import parse_flags

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


def test_the_notebook_ends_with_the_changes_that_make_it_a_real_run():
    """Three of them, and commands whose flags are real."""
    last = nbformat.read(NOTEBOOK, as_version=4).cells[-1].source
    assert re.findall(r"^(\d)\. \*\*", last, re.MULTILINE) == ["1", "2", "3"]
    text = last.partition("```sh\n")[2].partition("```")[0]
    found = list(commands(Block(NOTEBOOK, 1, "sh", text)))
    assert [one.words[1] for one in found] == ["doctor", "train"]
    for one in found:
        assert one.needs
        parse_flags(list(one.words[2:]), RunConfig)
