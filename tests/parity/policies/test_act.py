"""ACT equals LeRobot's: loss, gradients, actions; no host syncs; new models; rejected folders and data."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from parity.policies.flow_parity import GRADIENT_RTOL, LOSS_RTOL, SILENT, distance, gradients
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.step.host_sync import HostSyncSpy
from vlatune.batch import ACTION, ACTION_IS_PAD, NOISE, STATE, TASK
from vlatune.config.flags import parse_flags
from vlatune.config.settings import DatasetConfig, PolicyConfig, RunConfig
from vlatune.config.validate import validate
from vlatune.data.meta.dataset_meta import load_meta
from vlatune.data.reader import make_unit, read_unit
from vlatune.data.transforms import apply_all
from vlatune.export.policy_files import make_policy_files
from vlatune.policies.act import POLICY
from vlatune.policies.act.act_adapter import ActAdapter, new_config
from vlatune.policies.act.act_module import build_policy, read_pretrained
from vlatune.policies.base import Fit, ModuleOptions, NoiseSpec
from vlatune.run_setup import load_metas, make_setup
from vlatune.train.driver.tiny_base import fit_datasets, with_base
from vlatune.train.worker.optimizer import make_groups, make_optimizer

OPTIONS = ModuleOptions(train="full")
HORIZON = 5
DEEPER = {"n_encoder_layers": 2, "n_decoder_layers": 2, "n_vae_encoder_layers": 2, "chunk_size": HORIZON}
DEEPER |= {"dim_model": 48, "dim_feedforward": 80, "latent_dim": 6}


@pytest.fixture(scope="module")
def base(dataset_v3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small ACT in which every weight has an effect, also the frozen batch norms."""
    fit = fit_datasets((load_meta(str(dataset_v3)),), seed=3, max_dims=100)
    folder = tmp_path_factory.mktemp("act") / "base"
    ActAdapter().make_base(folder, replace(fit, overrides=DEEPER), small=True, place=folder)
    weights, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    for name, value in weights.items():
        if "pos_enc" not in name and value.ndim == 1:
            noise = torch.empty_like(value).normal_(0.0, 0.05, generator=generator)
            value.add_(noise.abs() if name.endswith("running_var") else noise)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def config_of(dataset: Path, base: Path, **policy: Any) -> RunConfig:
    given = PolicyConfig(path=str(base), type="act", train="full", **policy)
    return RunConfig(dataset=DatasetConfig(root=(str(dataset),)), policy=given)


@pytest.fixture(scope="module")
def setup(dataset_v3, base):
    return make_setup(config_of(dataset_v3, base))


@pytest.fixture(scope="module")
def rows(setup):
    """The start of an episode and its end, where chunks reach past it."""
    last = int(setup.metas[0].episodes.length[1]) - 1
    frames = np.array([0, last - 3, last - 1, last])
    return read_unit(setup.specs[0], make_unit(setup.metas[0], setup.specs[0], 1, frames, frames))


@pytest.fixture(scope="module")
def batch(setup, rows) -> dict[str, torch.Tensor]:
    transforms = setup.adapter.make_transforms(setup.policy, setup.binding, setup.stats, NoiseSpec(seed=7))
    found = {key: torch.from_numpy(values) for key, values in apply_all(transforms, rows).items()}
    assert found[ACTION_IS_PAD].any()
    assert not found[ACTION_IS_PAD].all()
    return found


@pytest.fixture(scope="module")
def exported(setup, base, tmp_path_factory) -> Path:
    """Return the base as an export, with the dataset's statistics in its processors."""
    folder = tmp_path_factory.mktemp("act") / "exported"
    shutil.copytree(base, folder)
    files = make_policy_files(setup.policy, setup.binding, setup.stats, dtype=None)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def theirs(exported) -> tuple[Any, Any, Any]:
    """LeRobot's policy and processors, as its own programs load them."""
    policy = get_policy_class("act").from_pretrained(exported)
    return policy, *make_pre_post_processors(policy.config, str(exported))


def load(setup, train: bool = True):
    module = setup.adapter.load_module(setup.policy, setup.binding, OPTIONS, stats=setup.stats)
    return module.train(train)


