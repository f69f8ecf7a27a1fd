"""What every test may rely on: no network, caches of its own, untouched random states, two small datasets."""

import atexit
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

# huggingface_hub, datasets and lerobot read these when they are imported, and nothing above imports them.
CACHE = tempfile.mkdtemp(prefix="vlatune-test-cache-")
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = CACHE
os.environ["HF_HUB_CACHE"] = f"{CACHE}/hub"
os.environ["HF_DATASETS_CACHE"] = f"{CACHE}/datasets"
os.environ["HF_LEROBOT_HOME"] = f"{CACHE}/lerobot"


@pytest.fixture(scope="session")
def dataset_v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven episodes of about twelve frames, two cameras of 96x96: three mp4 files per camera, two data files."""
    return _made(tmp_path_factory.mktemp("datasets") / "v3", version="v3.0")


@pytest.fixture(scope="session")
def dataset_v21(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The episodes of `dataset_v3` in LeRobot's older format."""
    return _made(tmp_path_factory.mktemp("datasets") / "v21", version="v2.1")


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
    from vlatune.dataset.synthetic import SyntheticSpec, make_dataset

    make_dataset(folder, SyntheticSpec(episodes=7, frames=12, vary_length=True, episodes_per_file=3, version=version))
    return folder
