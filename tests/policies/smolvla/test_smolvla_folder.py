"""SmolVLA's folder and samples are LeRobot's: its fields, tensors, processors; a run of it goes on and is exported."""

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import draccus
import numpy as np
import pytest
import torch
from exported import lerobot_actions, noise_for
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.smolvla import SmolVLAConfig, SmolVLAPolicy, smolvlm_with_expert
from repository_files import ROOT
from safetensors.torch import load_file, save_file
from small_run import running, small_config
from smolvla_parity import ARCHITECTURE, SIZE, load_lerobot, setup_for
from tensor_bytes import bytes_of

from vlatune.batch import ACTION, ACTION_IS_PAD, SLOT, STATE, TASK, TOKEN_MASK, TOKENS
from vlatune.checkpoint.export import export_run
from vlatune.config import DatasetConfig, ExportConfig, OptimizerConfig, PolicyConfig, RunConfig
from vlatune.dataset.reader import make_unit, read_unit
from vlatune.dataset.synthetic.world import TASKS
from vlatune.evaluate.predictions import in_own_units
from vlatune.flags import parse_flags
from vlatune.pipeline.plan import Share, make_units, plan_steps
from vlatune.pipeline.transforms import apply_all
from vlatune.policies.base import Fit
from vlatune.policies.model_size import SIZE_FILE
from vlatune.policies.processors import COMMON_CONFIG, PREPROCESSOR
from vlatune.policies.smolvla import POLICY
from vlatune.policies.smolvla.smolvla_adapter import SCHEMA, SmolVLAAdapter
from vlatune.policies.smolvla.smolvla_module import build_policy, plan_policy, set_trainable
from vlatune.policies.smolvla.smolvla_size import (
    CONFIG_DEFAULTS,
    KNOWN,
    SmolVLASpec,
    building_at,
    expected_shapes,
    read_size,
)
from vlatune.policies.smolvla.smolvla_small import make_smolvla
from vlatune.run_setup import make_setup

PUBLISHED = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
WEIGHTS = "model.safetensors"


@pytest.fixture
def base(smolvla_base, tmp_path) -> Path:
    """A copy of the base model's folder, free to be changed."""
    return Path(shutil.copytree(smolvla_base, tmp_path / "base"))


def change(folder: Path, name: str, **changes: Any) -> None:
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))


