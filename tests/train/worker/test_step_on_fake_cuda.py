"""A worker's device code on CUDA tensors without a GPU: batches, the update, guard, EMA, save, restore, evaluation.

What `tests/fake_cuda.py` says cannot go through it is replaced here and nowhere else: backward leaves gradients of the
right device and dtype, the fused step does nothing, page-locked memory is plain, streams and events only have names, and
the figures that evaluation reads on purpose are read by a stand-in. These five are left to the tests marked `gpu`.
"""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import CUDA, RealFile, fake_cuda, is_fake_cuda
from torch._subclasses.fake_tensor import DataDependentOutputException, unset_fake_temporarily

from vlatune.checkpoint import state
from vlatune.checkpoint.snapshot import Staging, TorchHost
from vlatune.checkpoint.state import load_optimizer, load_trainable, tensors_to_save
from vlatune.config import DatasetConfig, EvalConfig, OptimizerConfig, PolicyConfig, RunConfig
from vlatune.dataset.reader import make_unit, read_unit
from vlatune.evaluate.predictions import predict_all
from vlatune.pipeline.transforms import apply_all
from vlatune.policies.base import ModuleOptions
from vlatune.run_setup import Setup, make_setup
from vlatune.train.worker.collectives import mean_and_each
from vlatune.train.worker.non_finite_guard import NonFiniteWatch
from vlatune.train.worker.optimizer import Ema, LossTable, Updater, make_optimizer
from vlatune.train.worker.transfer import StreamTransfer, collate

FRAMES = np.arange(2)


@pytest.fixture(scope="module")
def setup(dataset_v3, small_base) -> Setup:
    root = DatasetConfig(root=(str(dataset_v3),))
    return make_setup(RunConfig(dataset=root, policy=PolicyConfig(path=str(small_base))))