def their_batch(theirs, setup, rows) -> dict[str, Any]:
    """Return the rows after LeRobot's preprocessor."""
    raw = {camera: torch.from_numpy(rows[camera]) / 255.0 for camera, _ in setup.binding.cameras}
    raw |= {key: torch.from_numpy(rows[key]) for key in (STATE, ACTION, ACTION_IS_PAD)} | {TASK: list(rows[TASK])}
    return theirs[1](raw)


@pytest.fixture
def same_noise(monkeypatch, batch):
    """Replace the random noise of LeRobot's latent by the sample's."""
    monkeypatch.setattr(torch, "randn_like", lambda like: batch[NOISE])


def test_loss_and_every_gradient_are_lerobots(setup, rows, batch, theirs, same_noise):
    module, policy = load(setup), theirs[0]
    policy.train()
    assert policy.config.dropout == 0.0
    wanted, parts = policy.forward(their_batch(theirs, setup, rows))
    assert parts["kld_loss"] > 0
    loss = module(batch).loss
    assert loss.item() == pytest.approx(wanted.item(), rel=LOSS_RTOL)
    reference, ours = gradients(policy, wanted), gradients(module.policy, loss)
    assert ours.keys() == reference.keys() == {name for name, _ in policy.named_parameters()}
    whole = torch.stack([one.norm() for one in reference.values()]).norm()
    silent = {name for name, one in reference.items() if one.norm() < SILENT * whole}
    assert silent == {"model.decoder.layers.0.self_attn.in_proj_weight"}  # its input is 0: what is left is rounding
    assert all(ours[name].norm() < SILENT * whole for name in silent)
    for name in reference.keys() - silent:
        assert distance(ours[name], reference[name]) <= GRADIENT_RTOL, name


def test_evaluation_is_lerobots(setup, rows, batch, theirs):
    """The loss is the error of actions alone, without the latent."""
    module, policy = load(setup, train=False), theirs[0]
    policy.eval()
    with torch.no_grad():
        wanted, parts = policy.forward(their_batch(theirs, setup, rows))
        assert "kld_loss" not in parts
        assert module(batch).loss.item() == pytest.approx(wanted.item(), rel=LOSS_RTOL)


@pytest.mark.parametrize("train", [True, False])
def test_unnormalised_actions_equal_lerobots(setup, rows, batch, theirs, train):
    module, (policy, _, after) = load(setup, train), theirs
    observation = {key: value for key, value in their_batch(theirs, setup, rows).items() if not key.startswith(ACTION)}
    wanted = after(policy.predict_action_chunk(observation)).numpy()
    normaliser = next(t for t in setup.eval_transforms(0) if getattr(t, "key", None) == ACTION)
    np.testing.assert_allclose(normaliser.inverse(module.predict(batch).numpy()), wanted, rtol=1e-5, atol=1e-6)
    assert module.training is train


def test_a_step_has_no_host_sync(setup, batch):
    module = load(setup)
    with HostSyncSpy(resident=[*module.parameters(), *module.buffers(), *batch.values()]) as spy:
        module(batch).loss.backward()
    assert spy.table() == []
    with HostSyncSpy(resident=[*module.parameters(), *module.buffers(), *batch.values()]) as spy:
        module.predict(batch)
    assert spy.table() == []


def test_step_flops_are_about_right(setup, batch):
    module = load(setup)
    with FlopCounterMode(display=False) as counter:
        module(batch).loss.backward()
    counted = counter.get_total_flops() / len(batch[STATE])
    assert 0.5 < setup.adapter.step_flops(setup.policy, setup.binding, OPTIONS) / counted < 2


def test_the_full_size_model_has_lerobots_parameters():
    fit = Fit(("observation.images.top", "observation.images.wrist"), 6, 6, 8, 48, (), 0, ((480, 640), (480, 640)))
    with_none = replace(fit, overrides={"pretrained_backbone_weights": None})
    config = new_config(with_none, small=False)
    policy = build_policy(config)
    assert {parameter.device.type for parameter in policy.parameters()} == {"meta"}
    assert sum(parameter.numel() for parameter in policy.parameters()) == 51_597_190
    from lerobot.policies.act import ACTConfig

    defaults = ACTConfig(device="cpu")
    for name in POLICY.option_defaults:
        ours = config[name]
        assert ours == (None if name == "pretrained_backbone_weights" else getattr(defaults, name)), name
        assert POLICY.option_defaults[name] == getattr(defaults, name), name
    assert config["normalization_mapping"] == {
        name: mode.value for name, mode in defaults.normalization_mapping.items()
    }


