"""The whole of test_matrix.py's product, on one worker and on two, through Ray Train."""

import pytest
from test_matrix import CASES, check, run  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_local")]


@pytest.mark.parametrize(("train", "dtype", "draws", "workers"), CASES)
def test_all_of_them_through_ray_train(run, small_base, tmp_path, train, dtype, draws, workers):  # noqa: F811
    check(run(train, dtype, draws, workers, with_ray=True), small_base, tmp_path / "exported", step=3)
