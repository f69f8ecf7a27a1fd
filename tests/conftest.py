"""What every test may rely on: no network, caches of its own, untouched random states, two small datasets."""

import atexit
import gc
import os
import random
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

# huggingface_hub, datasets and lerobot read these when they are imported, and nothing above imports them.
CACHE = tempfile.mkdtemp(prefix="vlatune-test-cache-")
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = CACHE
os.environ["HF_HUB_CACHE"] = f"{CACHE}/hub"
os.environ["HF_DATASETS_CACHE"] = f"{CACHE}/datasets"
os.environ["HF_LEROBOT_HOME"] = f"{CACHE}/lerobot"
os.environ["XDG_STATE_HOME"] = f"{CACHE}/state"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # training workers and readers share the cores of a small machine
os.environ.pop("RAY_ADDRESS", None)  # tests start their own cluster
# Where Python may write no bytecode, each of some 150 processes would compile what it imports of ours, and both that test all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

TESTS = Path(__file__).parent
RAY = "ray"
SHARED = {RAY: r"\bray_local\b|\bmark\.ray\b", "two workers": r"\btwo_workers_run\b|\bforked_pairs\b"}
"""What is made once for several files -> how a file says that it uses it."""
EVERY_PROCESS = str(TESTS / "every_process")
os.environ["VLATUNE_TESTS_PACKAGES"] = f"{CACHE}/packages.json"
if EVERY_PROCESS not in os.environ.get("PYTHONPATH", "").split(os.pathsep):  # else `pytest -n 2` has set it already
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [EVERY_PROCESS, os.environ.get("PYTHONPATH")]))
    sys.path.append(EVERY_PROCESS)
    import sitecustomize  # noqa: F401  # this process has started without it

settings.register_profile("no timing", deadline=None)  # the machine may be busy; timings live in benchmarks
settings.load_profile("no timing")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu_seconds", metavar="FILE", help="write the CPU seconds of every test there (cpu_seconds.py)")


def pytest_configure(config: pytest.Config) -> None:
    file, process = config.getoption("--cpu_seconds"), os.environ.get("PYTEST_XDIST_WORKER")
    if file and (process or not config.getoption("numprocesses", None)):
        from cpu_seconds import CpuSeconds

        config.pluginmanager.register(CpuSeconds(Path(f"{file}.{process}" if process else file).absolute()))


def pytest_collection_finish() -> None:
    """What is imported by now stays: Python need not look for garbage in it again and again. And models are so small, and the
    cores so busy with the other half of the tests, that a second thread costs more than it brings (a twelfth of the CPU seconds of
    two files side by side); memory stays as in a worker (a twentieth). Runs that are started have as many threads as ever.
    """
    gc.freeze()
    if "torch" in sys.modules:
        from vlatune.train.worker.device import set_performance_flags

        set_performance_flags(sys.modules["torch"].device("cpu"), 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What shares the cluster comes first, as one after the other it takes longest; then what takes long beside it."""
    items.sort(key=_rank)  # stable: otherwise as collected


def _rank(item: pytest.Item) -> int:
    if group_of(item.nodeid) == RAY:
        return 0
    return 1 if item.get_closest_marker("early") else 2


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of `make test`: a file goes to one process whole, so that its fixtures are made once, and all that share the cluster, or
    the run of two workers, to the same. By hand, as xdist 3.8 hangs its own groups on a field that pytest 9 no longer has, and then has none.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)


def group_of(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    return _shared_by(file) or file


@cache
def _shared_by(file: str) -> str | None:
    """What the file shares with others, if anything."""
    text = (TESTS.parent / file).read_text(encoding="utf-8")
    return next((group for group, names in SHARED.items() if re.search(names, text)), None)


@pytest.fixture(autouse=True)
def _no_cluster_unasked(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that starts Ray in this process says so, or it would have a cluster beside the session's."""
    before, is_of_ray = _has_cluster(), group_of(request.node.nodeid) == RAY
    assert is_of_ray or "ray_local" not in request.fixturenames, "it uses ray_local through a fixture; mark it `ray`"
    yield
    assert is_of_ray or _has_cluster() == before, "it started Ray; use ray_local, or mark it `ray`"


def _has_cluster() -> bool:
    ray = sys.modules.get("ray")  # not imported here: most tests do without
    return ray is not None and ray.is_initialized()


@pytest.fixture(autouse=True)
def _ordinary_process() -> Iterator[None]:
    """An encoder that others run in this process must not leave it, and all that it starts, a real-time one."""
    from vlatune.dataset.synthetic.writer import own_schedule

    with own_schedule():
        yield


@pytest.fixture(scope="session")
def dataset_v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven episodes of about twelve frames, two cameras of 96x96: three mp4 files per camera, two data files."""
    return _made(tmp_path_factory.mktemp("datasets") / "v3", version="v3.0")


@pytest.fixture(scope="session")
def dataset_v21(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The episodes of `dataset_v3` in LeRobot's older format."""
    return _made(tmp_path_factory.mktemp("datasets") / "v21", version="v2.1")


@pytest.fixture(scope="session")
def small_base(dataset_v3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small PI0.5 with random weights for the cameras and tasks of the datasets, as a LeRobot folder."""
    from vlatune.dataset.meta.dataset_meta import load_meta
    from vlatune.policies.pi05.small import make_small_pi05

    meta = load_meta(str(dataset_v3))
    state, action = (meta.features[key].shape[0] for key in ("observation.state", "action"))
    folder = tmp_path_factory.mktemp("base") / "small"
    return make_small_pi05(
        folder, cameras=meta.cameras, state_dim=state, action_dim=action, horizon=5, image_size=48, tasks=meta.tasks
    )


@pytest.fixture(scope="session")
def two_workers_run(dataset_v3: Path, small_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two workers and a cluster of their own, by `vlatune train`, with a restart on the way (train/two_workers_run.py)."""
    from train.two_workers_run import make_two_workers_run

    return make_two_workers_run(dataset_v3, small_base, tmp_path_factory.mktemp("two_workers"))


@pytest.fixture
def hears_ctrl_c() -> Iterator[None]:
    """Python's own handler: a shell that starts its commands in the background has them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages, empty unless a test puts one there, in which the cluster's processes look as well."""
    return tmp_path_factory.mktemp("site")


@pytest.fixture(scope="session")
def ray_local(site: Path) -> Iterator[None]:
    """One local cluster for the whole session, with a small object store. Only readers give way, as in a run's own: with
    Ray's niceness of 15 for all its workers they would hardly run beside the other half of the tests.
    """
    import ray

    from vlatune.ray_internals import init_options

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{os.environ['PYTHONPATH']}{os.pathsep}{site}")
        ray.init(
            address="local",
            num_cpus=2,
            object_store_memory=200 * 1024 * 1024,
            resources={"vlatune_trainer": 2},
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            **init_options(niceness=0),
        )
    yield
    assert ray.is_initialized(), "a test has ended the session's cluster, and those after it ran on others"
    ray.shutdown()


@pytest.fixture(autouse=True)
def _restored_random_state() -> Iterator[None]:
    """Random states of python, NumPy and, where it is loaded, torch are after a test what they were before."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    torch = sys.modules.get("torch")  # not imported here: most tests do without
    torch_state = torch.get_rng_state() if torch else None
    yield
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    if torch is not None:
        torch.set_rng_state(torch_state)


def _made(folder: Path, *, version: str) -> Path:
    from vlatune.dataset.synthetic.generate import SyntheticSpec, make_dataset

    make_dataset(folder, SyntheticSpec(episodes=7, frames=12, vary_length=True, episodes_per_file=3, version=version))
    return folder
