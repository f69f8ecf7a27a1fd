"""PI0's folder and samples are LeRobot's: its fields, tensors, processors; a run of it goes on and is exported."""

import json
import shutil
from dataclasses import fields
from pathlib import Path

import draccus
import numpy as np
import pytest
import torch
from exported import check_actions
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.pi0 import PI0Config, modeling_pi0
from pi05_parity import SIZE
from repository_files import ROOT
from small_run import running, small_config
from tensor_bytes import bytes_of

from vlatune.batch import ACTION, STATE, TASK, TOKEN_MASK, TOKENS
from vlatune.config import OptimizerConfig, PolicyConfig, RunConfig
from vlatune.dataset.reader import make_unit, read_unit
from vlatune.flags import parse_flags
from vlatune.pipeline.transforms import apply_all
from vlatune.policies.pi0.pi0_adapter import SCHEMA, Pi0Adapter
from vlatune.policies.pi05.adapter import Pi05Adapter
from vlatune.policies.pi05.load import plan_policy
from vlatune.policies.pi05.size import Pi05Size, building_at
from vlatune.policies.pi05.trainable import set_trainable
from vlatune.policies.pi05.weights import PI0, model_names, shapes_at
from vlatune.policies.processors import COMMON_CONFIG

# What its files hold


def test_the_fields_of_a_config_and_their_defaults_are_lerobots():
    assert {*COMMON_CONFIG, *SCHEMA.config} == {"type", *(field.name for field in fields(PI0Config))}
    theirs = draccus.encode(PI0Config())
    defaults = {key: list(value) if isinstance(value, tuple) else value for key, value in PI0.defaults.items()}
    assert {key: theirs[key] for key in defaults} == defaults


@pytest.mark.parametrize("size", [Pi05Size(), SIZE], ids=["published", "small"])
def test_the_table_of_shapes_is_lerobots_model(size):
    config = PI0Config(device="cpu", image_resolution=(224, 224))
    with torch.device("meta"), building_at(size):
        model = modeling_pi0.PI0Pytorch(config)
    theirs = {f"model.{name}": tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes_at(size, image_size=224, action_dims=32, state_dims=32) == theirs


def test_the_published_size_is_lerobots_own():
    with torch.device("meta"):
        theirs = modeling_pi0.PI0Pytorch(PI0Config(device="cpu")).state_dict()
    shapes = shapes_at(Pi05Size(), image_size=224, action_dims=32, state_dims=32)
    assert {f"model.{name}": tuple(tensor.shape) for name, tensor in theirs.items()} == shapes


def test_names_are_mapped_as_lerobot_maps_them(lerobot_policy):
    names = list(lerobot_policy.state_dict())
    odd = ["time_mlp_in.weight", "time_mlp_out.bias", "state_proj.bias", "something.else"]
    for given in (names, odd):
        fixed = lerobot_policy._fix_pytorch_state_dict_keys({name: torch.zeros(1) for name in given}, None)
        theirs = {key if key.startswith("model.") else f"model.{key}" for key in fixed}
        assert {mapped for name in given for mapped in model_names(name, PI0)} == theirs


def test_a_base_of_the_other_policy_is_refused(pi0_base, small_base):
    with pytest.raises(ValueError, match=r"config\.json says type 'pi0', expected 'pi05'; set --policy\.type"):
        Pi05Adapter().read_spec(pi0_base)
    with pytest.raises(ValueError, match=r"config\.json says type 'pi05', expected 'pi0'"):
        Pi0Adapter().read_spec(small_base)


def test_weights_that_do_not_fit_are_refused(pi0_base, small_base, tmp_path):
    base = Path(shutil.copytree(pi0_base, tmp_path / "base"))
    shutil.copy(small_base / "model.safetensors", base / "model.safetensors")
    with pytest.raises(ValueError, match=r"the weights do not fit .* is it a PI0 base of another size or version\?"):
        Pi0Adapter().read_spec(base)


def test_parameters_and_bytes_of_the_real_config(tmp_path):
    """On the meta device, as training has them: all of the model but the two unused output heads."""
    PI0Config(device="cpu", push_to_hub=False).save_pretrained(tmp_path)
    policy = plan_policy(tmp_path, train="expert", dtype="bfloat16", lean=True)
    weights, trained = (bytes_of(p for p in policy.parameters() if p.requires_grad or every) for every in (True, False))
    figures = [weights, trained, 2 * trained, weights + 3 * trained, weights + 4 * trained, 3 * trained]
    row = "| `pi0` | " + " | ".join(f"{figure / 1e9:.2f}" for figure in figures) + " |"
    assert row in (ROOT / "docs" / "memory.md").read_text(), row
    assert sum(parameter.numel() for parameter in policy.parameters()) == 3_238_048_528
    for train, count in {"heads": 3_248_160, "expert": 314_713_120, "full": 3_128_992_528}.items():
        set_trainable(policy, train)
        assert sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad) == count, train


