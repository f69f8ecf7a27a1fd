"""A worker with a GPU before it trains: its environment, and why torch cannot use the GPU."""

import pytest

from vlatune.errors import RunStoppedError
from vlatune.gpu_driver import DRIVER, Gpu, find_problem
from vlatune.train.worker_job import missing_environment

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")


@pytest.mark.parametrize(
    ("gpu", "named"),
    [
        (Gpu("550.54.15", "13.0", is_usable=False), {"550.54.15", "13.0", "580"}),
        (Gpu("580.65.06", "13.0", is_usable=False), {"580.65.06", "CUDA_VISIBLE_DEVICES"}),
        (Gpu(None, "13.0", is_usable=False), {"nvidia-smi"}),
        (Gpu("550.54.15", None, is_usable=False), {"https://pytorch.org/get-started"}),
        (Gpu("580.65.06", "13.0", True, (7, 0), ARCHITECTURES), {"7.0", "sm_75"}),
    ],
)
def test_the_reason_names_versions_and_the_remedy(gpu, named):
    problem = find_problem(gpu)
    assert problem
    assert all(one in problem for one in named)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (10, 3), (12, 0), (12, 1), (13, 0)])
def test_a_gpu_runs_kernels_of_its_generation_and_compiles_for_newer_ones(capability):
    assert find_problem(Gpu("580.65.06", "13.0", True, capability, ARCHITECTURES)) is None


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build  (dvs-builder)",
    ],
)
def test_the_version_of_both_kernel_modules(text):
    found = DRIVER.search(text)
    assert found
    assert found[1] == "550.54.15"


def test_a_worker_with_a_gpu_that_torch_cannot_use_stops_the_run():
    import torch

    from vlatune.train.driver.ray_trainer import _join

    if torch.cuda.is_available():
        pytest.skip("torch can use the GPU")
    with pytest.raises(RunStoppedError):
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