def test_the_policy_type_selects_the_recipe():
    config = parse_flags(["--recipe=act"], RunConfig)
    by_type = parse_flags(["--policy.type=act", "--dataset.root=data"], RunConfig)
    assert replace(by_type, recipe="act", dataset=config.dataset) == config
    validate(by_type)


def test_the_backbone_has_its_own_learning_rate(dataset_v3, base):
    config = config_of(dataset_v3, base, overrides={"optimizer_lr_backbone": 2e-6})
    setup = make_setup(config)
    module = load(setup)
    named = dict(module.named_parameters())
    factors = setup.adapter.rate_factors(setup.policy, 1e-5)
    groups = make_optimizer(make_groups(named, 1e-5, factors), config.optimizer).param_groups
    backbone = {id(parameter) for name, parameter in named.items() if ".backbone." in name}
    assert [group["lr"] for group in groups] == pytest.approx([1e-5, 2e-6])
    assert {id(parameter) for parameter in groups[1]["params"]} == backbone
    assert sum(len(group["params"]) for group in groups) == len(named)


def test_a_run_creates_a_base_model_with_the_given_options(dataset_v3, tmp_path):
    flags = [f"--dataset.root={dataset_v3}", f"--output_dir={tmp_path / 'run'}", "--recipe=act-tiny"]
    flags += ["--policy.chunk_size=6", "--policy.dim_model=32", "--policy.use_vae=false", "--policy.kl_weight=1"]
    config = parse_flags(flags, RunConfig)
    validate(config)
    config = with_base(config, load_metas(config), say=lambda _: None)
    setup = make_setup(config)
    stored = json.loads((Path(config.policy.path or "") / "config.json").read_text())
    assert (stored["chunk_size"], stored["n_action_steps"], stored["dim_model"]) == (6, 6, 32)
    assert stored["pretrained_backbone_weights"] is None
    assert (setup.policy.horizon, setup.policy.image_hw, setup.policy.latent_dim) == (6, (96, 96), 0)
    assert NOISE not in {key for t in setup.training_transforms() for key in getattr(t, "keys", ())}
    assert load(setup).has_latent is False
    again = with_base(replace(config, policy=replace(config.policy, path=None)), load_metas(config), say=pytest.fail)
    assert again == config


def test_a_new_backbone_is_pretrained_and_only_downloaded_on_request(tmp_path, monkeypatch):
    """There is no network, and the cache of the tests is empty."""
    usual = "ResNet18_Weights.IMAGENET1K_V1"
    with pytest.raises(
        ValueError, match=rf"timm/resnet18.tv_in1k is not in the hub's cache; download it with .*={usual}"
    ):
        read_pretrained(usual, fetch=False)
    with pytest.raises(ValueError, match=rf"={usual}: hub repository 'timm/.*' cannot be fetched: .*=null"):
        read_pretrained(usual, fetch=True)
    import torchvision

    stored = torchvision.models.resnet18(weights=None).state_dict()
    save_file(stored, tmp_path / "model.safetensors")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(tmp_path / "model.safetensors"))
    sizes = {"dim_model": 32, "dim_feedforward": 32, "n_encoder_layers": 1, "n_vae_encoder_layers": 1}
    fit = Fit(("observation.images.top",), 3, 3, 8, 48, (), 0, ((64, 64),), overrides=sizes)
    ActAdapter().make_base(tmp_path / "base", fit, small=False, place=tmp_path / "base")
    made = load_file(tmp_path / "base/model.safetensors")
    for name, value in stored.items():
        if not name.startswith("fc.") and not name.endswith("num_batches_tracked"):
            assert torch.equal(made[f"model.backbone.{name}"], value), name
    assert json.loads((tmp_path / "base/config.json").read_text())["pretrained_backbone_weights"] is None
    wrong = {"pretrained_backbone_weights": "ResNet50_Weights.IMAGENET1K_V2"}
    with pytest.raises(ValueError, match="are weights of resnet50, but vision_backbone is resnet18"):
        new_config(replace(fit, overrides=wrong), small=False)


