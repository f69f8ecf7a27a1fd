"""ACT against LeRobot's own: loss, gradients, actions; no host sync; made from nothing; what it refuses."""

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
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode

from vlatune.batch import ACTION, ACTION_IS_PAD, NOISE, SLOT, STATE, TASK
from vlatune.bench.step.host_sync import HostSyncSpy
from vlatune.checkpoint.policy_files import make_policy_files
from vlatune.config import DatasetConfig, PolicyConfig, RunConfig
from vlatune.config_checks import validate
from vlatune.dataset.meta.dataset_meta import load_meta
from vlatune.dataset.reader import make_unit, read_unit
from vlatune.flags import parse_flags
from vlatune.pipeline.plan import Share, make_units, plan_steps
from vlatune.pipeline.transforms import apply_all
from vlatune.policies.act import POLICY
from vlatune.policies.act.act_adapter import ActAdapter, new_config, with_defaults
from vlatune.policies.act.act_module import build_policy, read_pretrained
from vlatune.policies.base import Draw, Fit, ModuleOptions
from vlatune.run_setup import load_metas, make_setup
from vlatune.train.driver.tiny_base import fit_datasets, with_base
from vlatune.train.worker.optimizer import make_groups, make_optimizer

LOSS_RTOL, GRADIENT_RTOL, SILENT = 1e-6, 1e-5, 1e-6
OPTIONS = ModuleOptions(train="full")
HORIZON = 5
DEEPER = {"n_encoder_layers": 2, "n_decoder_layers": 2, "n_vae_encoder_layers": 2, "chunk_size": HORIZON}
DEEPER |= {"dim_model": 48, "dim_feedforward": 80, "latent_dim": 6}