def refusal(folder: Path, **overrides: Any) -> str:
    with pytest.raises(ValueError, match=f"'?{folder}") as caught:
        SmolVLAAdapter().read_spec(folder, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What its files hold


def test_the_fields_of_a_config_and_their_defaults_are_lerobots():
    assert {*COMMON_CONFIG, *SCHEMA.config} == {"type", *(field.name for field in fields(SmolVLAConfig))}
    theirs = draccus.encode(SmolVLAConfig())
    defaults = {key: list(value) if isinstance(value, tuple) else value for key, value in CONFIG_DEFAULTS.items()}
    assert {key: theirs[key] for key in defaults} == defaults
    assert {name: one.default for name, one in POLICY.overrides.items()} == {
        name: theirs[name] for name in POLICY.overrides
    }


@pytest.mark.parametrize("name", [*KNOWN, "small"])
def test_the_table_of_shapes_is_lerobots_model(name, tmp_path, smolvla_base):
    """At the published sizes, too, built from the table, on the meta device."""
    config = SmolVLAConfig(device="cpu", **({"vlm_model_name": name} if name in KNOWN else ARCHITECTURE))
    folder = tmp_path if name in KNOWN else smolvla_base
    with torch.device("meta"), building_at(KNOWN.get(name, SIZE)):
        theirs = SmolVLAPolicy(config).state_dict()
    size = read_size(folder, draccus.encode(config))
    assert {name: tuple(tensor.shape) for name, tensor in theirs.items()} == expected_shapes(size)


def published_spec(folder: Path) -> SmolVLASpec:
    SmolVLAConfig(device="cpu", push_to_hub=False).save_pretrained(folder)
    size = read_size(folder, json.loads((folder / "config.json").read_text()))
    return SmolVLASpec(
        type="smolvla",
        folder=str(folder),
        cameras=("observation.images.top",),
        image_hw=(512, 512),
        action_offsets=tuple(range(50)),
        max_state_dim=32,
        max_action_dim=32,
        normalisation={},
        pad_id=0,
        max_tokens=48,
        size=size,
    )


def test_parameters_of_the_real_config(tmp_path):
    """On the meta device: about 450 million with the head over the vocabulary, of which a run holds none."""
    spec = published_spec(tmp_path)
    whole, lean = build_policy(spec), plan_policy(spec, train="expert", dtype="bfloat16")
    for policy in (whole, lean):
        assert {parameter.device.type for parameter in policy.parameters()} == {"meta"}
    assert sum(parameter.numel() for parameter in whole.parameters()) == 450_046_176
    assert sum(parameter.numel() for parameter in lean.parameters()) == 450_046_176 - 49_280 * 960
    assert not whole.config.load_vlm_weights
    assert whole.config.num_vlm_layers == 16
    weights, learnt = (bytes_of(p for p in lean.parameters() if p.requires_grad or every) for every in (True, False))
    figures = [weights, learnt, 2 * learnt, weights + 3 * learnt, weights + 4 * learnt, 3 * learnt]
    row = "| `smolvla` | " + " | ".join(f"{figure / 1e9:.2f}" for figure in figures) + " |"
    assert row in (ROOT / "docs" / "memory.md").read_text(), row
    counts = {}
    for train in POLICY.train_ways:
        set_trainable(lean, spec.size, train)
        counts[train] = sum(p.numel() for p in lean.parameters() if p.requires_grad)
    assert counts["expert"] == 99_880_992
    assert counts["heads"] < counts["expert"] < counts["language"] < counts["full"] < 400_000_000


def test_no_hub_is_asked_and_lerobot_is_left_as_it_was(smolvla_base, monkeypatch):
    names = ("AutoConfig", "AutoProcessor", "AutoModelForImageTextToText")
    before = [getattr(smolvlm_with_expert, name) for name in names]
    for name in names:
        monkeypatch.setattr(getattr(smolvlm_with_expert, name), "from_pretrained", lambda *_, **__: pytest.fail("hub"))
    change(
        smolvla_base, "config.json", load_vlm_weights=True
    )  # of the published base; its weights are all in its folder
    try:
        policy = build_policy(SmolVLAAdapter().read_spec(smolvla_base))
    finally:
        change(smolvla_base, "config.json", load_vlm_weights=False)
    assert policy.config.load_vlm_weights
    assert [getattr(smolvlm_with_expert, name) for name in names] == before


# What is refused


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"adapt_to_pi_aloha": True}, "adapt_to_pi_aloha is on, which is not supported"),
        ({"add_image_special_tokens": True}, "add_image_special_tokens is on, which is not supported"),
        ({"resize_imgs_with_padding": None}, "resize_imgs_with_padding is null; write the size"),
        ({"resize_imgs_with_padding": [48, 64]}, "[48, 64], expected two equal sides, a multiple of 16"),
        ({"resize_imgs_with_padding": [40, 40]}, "[40, 40], expected two equal sides, a multiple of 16"),
        ({"num_expert_layers": 2}, "num_expert_layers=2: must divide the 3 layers"),
        ({"num_vlm_layers": 4, "num_expert_layers": 2}, "LeRobot cannot run it either"),
        ({"expert_width_multiplier": 1e17}, "the action expert's width:"),
        ({"expert_width_multiplier": 0.0}, "an action expert of width 0"),
        ({"num_vlm_layers": 2}, "the weights do not fit the model: 0 missing"),
        ({"max_action_dim": 31}, "is it a SmolVLA base of another size or version?"),
        ({"input_features": {}}, "input_features names no camera"),
        ({"chunk_size": 10**9}, "chunk_size is 1000000000, expected a number"),
        ({"type": "act"}, "says type 'act', expected 'smolvla'; set --policy.type"),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_loaded(base, changes, why):
    change(base, "config.json", **changes)
    assert why in refusal(base)


def test_a_vision_language_model_that_is_not_known(base):
    (base / SIZE_FILE).unlink()
    change(base, "config.json", vlm_model_name="somebody/SmolVLM-9B")
    said = refusal(base)
    assert "names the vision-language model 'somebody/SmolVLM-9B', whose size is not known here; known are" in said
    assert f"write its size to {base / SIZE_FILE} (width, depth, mlp_dim, heads," in said
    change(base, "config.json", vlm_model_name=PUBLISHED, resize_imgs_with_padding=[64, 64])
    assert "the weights do not fit the model" in refusal(base)  # they are not of the published size


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[]", "it holds a list, expected an object"),
        ('{"width": 64}', "a SmolVLM's size needs exactly"),
        (json.dumps(vars(SIZE) | {"kv_heads": 4}), "heads=6: must be a multiple of kv_heads=4"),
        (json.dumps(vars(SIZE) | {"depth": True}), "depth=True: must be an integer above 0"),
        (json.dumps(vars(SIZE) | {"width": 10**9}), "width:"),
    ],
)
def test_a_size_that_is_none(base, content, why):
    (base / SIZE_FILE).write_text(content)
    assert why in refusal(base)


