"""Fixtures of all tests: no network, temporary caches, two small datasets, a local Ray cluster."""

import atexit
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

# huggingface_hub, datasets and lerobot read these when they are imported.
CACHE = tempfile.mkdtemp(prefix="vlatune-test-cache-")
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = CACHE
os.environ["HF_HUB_CACHE"] = f"{CACHE}/hub"
os.environ["HF_DATASETS_CACHE"] = f"{CACHE}/datasets"
os.environ["HF_LEROBOT_HOME"] = f"{CACHE}/lerobot"
os.environ["XDG_CACHE_HOME"] = f"{CACHE}/cache"
os.environ["XDG_STATE_HOME"] = f"{CACHE}/state"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # training workers and readers share the cores of a small machine
os.environ.pop("RAY_ADDRESS", None)  # tests start their own cluster

TESTS = Path(__file__).parent
if str(TESTS) not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    # Ray workers and other subprocesses import `benchmarks` and the helpers of tests.
    paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

settings.register_profile("no timing", deadline=None)
settings.load_profile("no timing")


@pytest.fixture(autouse=True)
def _normal_scheduling() -> Iterator[None]:
    """Undo real-time scheduling, which LeRobot's video encoder sets for its process."""
    from vlatune.demo.writer import keep_scheduling_policy

    with keep_scheduling_policy():
        yield


@pytest.fixture(scope="session")
def dataset_v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven episodes of about twelve frames, two cameras of 96x96: three mp4 files per camera, two data files."""
    return _made(tmp_path_factory.mktemp("datasets") / "v3", version="v3.0")


@pytest.fixture(scope="session")
def dataset_v21(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The episodes of `dataset_v3` in LeRobot's format v2.1."""
    return _made(tmp_path_factory.mktemp("datasets") / "v21", version="v2.1")


@pytest.fixture(scope="session")
def small_base(dataset_v3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LeRobot folder of a tiny PI0.5 with random weights, for the datasets' cameras and tasks."""
    from vlatune.data.meta.dataset_meta import load_meta
    from vlatune.policies.pi05.tiny import make_tiny_pi05

    meta = load_meta(str(dataset_v3))
    state, action = (meta.features[key].shape[0] for key in ("observation.state", "action"))
    folder = tmp_path_factory.mktemp("base") / "small"
    return make_tiny_pi05(
        folder, cameras=meta.cameras, state_dim=state, action_dim=action, horizon=5, image_size=48, tasks=meta.tasks
    )


@pytest.fixture(scope="session")
def two_workers_run(dataset_v3: Path, small_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of `vlatune train` with two workers and a restart."""
    from two_workers_run import make_two_workers_run

    return make_two_workers_run(dataset_v3, small_base, tmp_path_factory.mktemp("two_workers"))


@pytest.fixture(scope="session")
def base_config(ray_local, dataset_v3: Path, small_base: Path) -> Any:
    """Return the config of a run with one worker on the session's cluster."""
    from two_workers_run import over_an_epoch

    return over_an_epoch(dataset_v3, small_base)


@pytest.fixture
def temporary(monkeypatch, tmp_path_factory) -> Iterator[Path]:
    """A folder for temporary files of this process and its children; its path is short because of Ray's sockets."""
    folder = Path(tempfile.mkdtemp(prefix="vt", dir=Path(tmp_path_factory.getbasetemp().root) / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)  # the last processes of a killed run may still write there


@pytest.fixture
def hears_ctrl_c() -> Iterator[None]:
    """Use Python's SIGINT handler; shells make background commands ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder on the import path of the cluster's processes."""
    return tmp_path_factory.mktemp("site")


@pytest.fixture(scope="session")
def ray_local(site: Path) -> Iterator[None]:
    """Start one local cluster for the session, with a small object store and a run's settings."""
    import ray

    from vlatune.train.driver.ray_cluster import environment, ray_environment

    with environment(ray_environment() | {"PYTHONPATH": f"{os.environ['PYTHONPATH']}{os.pathsep}{site}"}):
        ray.init(
            address="local",
            num_cpus=2,
            object_store_memory=200 * 1024 * 1024,
            resources={"vlatune_trainer": 2},
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
    yield
    assert ray.is_initialized(), "a test has ended the session's cluster"
    ray.shutdown()


@pytest.fixture(autouse=True)
def _restored_process_state() -> Iterator[None]:
    """Restore random states, and torch's flags if it is loaded, after a test."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    torch = sys.modules.get("torch")  # not imported here, because most tests do not need it
    if torch is not None:
        torch_state, precision = torch.get_rng_state(), torch.get_float32_matmul_precision()
        cudnn = torch.backends.cudnn
        tf32, benchmark = cudnn.allow_tf32, cudnn.benchmark
    yield
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    if torch is not None:
        torch.set_rng_state(torch_state)
        torch.set_float32_matmul_precision(precision)
        cudnn.allow_tf32, cudnn.benchmark = tf32, benchmark


def _made(folder: Path, *, version: str) -> Path:
    from vlatune.demo.generate import SyntheticSpec, make_dataset

    make_dataset(folder, SyntheticSpec(episodes=7, frames=12, vary_length=True, episodes_per_file=3, version=version))
    return folder
