"""An honest dataset, base and run; the cases copy them."""

from pathlib import Path

import pytest
from honest_run import make_run
from place import Place


@pytest.fixture(scope="session")
def honest(
    dataset_v3: Path, dataset_v21: Path, small_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    run = tmp_path_factory.mktemp("honest") / "run"
    make_run(dataset_v3, small_base, run)
    return {"dataset": dataset_v3, "older": dataset_v21, "base": small_base, "run": run}


@pytest.fixture
def place(honest: dict[str, Path], tmp_path: Path) -> Place:
    return Place(tmp_path, honest)
