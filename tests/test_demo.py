"""The demo's parts that stay: broken off at any moment, the next demo makes whole ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vlatune import demo
from vlatune.config import DatasetConfig, RunConfig
from vlatune.dataset.meta.dataset_meta import load_meta
from vlatune.files import whole_folder
from vlatune.policies.registry import get_adapter
from vlatune.run_setup import load_metas
from vlatune.train.driver.resume_rules import check_run
from vlatune.train.driver.tiny_base import with_base

pytestmark = pytest.mark.early
PROGRAM = """
import os, signal
from pathlib import Path
import vlatune.dataset.synthetic.generate, vlatune.demo, vlatune.policies.small_models
from vlatune.config import *
from vlatune.run_setup import load_metas
from vlatune.train.driver.tiny_base import with_base

def run_and_die(work, module, name):
    pid = os.fork()
    if pid == 0:
        setattr(module, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        work()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL

small = vlatune.policies.small_models
"""
"""A process that imports torch once, and dies several times."""


def config_of(folder: Path, dataset: Path) -> RunConfig:
    return RunConfig(recipe="tiny", output_dir=str(folder / "run"), dataset=DatasetConfig(root=(str(dataset),)))


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory, dataset_v3) -> Path:
    """A folder in which each part was begun by a process that was killed: `base/base`, `run/run/base`, `data/dataset`.

    Of a base, the weights were written and the processors were not.
    """
    folder = tmp_path_factory.mktemp("broken off")
    base, run, data = (folder / name for name in ("base", "run", "data"))
    for one in (base, run, data):
        one.mkdir()
    config = config_of(run, dataset_v3)
    lines = [
        f"ensure_base = lambda: vlatune.demo.ensure_base(Path({str(base / 'base')!r}), Path({str(dataset_v3)!r}), 0)",
        "run_and_die(ensure_base, small, 'write_size')",
        f"config = {config!r}",
        "run_and_die(lambda: with_base(config, load_metas(config), say=print), small, 'write_size')",
        f"ensure_dataset = lambda: vlatune.demo.ensure_dataset(Path({str(data / 'dataset')!r}), 0)",
        "run_and_die(ensure_dataset, vlatune.dataset.synthetic.generate, '_film')",
    ]
    code = PROGRAM + "\n".join(lines)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def test_a_base_that_was_broken_off_is_made_anew(broken_off, dataset_v3, small_base):
    folder = broken_off / "base" / "base"
    assert not folder.exists()
    assert list(folder.parent.glob(".*/model.safetensors"))  # half of it lies aside
    assert demo.ensure_base(folder, dataset_v3, seed=0) == folder
    assert names_in(folder) == names_in(small_base)
    spec = get_adapter("pi05").read_spec(folder)
    assert Path(spec.tokenizer_file).is_relative_to(folder)
    assert [path.name for path in folder.parent.iterdir()] == ["base"]


def test_a_run_that_was_broken_off_while_it_made_its_base_makes_it_anew(broken_off, dataset_v3):
    config = config_of(broken_off / "run", dataset_v3)
    base = config.run_dir / "base"
    assert not base.exists()
    assert with_base(config, load_metas(config), say=print).policy.path == str(base)
    assert Path(get_adapter("pi05").read_spec(base).tokenizer_file).is_relative_to(base)
    assert sorted(path.name for path in base.parent.iterdir()) == [".lock", "base"]


def test_a_dataset_that_was_broken_off_is_made_anew_and_is_in_nobodys_way(broken_off, monkeypatch):
    folder = broken_off / "data" / "dataset"
    assert list(folder.parent.iterdir())  # half of it lies aside
    monkeypatch.setattr(demo, "EPISODES", 2)
    demo.ensure_dataset(folder, seed=0)
    assert len(load_meta(str(folder)).episodes.length) == 2
    check_run(RunConfig(output_dir=str(folder.parent)))  # the run's folder holds nothing that would stop it


def test_what_a_killed_demo_left_stops_no_start_though_a_process_has_its_number_again(tmp_path):
    """As in a container, where the first processes always have the same numbers."""
    left = tmp_path / f".dataset.{os.getppid()}.partial"
    left.mkdir()
    check_run(RunConfig(output_dir=str(tmp_path)))
    (tmp_path / f".notes.{os.getppid()}.partial").mkdir()
    with pytest.raises(ValueError, match="is not empty and holds no run"):
        check_run(RunConfig(output_dir=str(tmp_path)))


def test_what_a_living_process_writes_aside_is_let_be(tmp_path):
    others = tmp_path / ".new.1.partial"  # process 1 is always alive
    others.mkdir()
    with whole_folder(tmp_path / "new") as aside:
        (aside / "file").write_text("x")
    assert (tmp_path / "new" / "file").read_text() == "x"
    assert others.exists()


def test_an_error_leaves_nothing_aside(tmp_path):
    with pytest.raises(RuntimeError), whole_folder(tmp_path / "new"):
        raise RuntimeError
    assert not list(tmp_path.iterdir())