@pytest.fixture(scope="module")
def base(dataset_v3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small ACT whose every weight speaks, its frozen batch norms too."""
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
    """The beginning of an episode and its end, where chunks reach past it."""
    last = int(setup.metas[0].episodes.length[1]) - 1
    frames = np.array([0, last - 3, last - 1, last])
    return read_unit(setup.specs[0], make_unit(setup.metas[0], setup.specs[0], 1, frames, frames))


@pytest.fixture(scope="module")
def batch(setup, rows) -> dict[str, torch.Tensor]:
    transforms = setup.adapter.make_transforms(setup.policy, setup.binding, setup.stats, Draw(seed=7))
    found = {key: torch.from_numpy(values) for key, values in apply_all(transforms, rows).items()}
    assert found[ACTION_IS_PAD].any()
    assert not found[ACTION_IS_PAD].all()
    return found


@pytest.fixture(scope="module")
def exported(setup, base, tmp_path_factory) -> Path:
    """The base as an export has it: with the dataset's part in its processors."""
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
    """What LeRobot's dataset hands to its preprocessor, and what that makes of it."""
    raw = {camera: torch.from_numpy(rows[camera]) / 255.0 for camera, _ in setup.binding.cameras}
    raw |= {key: torch.from_numpy(rows[key]) for key in (STATE, ACTION, ACTION_IS_PAD)} | {TASK: list(rows[TASK])}
    return theirs[1](raw)


def gradients(module: torch.nn.Module, loss: torch.Tensor, prefix: str = "") -> dict[str, torch.Tensor]:
    module.zero_grad()
    loss.backward()
    return {name.removeprefix(prefix): p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.fixture
def same_noise(monkeypatch, batch):
    """LeRobot's latent with the sample's own noise in place of the generator's."""
    monkeypatch.setattr(torch, "randn_like", lambda like: batch[NOISE])


def test_loss_and_every_gradient_are_lerobots(setup, rows, batch, theirs, same_noise):
    module, policy = load(setup), theirs[0]
    policy.train()
    assert policy.config.dropout == 0.0
    wanted, parts = policy.forward(their_batch(theirs, setup, rows))
    assert parts["kld_loss"] > 0
    loss = module(batch)
    assert loss.item() == pytest.approx(wanted.item(), rel=LOSS_RTOL)
    reference, ours = gradients(policy, wanted), gradients(module, loss, "policy.")
    assert ours.keys() == reference.keys() == {name for name, _ in policy.named_parameters()}
    whole = torch.stack([one.norm() for one in reference.values()]).norm()
    silent = {name for name, one in reference.items() if one.norm() < SILENT * whole}
    assert silent == {"model.decoder.layers.0.self_attn.in_proj_weight"}  # its input is 0: what is left is rounding
    assert all(ours[name].norm() < SILENT * whole for name in silent)
    for name in reference.keys() - silent:
        error = (ours[name] - reference[name]).norm() / reference[name].norm()
        assert error <= GRADIENT_RTOL, (name, float(error), float(reference[name].norm() / whole))


def test_with_dropout_the_loss_is_of_the_same_kind(setup, batch):
    """Its masks are torch's own: another each time, none in evaluation."""
    module = load(setup)
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.5
    assert module(batch) != module(batch)
    module.eval()
    assert torch.equal(module(batch), module(batch))


def test_evaluation_is_lerobots(setup, rows, batch, theirs):
    """Without the latent: the error of actions alone."""
    module, policy = load(setup, train=False), theirs[0]
    policy.eval()
    with torch.no_grad():
        wanted, parts = policy.forward(their_batch(theirs, setup, rows))
        assert "kld_loss" not in parts
        assert module(batch).item() == pytest.approx(wanted.item(), rel=LOSS_RTOL)


@pytest.mark.parametrize("train", [True, False])
def test_actions_are_lerobots_in_the_robots_units(setup, rows, batch, theirs, train):
    module, (policy, _, after) = load(setup, train), theirs
    observation = {key: value for key, value in their_batch(theirs, setup, rows).items() if not key.startswith(ACTION)}
    wanted = after(policy.predict_action_chunk(observation)).numpy()
    normaliser = next(t for t in setup.eval_transforms(0) if getattr(t, "key", None) == ACTION)
    np.testing.assert_allclose(normaliser.inverse(module.predict(batch).numpy()), wanted, rtol=1e-5, atol=1e-6)
    assert module.training is train


def test_a_step_never_waits_for_the_device(setup, batch):
    module = load(setup)
    with HostSyncSpy(resident=[*module.parameters(), *module.buffers(), *batch.values()]) as spy:
        module(batch).backward()
    assert spy.table() == []
    with HostSyncSpy(resident=[*module.parameters(), *module.buffers(), *batch.values()]) as spy:
        module.predict(batch)
    assert spy.table() == []


def test_lerobots_step_does(setup, rows, theirs):
    """So that the test above is known to see."""
    policy, given = theirs[0].train(), their_batch(theirs, setup, rows)
    resident = [*policy.parameters(), *policy.buffers(), *(one for one in given.values() if torch.is_tensor(one))]
    with HostSyncSpy(resident=resident) as spy:
        policy.forward(given)[0].backward()
    assert spy.count >= 2


def test_no_value_decides_what_is_computed(setup, batch):
    module = load(setup).to("meta")
    module({key: value.to("meta") for key, value in batch.items()}).backward()


def test_a_step_costs_about_what_the_adapter_says(setup, batch):
    module = load(setup)
    with FlopCounterMode(display=False) as counter:
        module(batch).backward()
    counted = counter.get_total_flops() / len(batch[STATE])
    assert 0.5 < setup.adapter.step_flops(setup.policy, setup.binding, OPTIONS) / counted < 2


def test_nothing_but_parameters_changes_in_training(setup, batch):
    """The batch norms are frozen, so that workers need not send buffers round."""
    module = load(setup)
    before = {name: value.clone() for name, value in module.named_buffers()}
    assert any("running_mean" in name for name in before)
    module(batch).backward()
    assert all(torch.equal(value, before[name]) for name, value in module.named_buffers())


def test_noise_is_the_samples_own(setup, rows):
    """Pure in (seed, place in the order) in training, and in (seed, frame) in evaluation."""
    draw = setup.adapter.make_transforms(setup.policy, setup.binding, setup.stats, Draw(seed=7))
    first = apply_all(draw, rows)[NOISE]
    moved = rows | {SLOT: rows[SLOT][::-1].copy()}
    assert np.array_equal(apply_all(draw, moved)[NOISE], first[::-1])
    by_frame = setup.eval_transforms(0)
    assert np.array_equal(apply_all(by_frame, moved)[NOISE], apply_all(by_frame, rows)[NOISE])
    assert abs(first.mean()) < 0.5


def rows_of(config: RunConfig, steps: int) -> dict[str, np.ndarray]:
    """All that `steps` optimizer steps get, by place in the run's order, whichever worker reads it."""
    plan = make_setup(config).data_plan
    parts = []
    for rank in range(config.num_workers):
        share = Share(rank, config.num_workers)
        units = make_units(plan, share, plan_steps(plan.order, share, 0, steps))
        parts += [apply_all(plan.transforms, read_unit(plan.specs[0], unit)) for unit in units]
    joined = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    by_place = np.argsort(joined[SLOT], kind="stable")
    return {key: values[by_place] for key, values in joined.items()}


def test_one_and_two_workers_get_the_same_samples(dataset_v3, base):
    config = replace(config_of(dataset_v3, base), batch_size=8, seed=11)
    alone, shared = rows_of(config, 3), rows_of(replace(config, batch_size=4, num_workers=2), 3)
    assert len(alone[SLOT]) == 24
    assert alone.keys() == shared.keys()
    assert all(np.array_equal(alone[key], shared[key]) for key in alone)


def test_the_real_one_has_as_many_parameters_as_lerobots():
    fit = Fit(("observation.images.top", "observation.images.wrist"), 6, 6, 8, 48, (), 0, ((480, 640), (480, 640)))
    with_none = replace(fit, overrides={"pretrained_backbone_weights": None})
    config = new_config(with_none, small=False)
    policy = build_policy(config)
    assert {parameter.device.type for parameter in policy.parameters()} == {"meta"}
    assert sum(parameter.numel() for parameter in policy.parameters()) == 51_597_190
    from lerobot.policies.act import ACTConfig

    defaults = ACTConfig(device="cpu")
    for name in POLICY.overrides:
        ours = config[name]
        assert ours == (None if name == "pretrained_backbone_weights" else getattr(defaults, name)), name
        assert POLICY.overrides[name].default == getattr(defaults, name), name
    assert config["normalization_mapping"] == {
        name: mode.value for name, mode in defaults.normalization_mapping.items()
    }


def test_the_recipe_has_lerobots_presets_and_the_type_brings_it():
    from lerobot.policies.act import ACTConfig

    preset, config = ACTConfig(device="cpu").get_optimizer_preset(), parse_flags(["--recipe=act"], RunConfig)
    ours = config.optimizer
    assert (ours.lr, ours.betas, ours.eps) == (preset.lr, preset.betas, preset.eps)
    assert (ours.weight_decay, ours.grad_clip_norm) == (preset.weight_decay, preset.grad_clip_norm)
    assert ACTConfig(device="cpu").get_scheduler_preset() is None
    assert config.scheduler.type == "none"
    by_type = parse_flags(["--policy.type=act", "--dataset.root=data"], RunConfig)
    assert replace(by_type, recipe="act", dataset=config.dataset) == config
    validate(by_type)


def test_the_backbone_has_a_rate_of_its_own(dataset_v3, base):
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


def test_a_run_makes_its_own_with_the_flags_in_place(dataset_v3, tmp_path):
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


def test_a_new_backbone_is_pretrained_if_the_hubs_cache_has_it_and_nothing_is_fetched_unasked(tmp_path, monkeypatch):
    """Without a network; the cache of the tests is empty."""
    usual = "ResNet18_Weights.IMAGENET1K_V1"
    with pytest.raises(
        ValueError, match=rf"the hub's cache does not have timm/resnet18.tv_in1k; give .*={usual} to fetch it"
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
    with pytest.raises(ValueError, match="these are weights of resnet50, and vision_backbone is resnet18"):
        new_config(replace(fit, overrides=wrong), small=False)


def test_cameras_of_different_sizes_are_refused():
    fit = Fit(("observation.images.top", "observation.images.wrist"), 3, 3, 8, 48, (), 0, ((64, 64), (64, 96)))
    with pytest.raises(ValueError, match=r"all of one size; these cameras differ: .*top 64 x 64, .*wrist 64 x 96"):
        new_config(fit, small=True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vision_backbone": "get_model"}, "vision_backbone is 'get_model', expected one of resnet18"),
        (
            {"chunk_size": 7},
            r"the weights do not fit config.json: 'model.decoder_pos_embed.weight' has shape \(5, 48\)",
        ),
        ({"n_encoder_layers": 1}, r"'model.encoder.layers.1.linear1.weight' has shape \(80, 48\), expected None"),
        ({"use_vae": False}, "'model.vae_encoder.layers.0.linear1.weight' has shape"),
        ({"n_heads": 5}, "dim_model is 48, which must be a multiple of n_heads=5"),
        ({"n_action_steps": 9}, "n_action_steps is 9, and a chunk has 5"),
        ({"n_obs_steps": 2}, "n_obs_steps is 2: must be 1"),
        ({"replace_final_stride_with_dilation": True}, "resnet18 cannot replace its final stride"),
        ({"temporal_ensemble_coeff": 0.01}, "give --policy.n_action_steps=1, it is 5"),
        ({"dim_model": 10**9}, "dim_model is 1000000000, expected a number: a whole one"),
        ({"input_features": {}}, "there must be 'observation.state' and a camera"),
        ({"output_features": {"torque": {"type": "ACTION", "shape": [3]}}}, "output_features must be 'action' alone"),
    ],
)
def test_a_folder_that_cannot_be_loaded_is_refused_at_once(base, tmp_path, changes, says):
    folder = tmp_path / "base"
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=says):
        ActAdapter().read_spec(folder)


def test_data_that_it_was_not_made_for_is_refused(dataset_v3, base, tmp_path):
    """It neither resizes nor pads nor masks."""
    spec = make_setup(config_of(dataset_v3, base)).policy
    from vlatune.policies.binding import bind

    meta = load_meta(str(dataset_v3))
    for change, says in (
        ({"image_hw": (48, 64)}, "is recorded at 96 x 96, the policy .* takes pictures of 48 x 64 as they are"),
        ({"max_state_dim": 4}, "'observation.state' has 3 dims, the policy was made for 4"),
        ({"cameras": (*spec.cameras, "observation.images.side")}, "it has no camera 'observation.images.side'"),
    ):
        with pytest.raises(ValueError, match=says):
            bind(replace(spec, **change), meta, {})


def test_a_folder_of_lerobots_is_a_base(dataset_v3, exported, tmp_path):
    """As `save_pretrained` of LeRobot writes it, with the name of weights that it would fetch."""
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
    assert with_defaults({})["optimizer_lr_backbone"] == setup.policy.lr_backbone


def test_pictures_are_scaled_by_imagenets_numbers_or_the_datasets(dataset_v3, base):
    config = config_of(dataset_v3, base)
    imagenet, own = (
        make_setup(replace(config, dataset=replace(config.dataset, use_imagenet_stats=choice)))
        for choice in (True, False)
    )
    camera = imagenet.policy.cameras[0]
    assert imagenet.stats[camera]["mean"].ravel().tolist() == pytest.approx([0.485, 0.456, 0.406])
    assert not np.allclose(imagenet.stats[camera]["mean"], own.stats[camera]["mean"])
    assert load(own).picture_low_V311.shape == (2, 3, 1, 1)
