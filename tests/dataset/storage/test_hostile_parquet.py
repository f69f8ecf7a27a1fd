"""No code from a dataset: pickled objects in its parquet files, met the user's way in a process that knows their type."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import hostile_parquet as hostile
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray.data
from hostile_parquet import PICKLED, TENSOR

import vlatune
from vlatune import cli
from vlatune.dataset.meta.dataset_meta import load_meta

TASKS = "meta/tasks.parquet"
EPISODES = "meta/episodes/chunk-000/file-000.parquet"
DATA = "data/chunk-000/file-000.parquet"

META_CASES = {
    "a task's sentence": (TASKS, "task", False),
    "a column of tasks that nobody reads": (TASKS, "note", True),
    "an episode's sentences": (EPISODES, "tasks", True),
    "an episode's length": (EPISODES, "length", False),
}
DATA_CASES = {
    "the actions": (DATA, "action", True),
    "a column of data that nobody reads": (DATA, "note", False),
}


@pytest.fixture
def marker(tmp_path) -> Path:
    return tmp_path / "code-ran"


@pytest.fixture
def poisoned(tmp_path, dataset_v3, marker) -> Callable[[tuple], tuple[Path, str]]:
    """A case -> the dataset's folder, and the words that must tell of it."""

    def make(case: tuple) -> tuple[Path, str]:
        file, column, deep = case
        folder = Path(shutil.copytree(dataset_v3, tmp_path / "dataset"))
        hostile.poison(folder / file, column, marker, deep=deep)
        place = f"{column}.item" if deep else column
        return folder, f"{file}: column '{place}' has the extension type '{PICKLED}', which is not read"

    return make


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises((ValueError, RuntimeError, ray.exceptions.RayTaskError)) as caught:
        call()
    return str(caught.value)


def test_the_payload_would_run(tmp_path, marker):
    """Else the other tests show nothing."""
    path = tmp_path / "one.parquet"
    pq.write_table(pa.table({"a": [1]}), path)
    hostile.poison(path, "b", marker)
    pq.read_table(path).column("b").to_pylist()
    assert marker.exists()


@pytest.mark.parametrize("case", META_CASES.values(), ids=META_CASES)
def test_meta_is_refused_by_every_command(case, poisoned, marker, small_base, tmp_path, capsys):
    folder, told = poisoned(case)
    assert told in error_of(lambda: load_meta(str(folder)))
    assert told in error_of(lambda: vlatune.read_lerobot(str(folder)))
    assert cli.main(["inspect", str(folder)]) == 1
    assert told in " ".join(capsys.readouterr().out.split())
    flags = [f"--dataset.root={folder}", f"--policy.path={small_base}", f"--output_dir={tmp_path / 'run'}"]
    assert cli.main(["train", *flags, "--batch_size=2", "--steps=1"]) == 2
    assert told in capsys.readouterr().err
    assert not marker.exists()


@pytest.mark.parametrize("case", DATA_CASES.values(), ids=DATA_CASES)
def test_data_is_refused_by_every_command(case, poisoned, marker, small_base, tmp_path, capsys, ray_local):
    folder, told = poisoned(case)
    rows = vlatune.read_lerobot(str(folder), resize=(16, 16), cameras=[])
    assert told in error_of(rows.take_all)
    assert cli.main(["inspect", str(folder)]) == 1
    assert told in " ".join(capsys.readouterr().out.split())
    flags = [f"--dataset.root={folder}", f"--policy.path={small_base}", f"--output_dir={tmp_path / 'run'}"]
    assert cli.main(["train", *flags, "--batch_size=2", "--steps=1"]) == 2
    assert told in capsys.readouterr().err
    assert not marker.exists()


def test_a_type_that_is_a_pickle_is_refused_before_arrow_restores_it(tmp_path, dataset_v3, marker):
    """Ray has a switch for its older files, and with it on the schema alone runs code."""
    folder = Path(shutil.copytree(dataset_v3, tmp_path / "dataset"))
    hostile.poison_type(folder / TASKS, "note", marker)
    call = "import sys, ray.data; from vlatune.dataset.meta.dataset_meta import load_meta; load_meta(sys.argv[1])"
    env = {"RAY_DATA_AUTOLOAD_CLOUDPICKLE_TENSOR_METADATA": "1", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", call, str(folder)], env=env, capture_output=True, text=True, check=False
    )
    assert f"{TASKS}: column 'note' has the extension type '{TENSOR}'" in done.stderr
    assert not marker.exists()
