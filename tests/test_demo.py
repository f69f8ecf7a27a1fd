"""The demo's parts that stay: broken off at any moment, the next demo makes whole ones."""

import signal
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
DIE_WHEN_CALLED = "lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)"


def run_and_die(what: str, where: str) -> None:
    """Run a line of Python in a process of its own, which is killed where it calls `where`."""
    module, _, name = where.rpartition(".")
    code = f"import os, signal, {module}, vlatune.demo\nfrom pathlib import Path\n{module}.{name} = {DIE_WHEN_CALLED}\n{what}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def test_a_base_that_was_broken_off_is_made_anew(tmp_path, dataset_v3, small_base):
    folder = tmp_path / "base"
    make = f"vlatune.demo.ensure_base(Path({str(folder)!r}), Path({str(dataset_v3)!r}), 0)"
    run_and_die(make, "vlatune.policies.pi05.small.write_size")  # the weights are written, the processors are not
    assert demo.ensure_base(folder, dataset_v3, seed=0) == folder
    assert names_in(folder) == names_in(small_base)
    spec = get_adapter("pi05").read_spec(folder)
    assert Path(spec.tokenizer_file).is_relative_to(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_run_that_was_broken_off_while_it_made_its_base_makes_it_anew(tmp_path, dataset_v3):
    config = RunConfig(recipe="tiny", output_dir=str(tmp_path / "run"), dataset=DatasetConfig(root=(str(dataset_v3),)))
    make = f"from vlatune.config import *\nfrom vlatune.run_setup import load_metas\nfrom vlatune.train.driver.tiny_base import with_base\nconfig = {config!r}\nwith_base(config, load_metas(config), say=print)"
    run_and_die(make, "vlatune.policies.pi05.small.write_size")
    assert not (tmp_path / "run/base").exists()
    base = tmp_path / "run/base"
    assert with_base(config, load_metas(config), say=print).policy.path == str(base)
    assert Path(get_adapter("pi05").read_spec(base).tokenizer_file).is_relative_to(base)
    assert sorted(path.name for path in base.parent.iterdir()) == [".lock", "base"]


def test_a_dataset_that_was_broken_off_is_made_anew_and_is_in_nobodys_way(tmp_path, monkeypatch):
    folder = tmp_path / "dataset"
    run_and_die(f"vlatune.demo.ensure_dataset(Path({str(folder)!r}), 0)", "vlatune.dataset.synthetic.generate._film")
    assert list(tmp_path.iterdir())  # half of it lies aside
    monkeypatch.setattr(demo, "EPISODES", 2)
    demo.ensure_dataset(folder, seed=0)
    assert len(load_meta(str(folder)).episodes.length) == 2
    check_run(RunConfig(output_dir=str(tmp_path)))  # the run's folder holds nothing that would stop it


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
