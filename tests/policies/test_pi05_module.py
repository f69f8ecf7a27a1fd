"""Our PI0.5 is LeRobot's: same weights, same loss, same gradients, same actions."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from lerobot.policies.pi05 import PI05Policy
from safetensors.torch import load_file, save_file

from vlatune.batch import ACTION, NOISE, TIME, TOKEN_MASK, TOKENS
from vlatune.config import DatasetConfig, PolicyConfig, RunConfig
from vlatune.dataset.reader import make_unit, read_unit
from vlatune.pipeline.transforms import apply_all
from vlatune.policies.pi05_module import load_weights
from vlatune.policies.pi05_size import building_at, read_size
from vlatune.train.setup import make_setup


@pytest.fixture(scope="module")
def setup(dataset_v3, small_base):
    config = RunConfig(dataset=DatasetConfig(root=(str(dataset_v3),)), policy=PolicyConfig(path=str(small_base)))
    return make_setup(config)


@pytest.fixture(scope="module")
def batch(setup) -> dict[str, torch.Tensor]:
    frames = np.arange(4)
    rows = read_unit(setup.specs[0], make_unit(setup.metas[0], setup.specs[0], 1, frames, frames))
    return {key: torch.from_numpy(values) for key, values in apply_all(setup.transforms(0), rows).items()}


@pytest.fixture(scope="module")
def lerobot_policy(small_base) -> PI05Policy:
    size = read_size(Path(small_base))
    assert size is not None
    with building_at(size):
        policy = PI05Policy.from_pretrained(small_base)
    policy.train()
    return policy


def lerobot_loss(policy: PI05Policy, batch: dict[str, torch.Tensor], monkeypatch) -> torch.Tensor:
    """LeRobot's own training forward on the same draws: floats in [0, 1], actions cut to the dataset's dims."""
    monkeypatch.setattr(policy.model, "sample_noise", lambda shape, device: batch[NOISE][:, 0])
    monkeypatch.setattr(policy.model, "sample_time", lambda size, device: batch[TIME][:, 0])
    dims = policy.config.output_features[ACTION].shape[0]
    theirs = {key: batch[key].float() / 255.0 for key in batch if key.startswith("observation.images.")}
    theirs |= {TOKENS: batch[TOKENS], TOKEN_MASK: batch[TOKEN_MASK], ACTION: batch[ACTION][..., :dims]}
    loss, _ = policy.forward(theirs)
    return loss


@pytest.mark.parametrize("train", ["heads", "expert", "full"])
def test_loss_and_gradients_equal_lerobots(setup, batch, lerobot_policy, monkeypatch, train):
    module = setup.adapter.load_module(setup.policy, setup.binding, train=train, dtype="float32")
    module.train()
    ours = module(batch)
    ours.backward()
    lerobot_policy.zero_grad()
    theirs = lerobot_loss(lerobot_policy, batch, monkeypatch)
    theirs.backward()
    assert torch.allclose(ours, theirs, rtol=1e-6)
    reference = dict(lerobot_policy.named_parameters())
    trained = [name for name, p in module.policy.named_parameters() if p.requires_grad]
    assert trained
    for name in trained:
        assert torch.allclose(module.policy.get_parameter(name).grad, reference[name].grad, rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize("train", ["heads", "expert", "full"])
def test_every_trained_parameter_gets_a_gradient(setup, batch, train):
    """Otherwise DDP would hang or need to search for unused parameters."""
    module = setup.adapter.load_module(setup.policy, setup.binding, train=train, dtype="float32")
    module(batch).backward()
    assert [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None] == []


def test_only_unused_parameters_are_frozen_in_full(setup, batch, lerobot_policy, monkeypatch):
    module = setup.adapter.load_module(setup.policy, setup.binding, train="full", dtype="float32")
    lerobot_policy.zero_grad()
    lerobot_loss(lerobot_policy, batch, monkeypatch).backward()
    used = {name for name, p in lerobot_policy.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    frozen = {name for name, p in module.policy.named_parameters() if not p.requires_grad}
    assert not used & frozen


def test_actions_equal_lerobots(setup, batch, lerobot_policy):
    module = setup.adapter.load_module(setup.policy, setup.binding, train="heads", dtype="float32")
    module.eval()
    noise = torch.randn(batch[ACTION].shape, generator=torch.Generator().manual_seed(1))
    ours = module.predict(batch, noise)
    theirs = {key: batch[key].float() / 255.0 for key in batch if key.startswith("observation.images.")}
    theirs |= {TOKENS: batch[TOKENS], TOKEN_MASK: batch[TOKEN_MASK]}
    assert torch.equal(ours, lerobot_policy.predict_action_chunk(theirs, noise=noise))


def test_pictures_reach_the_model_between_minus_one_and_one(setup, batch):
    module = setup.adapter.load_module(setup.policy, setup.binding, train="heads", dtype="float32")
    images, masks = module._images(batch)
    assert len(images) == len(masks) == len(setup.policy.cameras)
    for image in images:
        assert image.min() >= -1.0
        assert image.max() <= 1.0
        assert image.max() - image.min() > 0.5  # a picture, not a constant


def test_a_camera_without_data_is_masked(setup, batch):
    from dataclasses import replace

    first, second = setup.binding.cameras
    binding = replace(setup.binding, cameras=(first,), missing_cameras=(second[1],))
    module = setup.adapter.load_module(setup.policy, binding, train="heads", dtype="float32")
    images, masks = module._images(batch)
    assert masks[0].all()
    assert not masks[1].any()
    assert (images[1] == -1.0).all()


@pytest.mark.parametrize("damage", ["missing", "unexpected", "shape", "truncated", "no file"])
def test_weights_that_do_not_fit_are_refused(small_base, lerobot_policy, tmp_path, damage):
    folder = tmp_path / "base"
    shutil.copytree(small_base, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.action_in_proj.weight"
    match damage:
        case "missing":
            del tensors[name]
        case "unexpected":
            tensors["model.something_else.weight"] = torch.zeros(1)
        case "shape":
            tensors[name] = tensors[name][:1].contiguous()
    save_file(tensors, file)
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:1000])
    if damage == "no file":
        file.unlink()
    says = {
        "missing": r"1 missing \['model.action_in_proj.weight'\]",
        "unexpected": r"1 unexpected \['model.something_else.weight'\]",
        "shape": "size mismatch for model.action_in_proj.weight",
        "truncated": "is damaged",
        "no file": "is missing",
    }[damage]
    with pytest.raises(ValueError, match=says):
        load_weights(lerobot_policy, folder)
