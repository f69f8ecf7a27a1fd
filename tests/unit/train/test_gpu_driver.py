"""What a worker with a GPU does before it trains: its environment, and why torch cannot use the GPU."""

import pytest

from vlatune.errors import RunStoppedError
from vlatune.train.worker_job import missing_environment


def test_a_worker_with_a_gpu_that_torch_cannot_use_stops_the_run():
    import torch

    from vlatune.train.driver.ray_trainer import _join

    if torch.cuda.is_available():
        pytest.skip("torch can use the GPU")
    with pytest.raises(RunStoppedError, match="cannot use the GPU"):
        _join("127.0.0.1", 1, "nccl", 0, 1)


def test_the_allocator_is_set_unless_the_user_has():
    wanted = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert missing_environment({}, deterministic=False, uses_gpu=True) == wanted
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert missing_environment({name: ""}, deterministic=False, uses_gpu=True) == {}
    assert missing_environment({}, deterministic=False, uses_gpu=False) == {}


def test_deterministic_kernels_need_a_workspace_of_fixed_size():
    (name,) = missing_environment({}, deterministic=True, uses_gpu=False)
    assert missing_environment({name: ":16:8"}, deterministic=True, uses_gpu=False) == {}
