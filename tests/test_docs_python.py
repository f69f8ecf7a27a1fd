"""Python on the pages of docs/ runs as it stands there; what it prints is what the page shows.

Blocks of a page share their names, from the first to the last, beside `root`, `a` and `b`, which are datasets, and what a robot gives. A
block with a file's name behind its fence is a file, which the test of its page writes (`tests/policies/test_toy_policy.py`).
"""

import doctest
import shutil
from collections.abc import Iterator
from contextlib import chdir, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.small_run import make_finished, small_config
from pages import PAGES, Block, blocks
from train.messy import write_recording

from vlatune.checkpoint.export import export_run
from vlatune.config import ExportConfig
from vlatune.policies.pi05.size import building_at, read_size

PYTHON = {page: [one for one in blocks(page) if one.info == "python"] for page in PAGES}
TOP = "observation.images.top"


@pytest.fixture(scope="module")
def place(dataset_v3: Path, small_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the pages name: a dataset, and an export."""
    folder = tmp_path_factory.mktemp("python")
    shutil.copytree(dataset_v3, folder / "data/pusht")
    run = make_finished(small_config(dataset_v3, small_base, folder / "runs/fold"))
    (folder / "exported").mkdir()
    export_run(run, folder / "exported/fold", ExportConfig(), warn=pytest.fail)
    odd = {"state": "state", "action": "actions", "camera": "image"}
    write_recording(folder / "odd", names=odd, colour=(200, 20, 20), task="fold")
    for name, camera in (("a", "observation.images.front"), ("b", TOP)):
        names = {"state": "observation.state", "action": "action", "camera": camera}
        write_recording(folder / name, names=names, colour=(20, 200, 20), task="fold")
    with chdir(folder):
        yield folder


def given(place: Path, block: Block, dataset: Path) -> dict[str, Any]:
    """Names that a block may use without having made them."""
    cameras = {f"observation.images.{name}": torch.rand(1, 3, 96, 96) for name in ("top", "wrist")}
    observation = cameras | {"observation.state": torch.zeros(1, 3), "task": ["move to the red pad"]}
    root = place / "odd" if "feature_map={" in block.text else dataset
    return {"root": str(root), "a": str(place / "a"), "b": str(place / "b"), "observation": observation}


def run(block: Block, names: dict[str, Any], place: Path) -> None:
    """A relative path is one of this process: the session's cluster was started elsewhere."""
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


def test_python_is_looked_at():
    assert sum(map(len, PYTHON.values())) >= 7
