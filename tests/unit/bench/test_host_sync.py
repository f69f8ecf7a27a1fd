"""The spy sees what would make the host wait for an accelerator, and nothing else; ours never waits, LeRobot does."""

import numpy as np
import pytest
import torch

from benchmarks.base_models import Base, make_base, make_rows
from benchmarks.options import StepBench
from benchmarks.step.host_sync import HostSyncSpy
from vlatune.policies.base import ModuleOptions
from vlatune.policies.pi05.model import Pi05Module

RESIDENT = torch.arange(4.0)
HOST = torch.arange(4.0)
MASK = RESIDENT > 1

SYNCS = {
    "item": lambda: RESIDENT[0].item(),
    "tolist": lambda: RESIDENT.tolist(),
    "numpy": lambda: RESIDENT.numpy(),
    "cpu": lambda: RESIDENT.cpu(),
    "__array__": lambda: np.asarray(RESIDENT),
    "__bool__": lambda: bool(RESIDENT.sum() > 0),
    "__float__": lambda: float(RESIDENT.sum()),
    "__int__": lambda: int(RESIDENT[1]),
    "__index__": lambda: "abcd"[RESIDENT.long()[1]],
    "__format__": lambda: f"{RESIDENT.sum():.3f}",
    "equal": lambda: torch.equal(RESIDENT, RESIDENT),
    "to": lambda: HOST.to("cpu"),
    "tensor": lambda: torch.tensor([1.0], device=RESIDENT.device),
    "new_tensor": lambda: RESIDENT.new_tensor([1.0]),
    "copy_": lambda: RESIDENT.clone().copy_(HOST),
    "nonzero": lambda: torch.where(RESIDENT > 1),
    "masked_select": lambda: RESIDENT.masked_select(MASK),
    "index with a mask": lambda: RESIDENT[MASK],
    "_unique2": lambda: RESIDENT.unique(),
    "repeat_interleave": lambda: RESIDENT.repeat_interleave(MASK.long()),
}
NO_SYNCS = {
    "values of the host": lambda: (HOST[0].item(), HOST.tolist(), bool((HOST > 0).any()), HOST[HOST > 1]),
    "made on the host": lambda: torch.tensor([1.0, 2.0]).numpy(),
    "made on the device": lambda: torch.zeros(3, device=RESIDENT.device) + torch.full_like(RESIDENT[:3], 2.0),
    "another dtype": lambda: RESIDENT.to(torch.float64).double(),
    "to where it is": lambda: RESIDENT.to("cpu"),
    "a copy that does not block": lambda: HOST.to("cpu", non_blocking=True),
    "after the transfer": lambda: RESIDENT.to("cpu", non_blocking=True) * 2,
    "shapes": lambda: (len(RESIDENT), RESIDENT.shape, RESIDENT.numel(), RESIDENT.dim()),
    "a masked fill": lambda: RESIDENT.clone().__setitem__(MASK, 0.0),
}


@pytest.mark.parametrize("what", SYNCS)
def test_a_sync_is_seen_once_with_its_place(what):
    with HostSyncSpy([RESIDENT, MASK]) as spy:
        SYNCS[what]()
    assert [sync.what for sync in spy.found] == [what]
    assert spy.found[0].place.startswith("bench/test_host_sync.py:")


@pytest.mark.parametrize("what", NO_SYNCS)
def test_operations_without_a_sync_are_not_counted(what):
    with HostSyncSpy([RESIDENT, MASK]) as spy:
        NO_SYNCS[what]()
    assert spy.found == []


def test_results_of_resident_tensors_are_resident():
    with HostSyncSpy([RESIDENT]) as spy:
        ((RESIDENT * HOST).sum() + 1).item()
        RESIDENT.cpu().numpy().tolist()  # one transfer: what came over is on the host
    assert [sync.what for sync in spy.found] == ["item", "cpu"]


def test_syncs_inside_the_backward_pass_are_seen():
    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * grad.tolist()[0]

    weight = torch.ones(3, requires_grad=True)
    with HostSyncSpy([weight]) as spy:
        Looks.apply(weight).sum().backward()
    assert [sync.what for sync in spy.found] == ["tolist"]


def test_tensors_are_restored_after_the_spy():
    before = {name: getattr(torch.Tensor, name) for name in dir(torch.Tensor)}
    with HostSyncSpy([RESIDENT]) as spy:
        pass
    RESIDENT.sum().item()
    assert spy.count == 0
    assert {name: getattr(torch.Tensor, name) for name in dir(torch.Tensor)} == before


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Base:
    return make_base(
        tmp_path_factory.mktemp("step") / "base",
        StepBench(width=64, depth=2, vision_depth=1, cameras=2, image_size=28, tokens=48, horizon=8),
    )


def test_lerobots_step_has_at_least_five_host_syncs(base):
    from benchmarks.step.step_ways import LeRobotWay, make_accelerator

    module = Pi05Module.load(base.spec, base.binding, ModuleOptions("expert", "float32")).train()
    lerobot = LeRobotWay(module.policy, base, make_rows(base, 2, seed=0), make_accelerator(torch.device("cpu")))
    with HostSyncSpy(lerobot.resident()) as spy:
        lerobot.step()
    assert spy.count >= 5
    places = " ".join(sync.place for sync in spy.found)
    assert "processor_pi05.py" in places  # the state is pulled to the host
    assert "modeling_pi05.py" in places  # masks from lists, losses to the host