class Machine:
    """An accelerator whose streams and events do nothing; the copy itself is torch's."""

    copy_stream: Any = SimpleNamespace(wait_event=lambda event: None)

    def enter_thread(self) -> None: ...

    def compute_stream(self) -> Any:
        return self.copy_stream

    def event(self) -> Any:
        return SimpleNamespace(record=lambda stream: None, query=lambda: False, synchronize=lambda: None)

    def page_locked(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def is_page_locked(self, host: torch.Tensor) -> bool:
        return False

    def on_copy_stream(self) -> Any:
        return nullcontext()

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host.to(CUDA, non_blocking=True)

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        assert is_fake_cuda(tensor)


def make_batch(setup: Setup) -> dict[str, torch.Tensor]:
    """The way of a training batch: read, transformed, collated, staged, sent, received."""
    rows = read_unit(setup.specs[0], make_unit(setup.metas[0], setup.specs[0], 1, FRAMES, FRAMES))
    transfer = StreamTransfer(Machine())
    with unset_fake_temporarily():  # NumPy's part, on the host
        staged = transfer.stage(collate(apply_all(setup.data_plan.transforms, rows)))
    return transfer.receive(transfer.send(staged), transfer.ask()).tensors


class NoBackward(Updater):
    """All of an update but the two parts for which there are no kernels."""

    def __init__(self, module: Any, optimizer: torch.optim.Optimizer, losses: LossTable | None = None) -> None:
        self.trained = [p for p in module.parameters() if p.requires_grad]
        optimizer.step = lambda: None
        super().__init__(module, self.trained, optimizer, clip_norm=1.0, losses=losses)

    def backward(self, loss: torch.Tensor, share: float) -> None:
        assert is_fake_cuda(loss.detach() * 0.0 + share)
        for parameter in self.trained:
            parameter.grad = torch.zeros_like(parameter)


@pytest.mark.parametrize("train", ["heads", "full"])
def test_an_update_never_leaves_the_device(setup, train):
    with fake_cuda():
        batch = make_batch(setup)
        assert all(is_fake_cuda(tensor) for tensor in batch.values())
        module, trained, optimizer = make_learner(setup, train)
        losses = LossTable(setup.loss_groups, CUDA)
        updater, ema, watch = NoBackward(module, optimizer, losses), Ema(trained, 0.9), NonFiniteWatch()
        result = updater.update([batch, batch], 2)
        ema.update()
        watch.remember(result.losses, result.grad_norm, [FRAMES])
        on_device = (result.losses, result.loss, result.grad_norm, updater.guard.skipped, losses.sums_2G)
        on_device = (*on_device, *ema.tensors().values())
        assert all(is_fake_cuda(tensor) for tensor in on_device)
        watch.look(0.0, 1, gather=lambda mine: [mine])  # the host knows the number; nothing more is read


def test_the_guard_would_be_caught_reading_its_flag(setup, monkeypatch):
    """So that the test above is known to see: the same, but the host looks whether the norm is finite."""
    module_way = NoBackward.apply

    def look(self: NoBackward) -> torch.Tensor:
        norm = module_way(self)
        if norm.isfinite():
            return norm
        raise AssertionError

    monkeypatch.setattr(NoBackward, "apply", look)
    with fake_cuda():
        module, _, optimizer = make_learner(setup, "heads")
        updater, batch = NoBackward(module, optimizer), make_batch(setup)
        with pytest.raises(DataDependentOutputException):
            updater.update([batch], 1)


def test_a_batch_left_on_the_host_is_caught(setup, monkeypatch):
    monkeypatch.setattr(Machine, "to_device", lambda self, host: host.clone())
    monkeypatch.setattr(Machine, "record_stream", lambda self, tensor, stream: None)
    with fake_cuda():
        module, _, optimizer = make_learner(setup, "heads")
        updater, batch = NoBackward(module, optimizer), make_batch(setup)
        with pytest.raises(RuntimeError, match="different devices"):
            updater.update([batch], 1)


def test_a_log_line_reads_its_numbers_once(setup):
    """The one read of a log line is meant; it is the only one."""
    with fake_cuda():
        numbers = torch.zeros(3, device=CUDA)
        with pytest.raises(DataDependentOutputException) as raised:
            mean_and_each(numbers, [0.0], SimpleNamespace(rank=0, num_workers=1), lambda _: None)
    (line,) = [str(entry.statement) for entry in raised.traceback if entry.path.name == "collectives.py"]
    assert "values.tolist()" in line


def test_an_evaluation_reads_nothing_before_its_last_batch(setup, monkeypatch):
    """The very function of `vlatune eval`, in two batches: what ends it here is the one line that reads, on purpose."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    rows = read_unit(setup.specs[0], make_unit(setup.metas[0], setup.specs[0], 1, FRAMES, FRAMES))
    done = []
    with fake_cuda(), torch.no_grad():
        module = make_learner(setup, "lora")[0].eval()
        module.policy.config.num_inference_steps = 2  # each does what the one before did, slowly here
        options = EvalConfig(batch_size=len(FRAMES) // 2)
        with pytest.raises(RuntimeError, match="numpy") as raised:
            predict_all(setup, module, rows, options, on_batch=lambda number, total: done.append((number, total)))
    assert done == [(1, 2), (2, 2)]
    *_, line = [str(entry.statement) for entry in raised.traceback if entry.path.name == "predictions.py"]
    assert "losses_BK = torch.stack(losses).cpu()" in line


class PlainHost:
    """Host memory that is not page-locked, and marks that nobody waits for."""

    def __init__(self) -> None:
        self.marks = 0

    def memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def mark(self) -> None:
        self.marks += 1


def test_a_save_copies_from_the_device_without_reading(setup):
    host = PlainHost()
    with fake_cuda():
        _, trained, optimizer = make_learner(setup, "full")
        give_moments(optimizer)
        files = tensors_to_save(trained, optimizer, Ema(trained, 0.9).tensors())
        assert all(is_fake_cuda(tensor) for tensors in files.values() for tensor in tensors.values())
        snapshot = Staging(host, most_bytes=10**9, chunk_bytes=10**6).begin(files)
        snapshot.copy()
    total = sum(layout.num_bytes for layout in snapshot.layouts.values())
    assert host.marks >= total // 10**6 > 10


def test_a_checkpoint_is_restored_onto_the_device(setup, tmp_path, monkeypatch):
    write_checkpoint(setup, tmp_path)
    with fake_cuda():
        monkeypatch.setattr(state, "safe_open", RealFile)
        _, trained, optimizer = make_learner(setup, "heads")
        load_trainable(tmp_path, trained)
        load_optimizer(tmp_path, trained, optimizer)
        assert all(is_fake_cuda(tensor) for tensor in trained.values())
        moments = [tensor for state in optimizer.state.values() for tensor in state.values()]
        assert len(moments) == 3 * len(trained)
        assert all(is_fake_cuda(tensor) for tensor in moments)


def make_learner(setup: Setup, train: str, device: Any = CUDA) -> tuple[Any, dict[str, Any], torch.optim.Optimizer]:
    options = ModuleOptions(train=train, dtype="bfloat16")
    module = setup.adapter.load_module(setup.policy, setup.binding, options, device).train()
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    return module, trained, make_optimizer(trained.values(), OptimizerConfig())


def give_moments(optimizer: torch.optim.Optimizer) -> None:
    """As a fused step leaves them: all on the parameter's device."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            step = torch.zeros((), device=parameter.device)
            moments = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
            optimizer.state[parameter] = {"step": step, **moments}


def write_checkpoint(setup: Setup, folder: Path) -> None:
    _, trained, optimizer = make_learner(setup, "heads", "cpu")
    give_moments(optimizer)
    staging = Staging(TorchHost(torch.device("cpu")), most_bytes=10**9)
    snapshot = staging.begin(tensors_to_save(trained, optimizer))
    snapshot.copy()
    for file in snapshot.layouts:
        snapshot.write(file, folder / file)
