"""Saves through a bounded buffer write the right bytes within the allowed memory, and never block forever."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_run import running, small_config
from tensor_bytes import TensorBytes, bytes_of
from torch import Tensor

from vlatune.checkpoint.snapshot import SaveAbortedError, Snapshot, Staging, TorchHost, plan_file
from vlatune.checkpoint.state import tensors_to_save
from vlatune.checkpoint.store import list_checkpoints

CPU = torch.device("cpu")


def make_files() -> dict[str, dict[str, Tensor]]:
    """Several dtypes and shapes, one without a dimension, one without elements, one not in one piece."""
    torch.manual_seed(0)
    first = {
        "b.weight": torch.randn(7, 5),
        "a.step": torch.tensor(3.0),
        "rounded": torch.randn(3, 3).to(torch.bfloat16),
        "turned": torch.randn(4, 6).T,
        "empty": torch.zeros(0, 4),
    }
    return {"first.safetensors": first, "second.safetensors": {"x": torch.arange(100), "y": torch.randn(33)}}


def staging(most_bytes: int, chunk_bytes: int = 48) -> Staging:
    return Staging(TorchHost(CPU), most_bytes=most_bytes, chunk_bytes=chunk_bytes)


def in_background(snapshot: Snapshot, folder: Path) -> threading.Thread:
    def write() -> None:
        for name in snapshot.layouts:
            snapshot.write(name, folder / name)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    return thread


def check(files, folder: Path) -> None:
    for name, tensors in files.items():
        loaded = load_file(folder / name)
        assert loaded.keys() == tensors.keys()
        for key, tensor in tensors.items():
            assert loaded[key].dtype == tensor.dtype
            assert torch.equal(loaded[key], tensor), key


@pytest.mark.parametrize("most_bytes", [48, 100, 10_000])
def test_every_byte_arrives_however_small_the_buffer(tmp_path, most_bytes):
    one, files = staging(most_bytes), make_files()
    for number in range(3):  # memory is used again
        for tensors in files.values():
            for tensor in tensors.values():
                tensor.add_(number)
        snapshot = one.begin(files)
        thread = in_background(snapshot, tmp_path)
        snapshot.copy()
        thread.join(timeout=60)
        assert not thread.is_alive()
        check(files, tmp_path)


def test_a_file_is_safetensors_own_to_the_byte(tmp_path):
    tensors = {name: value.contiguous() for name, value in make_files()["first.safetensors"].items()}
    save_file(tensors, tmp_path / "theirs")
    snapshot = staging(10_000).begin({"ours": tensors})
    snapshot.copy()
    snapshot.write("ours", tmp_path / "ours")
    data = plan_file(tensors).num_bytes
    assert (tmp_path / "ours").read_bytes()[-data:] == (tmp_path / "theirs").read_bytes()[-data:]


def test_what_fits_is_copied_before_anything_is_written_and_may_change_then(tmp_path):
    files = make_files()
    before = {name: {key: value.clone() for key, value in tensors.items()} for name, tensors in files.items()}
    snapshot = staging(10_000).begin(files)
    snapshot.copy()
    for tensors in files.values():
        for tensor in tensors.values():
            tensor.zero_()
    for name in files:
        snapshot.write(name, tmp_path / name)
    check(before, tmp_path)


def test_a_writer_that_fails_lets_the_loop_go():
    snapshot = staging(48).begin(make_files())
    loop = threading.Thread(target=snapshot.copy, daemon=True)
    loop.start()
    snapshot.abort()
    loop.join(timeout=60)
    assert not loop.is_alive()


def test_a_copy_that_fails_lets_the_writer_go(tmp_path):
    files = make_files()
    snapshot = staging(48).begin(files)
    files["second.safetensors"].clear()  # as if the device were gone in between
    reported = []

    def write() -> None:
        try:
            for name in snapshot.layouts:
                snapshot.write(name, tmp_path / name)
        except SaveAbortedError:
            reported.append(True)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    with pytest.raises(KeyError):
        snapshot.copy()
    thread.join(timeout=60)
    assert reported == [True]


@pytest.fixture
def config(dataset_v3, small_base, tmp_path):
    config = small_config(dataset_v3, small_base, tmp_path / "run")
    return replace(config, policy=replace(config.policy, train="full"), save_buffer_bytes=1024**2)


def test_a_runs_save_takes_what_the_config_allows(config):
    with running(config) as run:
        run.step()
        files = tensors_to_save(run.trainable, run.optimizer)
        with TensorBytes() as counter:
            run.save()
            run.checkpointer.finish()
        saved = sum(bytes_of(tensors.values()) for tensors in files.values())
        assert saved > 10 * config.save_buffer_bytes
        assert counter.peak["cpu"] <= config.save_buffer_bytes + 1024  # and the sums of the losses
        (folder,) = list_checkpoints(config.run_dir)
        check(files, folder)


@pytest.mark.gpu
def test_cuda_tensors_arrive_as_they_were_though_they_change_at_once(tmp_path):
    """Long kernels before and after the copies give one that came late every chance to do harm."""
    files = {"all.safetensors": {str(number): torch.randn(10**6, device="cuda") for number in range(8)}}
    before = {name: {key: value.cpu() for key, value in tensors.items()} for name, tensors in files.items()}
    snapshot = Staging(TorchHost(torch.device("cuda")), most_bytes=8 * 10**6, chunk_bytes=10**6).begin(files)
    thread = in_background(snapshot, tmp_path)
    torch.cuda._sleep(10_000_000)
    snapshot.copy()
    for tensor in files["all.safetensors"].values():
        tensor.zero_()
    thread.join(timeout=60)
    check(before, tmp_path)
