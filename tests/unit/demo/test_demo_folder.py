"""Datasets and base models are created atomically: what a killed process left does not stop the next start."""

import os

import pytest

from vlatune.config.settings import RunConfig
from vlatune.demo.demo import ensure_dataset
from vlatune.demo.generate import SyntheticSpec, make_dataset
from vlatune.storage.files import atomic_folder
from vlatune.train.driver.resume_rules import check_run


def test_partial_datasets_do_not_stop_a_run_but_other_files_do(tmp_path):
    """The process that left it in a container may have the number of a living process."""
    (tmp_path / f".dataset.{os.getppid()}.partial").mkdir()
    check_run(RunConfig(output_dir=str(tmp_path)))
    (tmp_path / f".notes.{os.getppid()}.partial").mkdir()
    with pytest.raises(ValueError, match="choose another --output_dir"):
        check_run(RunConfig(output_dir=str(tmp_path)))


def test_a_partial_folder_of_a_living_process_is_kept(tmp_path):
    others = tmp_path / ".new.1.partial"  # process 1 is always alive
    others.mkdir()
    with atomic_folder(tmp_path / "new") as partial:
        (partial / "file").write_text("x")
    assert (tmp_path / "new" / "file").read_text() == "x"
    assert others.exists()
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "other"):
        raise RuntimeError
    assert sorted(path.name for path in tmp_path.iterdir()) == [others.name, "new"]


def test_the_dataset_of_another_demo_is_rejected(tmp_path):
    make_dataset(tmp_path / "dataset", SyntheticSpec(episodes=2, frames=4, one_task=True))
    assert ensure_dataset(tmp_path / "dataset", seed=0, has_prompt=False) == tmp_path / "dataset"
    with pytest.raises(ValueError, match="choose another --output_dir"):
        ensure_dataset(tmp_path / "dataset", seed=0)
