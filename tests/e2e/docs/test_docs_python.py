"""The Python code of docs/ runs, and prints what the page shows.

Blocks of a page share their variables; `root`, `a` and `b` are datasets, `observation` is a robot's. A block with a file name after
its fence is a file (see `tests/e2e/policies/test_toy_policy.py`).
"""

import doctest
import shutil
from collections.abc import Iterator
from contextlib import chdir, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import PAGES, Block, blocks
from recording_writer import TOP, write_recording
from small_run import make_finished, small_config

from vlatune.config.settings import ExportConfig
from vlatune.export.export import export_run
from vlatune.policies.model_size import building_at
from vlatune.policies.pi05.size import read_size

PYTHON = {page: [one for one in blocks(page) if one.info == "python"] for page in PAGES}


@pytest.fixture(scope="module")
def place(dataset_v3: Path, small_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make the datasets and the export that the pages name."""
    folder = tmp_path_factory.mktemp("python")
    shutil.copytree(dataset_v3, folder / "data/pusht")
    run = make_finished(small_config(dataset_v3, small_base, folder / "runs/fold"))
    (folder / "exported").mkdir()
    export_run(run, folder / "exported/fold", ExportConfig(), warn=pytest.fail)
    write_recording(folder / "odd", state="state", action="actions", cameras=("image",))
    for name, camera in (("a", "observation.images.front"), ("b", TOP)):
        write_recording(folder / name, cameras=(camera,))
    with chdir(folder):
        yield folder


def given(place: Path, block: Block, dataset: Path) -> dict[str, Any]:
    """Return the variables that a block may use without defining them."""
    cameras = {f"observation.images.{name}": torch.rand(1, 3, 96, 96) for name in ("top", "wrist")}
    observation = cameras | {"observation.state": torch.zeros(1, 3), "task": ["move to the red pad"]}
    root = place / "odd" if "rename_map={" in block.text else dataset
    return {"root": str(root), "a": str(place / "a"), "b": str(place / "b"), "observation": observation}


def run(block: Block, names: dict[str, Any], place: Path) -> None:
    """Run a block; relative paths become absolute, because the session's cluster was started in another folder."""
    if ">>> " not in block.text:
        text = block.text.replace('"data/', f'"{place}/data/')
        exec(compile(text, block.place, "exec"), names)  # noqa: S102  (a page of this repository)
        return
    test = doctest.DocTestParser().get_doctest(block.text, names, block.place, block.page.name, block.line)
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0, block.place


@pytest.mark.parametrize("page", [page for page in PAGES if PYTHON[page]], ids=lambda page: page.name)
def test_python_of_a_page_runs(page, place, dataset_v3, ray_local):
    names: dict[str, Any] = {}
    for block in PYTHON[page]:
        names |= given(place, block, dataset_v3)
        size = read_size(place / "exported/fold") if "from_pretrained" in block.text else None
        with building_at(size) if size else nullcontext():
            run(block, names, place)
    if "dataset" in names:
        assert names["dataset"].count() > 0
    if "action" in names:
        assert tuple(names["action"].shape) == (1, 3)


def test_pages_have_python_code():
    assert sum(map(len, PYTHON.values())) >= 7