def test_a_tokenizer_that_is_not_there(base):
    shutil.rmtree(base / "tokenizer")
    assert f"put its folder into the policy's own, as '{base / 'tokenizer'}'" in refusal(base)


def test_a_step_that_is_none_of_its_own(base):
    steps = json.loads((base / PREPROCESSOR).read_text())["steps"]
    change(base, PREPROCESSOR, steps=[*steps, {"registry_name": "pi05_prepare_state_tokenizer_processor_step"}])
    assert "is not known" in refusal(base)


@pytest.mark.parametrize("missing", [True, False])
def test_weights_that_are_not_all_there(base, missing):
    weights = load_file(base / WEIGHTS)
    if missing:
        del weights["model.state_proj.weight"]
    else:
        weights["model.extra"] = torch.zeros(2)
    save_file(weights, base / WEIGHTS)
    assert f"{int(missing)} missing" in refusal(base)


def test_overrides_are_laid_over_the_base(base):
    assert SmolVLAAdapter().read_spec(base, {"chunk_size": 3, "n_action_steps": 2}).horizon == 3
    assert "n_action_steps is 5, and a chunk has 3 actions" in refusal(base, chunk_size=3)


# What the recipe says


def test_numbers_are_lerobots_presets():
    preset, config = SmolVLAConfig(), parse_flags(["--recipe=smolvla"], RunConfig)
    assert config.policy == PolicyConfig(path="lerobot/smolvla_base", type="smolvla", train="expert", dtype="bfloat16")
    ours, theirs = config.optimizer, preset.get_optimizer_preset()
    assert (ours.lr, ours.betas, ours.eps) == (theirs.lr, tuple(theirs.betas), theirs.eps)
    assert (ours.weight_decay, ours.grad_clip_norm) == (theirs.weight_decay, theirs.grad_clip_norm)
    assert config.scheduler.num_warmup_steps == preset.scheduler_warmup_steps
    assert config.scheduler.num_decay_steps == preset.scheduler_decay_steps
    assert config.scheduler.decay_lr == preset.scheduler_decay_lr
    assert (preset.train_expert_only, preset.freeze_vision_encoder, preset.train_state_proj) == (True, True, True)


# What happens to samples


def read_rows(setup):
    """Every row of an episode, as the reader delivers it."""
    frames = np.arange(int(setup.metas[0].episodes.length[1]))
    return read_unit(setup.specs[0], make_unit(setup.metas[0], setup.specs[0], 1, frames, frames))


def test_samples_are_those_of_lerobots_processors(setup, smolvla_base, dataset_v3):
    rows = read_rows(setup)
    odd = np.empty(len(rows[TASK]), dtype=object)
    odd[:] = [("", "ends with one\n", "two\nlines", str(rows[TASK][0]))[row % 4] for row in range(len(odd))]
    rows[TASK] = odd
    ours = apply_all(setup.eval_transforms(0), rows)
    stats = json.loads((dataset_v3 / "meta/stats.json").read_text())
    tokenizer = {"tokenizer_name": str(smolvla_base / "tokenizer"), "padding": "max_length"}
    before, _ = make_pre_post_processors(
        SmolVLAConfig.from_pretrained(smolvla_base),
        str(smolvla_base),
        preprocessor_overrides={"tokenizer_processor": tokenizer, "normalizer_processor": {"stats": stats}},
        postprocessor_overrides={"unnormalizer_processor": {"stats": stats}},
    )
    theirs = before({key: torch.from_numpy(rows[key]) for key in (STATE, ACTION)} | {TASK: odd.tolist()})
    for key in (TOKENS, TOKEN_MASK, STATE):
        assert np.array_equal(ours[key], theirs[key].numpy()), key
    width = setup.binding.action_dim
    assert np.array_equal(ours[ACTION][..., :width], theirs[ACTION].numpy())
    assert not ours[ACTION][..., width:].any()
    assert ours[ACTION_IS_PAD].any()


def test_pictures_are_those_that_lerobots_policy_makes(lerobot_policy, dataset_v3, smolvla_base):
    """Bars on the left and on top; LeRobot resizes floats, the reader uint8."""
    setup = setup_for(dataset_v3, smolvla_base)
    assert {camera.letterbox.pad for camera in setup.specs[0].cameras} == {"left_top"}
    recorded = read_rows(replace(setup, specs=(replace_resize(setup.specs[0]),)))
    seen = read_rows(setup)
    for camera in setup.policy.cameras:
        given = {one: torch.from_numpy(recorded[one]).float() / 255.0 for one in (camera,)}
        (image,), _ = lerobot_policy.prepare_images(given)
        ours = torch.from_numpy(seen[camera]).float() / 255.0 * 2.0 - 1.0
        assert (ours - image).abs().max() <= 2 / 255 + 1e-6


