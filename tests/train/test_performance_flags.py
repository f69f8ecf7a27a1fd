"""Flags are set where training runs, and what is reported is what torch says of them."""

from collections.abc import Iterator

import pytest
import torch

from vlatune.train.device import set_performance_flags


@pytest.fixture(autouse=True)
def _restored_flags() -> Iterator[None]:
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    tf32, benchmark = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = tf32, benchmark


def test_the_process_uses_as_many_threads_as_it_is_told():
    flags = set_performance_flags(torch.device("cpu"), 2)
    assert flags == {"device": "cpu", "threads": 2, "float32_matmul_precision": "highest"}
    assert torch.get_num_threads() == 2


def test_on_cuda_tf32_and_the_choice_of_kernels_are_on():
    flags = set_performance_flags(torch.device("cuda"), 1)
    assert flags["float32_matmul_precision"] == torch.get_float32_matmul_precision() == "high"
    assert flags["cudnn_tf32"] is torch.backends.cudnn.allow_tf32 is True
    assert flags["cudnn_benchmark"] is torch.backends.cudnn.benchmark is True
