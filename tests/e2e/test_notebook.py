"""The notebook runs headless, imports nothing from the working directory, and shows images, charts and an evaluation."""

import re

import nbformat
import pytest
from nbclient import NotebookClient
from pages import Block, commands
from repository_files import ROOT

from vlatune.config.flags import parse_flags
from vlatune.config.settings import RunConfig

NOTEBOOK = ROOT / "notebooks" / "fine_tune.ipynb"


@pytest.mark.slow
def test_the_notebook_runs_and_its_model_learns(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("TMPDIR", "/tmp")  # Ray's sockets are below it, and their names are limited
    for module in ("av", "numpy", "pyarrow", "ray", "torch", "vlatune"):
        (tmp_path / f"{module}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write('{module}')\n")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    set_parameters(notebook, folder=str(tmp_path / "all files"))
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    data = [output.data for output in shown if output.output_type == "display_data"]
    assert any("image/png" in one for one in data)
    assert any("&lt;svg" in one.get("text/html", "") for one in data)
    assert not (tmp_path / "imported").exists()
    texts = [one.text for one in shown if one.output_type == "stream"]
    assert [one.text for one in shown if one.get("name") == "stderr"] == []
    (table,) = (one for one in texts if "mean_action_error" in one)
    figures = {line.split()[0]: float(line.split()[1]) for line in table.splitlines()}
    assert figures["action_error"] < figures["mean_action_error"]
    (training,) = (cell for cell in notebook.cells if "!vlatune train" in cell.source)
    lines = "".join(one.text for one in training.outputs).splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 8, "one line per log step, without a live view"
    assert all(line.endswith(" left") for line in steps[:-1])
    assert len(training.outputs) > 1
    assert (tmp_path / "all files/run/report.html").exists()


def set_parameters(notebook: nbformat.NotebookNode, **values: object) -> None:
    """Insert a cell with the values after the cell that is tagged `parameters`, like papermill."""
    (at,) = (n for n, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", []))
    names = re.findall(r"^(\w+) = ", notebook.cells[at].source, re.MULTILINE)
    assert set(values) <= set(names)
    given = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    notebook.cells.insert(at + 1, nbformat.v4.new_code_cell(given))


def test_the_notebook_has_no_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in notebook.cells)


def test_the_notebook_ends_with_valid_commands_for_a_real_run():
    last = nbformat.read(NOTEBOOK, as_version=4).cells[-1].source
    assert re.findall(r"^(\d)\. \*\*", last, re.MULTILINE) == ["1", "2", "3"]
    text = last.partition("```sh\n")[2].partition("```")[0]
    found = list(commands(Block(NOTEBOOK, 1, "sh", text)))
    assert [one.words[1] for one in found] == ["doctor", "train"]
    for one in found:
        assert one.needs
        parse_flags(list(one.words[2:]), RunConfig)
