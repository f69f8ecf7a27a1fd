"""Twenty optimizer steps of ours give the losses of a plain loop over LeRobot's policy, optimizer and schedule."""

import pytest
import torch
from lerobot.policies.pi05 import PI05Policy

from benchmarks.base_models import DIMS, Base, make_base, make_rows
from benchmarks.options import StepBench
from vlatune.batch import ACTION, NOISE, TIME, TOKEN_MASK, TOKENS
from vlatune.config.settings import OptimizerConfig, SchedulerConfig
from vlatune.policies.base import ModuleOptions
from vlatune.policies.model_size import building_at
from vlatune.policies.pi05.model import Pi05Module
from vlatune.policies.pi05.size import read_size
from vlatune.train.worker.optimizer import Updater, learning_rate, make_optimizer, set_learning_rate

STEPS, BATCH = 20, 4
FASTER = {"lr": 1e-3}
"""At PI0.5's own rate twenty steps hardly move the weights, and equal losses would prove little."""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Base:
    return make_base(
        tmp_path_factory.mktemp("twenty") / "base",
        StepBench(width=64, depth=2, vision_depth=1, cameras=2, image_size=28, tokens=48, horizon=8),
    )


@pytest.fixture(scope="module")
def batches(base) -> list[dict[str, torch.Tensor]]:
    made = (base.columns(make_rows(base, BATCH, seed)) for seed in range(STEPS))
    return [{key: torch.from_numpy(values) for key, values in columns.items()} for columns in made]


def our_losses(base: Base, train: str, batches: list[dict[str, torch.Tensor]], micro_steps: int) -> list[float]:
    module = load(base, train)
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = make_optimizer(parameters, OptimizerConfig(**FASTER))
    updater = Updater(module, parameters, optimizer, clip_norm=OptimizerConfig().grad_clip_norm)
    losses = []
    for step, batch in enumerate(batches):
        set_learning_rate(optimizer, learning_rate(step, STEPS, FASTER["lr"], SchedulerConfig()))
        rows = BATCH // micro_steps
        parts = [{key: values[at : at + rows] for key, values in batch.items()} for at in range(0, BATCH, rows)]
        losses.append(updater.update(parts, micro_steps).loss)
    return torch.stack(losses).tolist()


def lerobot_losses(base: Base, train: str, batches: list[dict[str, torch.Tensor]], monkeypatch) -> list[float]:
    policy = lerobot_policy(base, train)
    policy.config.optimizer_lr = FASTER["lr"]
    preset = policy.config.get_optimizer_preset()
    optimizer = preset.build([p for p in policy.parameters() if p.requires_grad])
    scheduler = policy.config.get_scheduler_preset().build(optimizer, STEPS)
    losses = []
    for batch in batches:
        monkeypatch.setattr(policy.model, "sample_noise", lambda shape, device, batch=batch: batch[NOISE][:, 0])
        monkeypatch.setattr(policy.model, "sample_time", lambda size, device, batch=batch: batch[TIME][:, 0])
        loss, _ = policy.forward(as_lerobots(batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), preset.grad_clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def load(base: Base, train: str) -> Pi05Module:
    torch.manual_seed(0)  # adapters begin at random
    return Pi05Module.load(base.spec, base.binding, ModuleOptions(train, "float32")).train()


def lerobot_policy(base: Base, train: str) -> PI05Policy:
    """Load LeRobot's policy with our trainable parameters; adapters are in no file, so ours is used for them."""
    ours, size = load(base, train).policy, read_size(base.folder)
    if train == "lora":
        return ours
    assert size is not None
    with building_at(size):
        policy = PI05Policy.from_pretrained(base.folder).train()
    trained = {name for name, parameter in ours.named_parameters() if parameter.requires_grad}
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(name in trained)
    return policy


def as_lerobots(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    images = {key: batch[key].float() / 255.0 for key in batch if key.startswith("observation.images.")}
    return images | {TOKENS: batch[TOKENS], TOKEN_MASK: batch[TOKEN_MASK], ACTION: batch[ACTION][..., :DIMS]}


@pytest.mark.parametrize(("train", "micro_steps"), [("heads", 1), ("expert", 1), ("lora", 1), ("full", 1), ("full", 2)])
def test_twenty_steps_are_lerobots(base, batches, monkeypatch, train, micro_steps):
    ours = our_losses(base, train, batches, micro_steps)
    theirs = lerobot_losses(base, train, batches, monkeypatch)
    assert ours == pytest.approx(theirs, rel=1e-5)
    # The weights have changed: the untrained model has another loss on the same batch.
    frozen = our_losses(base, train, batches[-1:], micro_steps)
    assert abs(ours[-1] - frozen[0]) > 1e-3 * frozen[0]