# What the recipe says


def test_numbers_are_lerobots_presets():
    preset, config = PI0Config(), parse_flags(["--recipe=pi0"], RunConfig)
    assert config.policy == PolicyConfig(path="lerobot/pi0_base", type="pi0", train="expert", dtype="bfloat16")
    ours, theirs = config.optimizer, preset.get_optimizer_preset()
    assert (ours.lr, ours.betas, ours.eps) == (theirs.lr, tuple(theirs.betas), theirs.eps)
    assert (ours.weight_decay, ours.grad_clip_norm) == (theirs.weight_decay, theirs.grad_clip_norm)
    assert config.scheduler.num_warmup_steps == preset.scheduler_warmup_steps
    assert config.scheduler.num_decay_steps == preset.scheduler_decay_steps
    assert config.scheduler.decay_lr == preset.scheduler_decay_lr


# What happens to samples


def read_rows(setup):
    """Every row of an episode, as the reader delivers it."""
    frames = np.arange(int(setup.metas[0].episodes.length[1]))
    return read_unit(setup.specs[0], make_unit(setup.metas[0], setup.specs[0], 1, frames, frames))


def test_samples_are_those_of_lerobots_processors(setup, pi0_base, dataset_v3):
    rows = read_rows(setup)
    odd = np.empty(len(rows[TASK]), dtype=object)
    odd[:] = [("", "ends with one\n", "two\nlines", str(rows[TASK][0]))[row % 4] for row in range(len(odd))]
    rows[TASK] = odd
    ours = apply_all(setup.eval_transforms(0), rows)
    stats = json.loads((dataset_v3 / "meta/stats.json").read_text())
    overrides = {"tokenizer_processor": {"tokenizer_name": str(pi0_base / "tokenizer")}}
    before, _ = make_pre_post_processors(
        PI0Config.from_pretrained(pi0_base),
        str(pi0_base),
        preprocessor_overrides=overrides | {"normalizer_processor": {"stats": stats}},
        postprocessor_overrides={"unnormalizer_processor": {"stats": stats}},
    )
    theirs = before({key: torch.from_numpy(rows[key]) for key in (STATE, ACTION)} | {TASK: odd.tolist()})
    for key in (TOKENS, TOKEN_MASK, STATE):
        assert np.array_equal(ours[key], theirs[key].numpy()), key
    width = setup.binding.action_dim
    assert np.array_equal(ours[ACTION][..., :width], theirs[ACTION].numpy())
    assert not ours[ACTION][..., width:].any()


# A run of it


@pytest.fixture
def config(dataset_v3, pi0_base, tmp_path) -> RunConfig:
    return small_config(
        dataset_v3,
        pi0_base,
        tmp_path / "run",
        policy=PolicyConfig(path=str(pi0_base), type="pi0", train="expert"),
        optimizer=OptimizerConfig(lr=1e-2),
    )


def test_a_resumed_run_is_the_undisturbed_one_to_the_last_bit(config):
    with running(config) as whole:
        whole.step()
        whole.save()
        expected = [whole.step() for _ in range(2)]
    torch.manual_seed(1)  # another process has other states
    with running(config) as resumed:
        assert resumed.done == 1
        assert [resumed.step() for _ in range(2)] == expected
    assert whole.trainable.keys() == resumed.trainable.keys()
    assert all(torch.equal(whole.trainable[name], resumed.trainable[name]) for name in whole.trainable)


def test_lerobots_factory_loads_an_export_and_gives_equal_actions(config, tmp_path, monkeypatch):
    with running(config) as run:
        for _ in range(2):
            run.step()
        run.save()
    folder = tmp_path / "exported"
    monkeypatch.chdir("/")
    check_actions(run, folder)
    assert Pi0Adapter().read_spec(folder).type == "pi0"