def replace_resize(spec: Any) -> Any:
    return replace(spec, cameras=tuple(replace(camera, height=96, width=96) for camera in spec.cameras))


def test_one_and_two_workers_get_the_same_samples(dataset_v3, smolvla_base):
    policy = PolicyConfig(path=str(smolvla_base), type="smolvla", train="expert", flow_samples=2)
    config = RunConfig(dataset=DatasetConfig(root=(str(dataset_v3),)), policy=policy, batch_size=8, seed=11)
    alone, shared = rows_of(config, 3), rows_of(replace(config, batch_size=4, num_workers=2), 3)
    assert len(alone[SLOT]) == 24
    assert alone.keys() == shared.keys()
    assert all(np.array_equal(alone[key], shared[key]) for key in alone)


def rows_of(config: RunConfig, steps: int) -> dict[str, np.ndarray]:
    """All that `steps` optimizer steps get, by place in the run's order, whichever worker reads it."""
    plan, parts = make_setup(config).data_plan, []
    for rank in range(config.num_workers):
        share = Share(rank, config.num_workers)
        units = make_units(plan, share, plan_steps(plan.order, share, 0, steps))
        parts += [apply_all(plan.transforms, read_unit(plan.specs[0], unit)) for unit in units]
    joined = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    by_place = np.argsort(joined[SLOT], kind="stable")
    return {key: values[by_place] for key, values in joined.items()}


# A run of it


@pytest.fixture(scope="module")
def runs(dataset_v3, smolvla_base, tmp_path_factory):
    """A run of three steps, and the same one that went on after its first."""
    folder = tmp_path_factory.mktemp("runs")
    config = small_config(
        dataset_v3,
        smolvla_base,
        folder / "run",
        policy=PolicyConfig(path=str(smolvla_base), type="smolvla", train="expert"),
        optimizer=OptimizerConfig(lr=1e-2),
    )
    with running(config) as whole:
        whole.step()
        whole.save()
        expected = [whole.step() for _ in range(2)]
    torch.manual_seed(1)  # another process has other states
    with running(config) as resumed:
        assert resumed.done == 1
        losses = [resumed.step() for _ in range(2)]
        resumed.save()
    return whole, expected, resumed, losses


def test_a_resumed_run_is_the_undisturbed_one_to_the_last_bit(runs):
    whole, expected, resumed, losses = runs
    assert losses == expected
    assert whole.trainable.keys() == resumed.trainable.keys()
    assert all(torch.equal(whole.trainable[name], resumed.trainable[name]) for name in whole.trainable)


def test_lerobots_factory_loads_an_export_and_gives_equal_actions(runs, smolvla_base, tmp_path, monkeypatch):
    run, folder = runs[2], tmp_path / "exported"
    export_run(run.config.run_dir, folder, ExportConfig(), warn=pytest.fail)
    monkeypatch.chdir("/")
    setup, noise = run.start.setup, noise_for(run.start.setup.policy, run.rows)
    chunk = run.module.eval().predict(run.batch(), noise).numpy()
    ours = in_own_units(setup.eval_transforms(0), chunk, run.rows[STATE])
    theirs = lerobot_actions(folder, load_lerobot(folder), run.rows, setup.binding, noise)
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-5)
    trained, before = load_file(folder / WEIGHTS), load_file(smolvla_base / WEIGHTS)
    assert trained.keys() == before.keys()
    changed = {name for name in before if not torch.equal(trained[name], before[name])}
    assert changed == {name.removeprefix("policy.") for name in run.trainable}
    assert SmolVLAAdapter().read_spec(folder).type == "smolvla"


# The small twin


def test_the_same_seed_gives_the_same_files_and_another_seed_other_weights(tmp_path):
    fit = Fit(("observation.images.top",), 3, 3, 4, 32, TASKS, 0)
    state = torch.get_rng_state()
    first, again, other = (
        make_smolvla(tmp_path / str(number), replace(fit, seed=seed)) for number, seed in enumerate((0, 0, 1))
    )
    assert torch.equal(torch.get_rng_state(), state)
    for name in (WEIGHTS, "config.json", SIZE_FILE, "tokenizer/tokenizer.json"):
        assert (again / name).read_bytes() == (first / name).read_bytes(), name
    assert (other / WEIGHTS).read_bytes() != (first / WEIGHTS).read_bytes()