def test_cameras_of_different_sizes_are_rejected():
    fit = Fit(("observation.images.top", "observation.images.wrist"), 3, 3, 8, 48, (), 0, ((64, 64), (64, 96)))
    with pytest.raises(ValueError, match=r"one image size, but these differ: .*top 64 x 64, .*wrist 64 x 96"):
        new_config(fit, small=True)


def changed(base: Path, folder: Path, changes: dict[str, Any]) -> Path:
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_backbone": "get_model"}, "vision_backbone is get_model, expected resnet18"),
        ({"n_heads": 5}, "dim_model is 48, must be a multiple of n_heads=5"),
        ({"n_action_steps": 9}, "n_action_steps is 9, but a chunk has 5"),
        ({"n_obs_steps": 2}, "n_obs_steps is 2, expected 1"),
        ({"replace_final_stride_with_dilation": True}, "resnet18 cannot replace its final stride"),
        ({"temporal_ensemble_coeff": 0.01}, "needs n_action_steps=1, not 5"),
        ({"dim_model": 10**9}, "dim_model is 1000000000, expected a whole number"),
        ({"input_features": {}}, "expected cameras, 'observation.state' and 'action'"),
        ({"output_features": {"torque": {"type": "ACTION", "shape": [3]}}}, "torque, expected cameras"),
    ],
)
def test_a_folder_that_cannot_be_loaded_is_rejected(base, tmp_path, changes, message):
    folder = changed(base, tmp_path / "base", changes)
    with pytest.raises(ValueError, match=message):
        ActAdapter().read_spec(folder)


@pytest.mark.parametrize("changes", [{"chunk_size": 7}, {"n_encoder_layers": 1}, {"use_vae": False}], ids=str)
def test_a_config_that_does_not_match_the_weights_is_rejected_by_loading(base, setup, tmp_path, changes):
    folder = changed(base, tmp_path / "base", changes)
    with pytest.raises(ValueError, match="the weights do not match the model"):
        ActAdapter().load_module(ActAdapter().read_spec(folder), setup.binding, OPTIONS)


def test_a_folder_saved_by_lerobot_is_a_base_model(dataset_v3, exported, tmp_path):
    """LeRobot's `save_pretrained` stores the name of weights that LeRobot would download."""
    policy = ACTPolicy.from_pretrained(exported)
    policy.config.pretrained_backbone_weights = "ResNet18_Weights.IMAGENET1K_V1"
    folder = tmp_path / "theirs"
    policy.save_pretrained(folder)
    for pipeline in make_pre_post_processors(policy.config, dataset_stats={}):
        pipeline.save_pretrained(folder)
    setup = make_setup(config_of(dataset_v3, folder))
    assert {name: p.shape for name, p in load(setup).policy.named_parameters()} == {
        name: p.shape for name, p in policy.named_parameters()
    }
    stored = json.loads(make_policy_files(setup.policy, setup.binding, setup.stats, dtype=None)["config.json"])
    assert stored["pretrained_backbone_weights"] is None
    assert POLICY.option_defaults["optimizer_lr_backbone"] == setup.policy.lr_backbone


def test_images_are_normalised_with_imagenets_or_the_datasets_statistics(dataset_v3, base):
    config = config_of(dataset_v3, base)
    imagenet, own = (
        make_setup(replace(config, dataset=replace(config.dataset, use_imagenet_stats=choice)))
        for choice in (True, False)
    )
    camera = imagenet.policy.cameras[0]
    assert imagenet.stats[camera]["mean"].ravel().tolist() == pytest.approx([0.485, 0.456, 0.406])
    assert not np.allclose(imagenet.stats[camera]["mean"], own.stats[camera]["mean"])
    assert load(own).image_mean_V311.shape == (2, 3, 1, 1)
