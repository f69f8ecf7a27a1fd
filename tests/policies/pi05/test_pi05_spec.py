"""What a PI0.5 folder says, how it is matched with a dataset, and what is said when either is not right."""

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import draccus
import numpy as np
import pytest

from vlatune.dataset.meta.dataset_meta import DatasetMeta, Feature, load_meta
from vlatune.dataset.storage.hub import fetch_dataset
from vlatune.policies.base import PolicySpec
from vlatune.policies.base_folder import fetch_file, resolve_folder
from vlatune.policies.binding import bind
from vlatune.policies.normalisation import make_normalisers, stats_needed
from vlatune.policies.pi05.adapter import SCHEMA, Pi05Adapter
from vlatune.policies.pi05.weights import CONFIG_DEFAULTS
from vlatune.policies.processors import COMMON_CONFIG, PREPROCESSOR
from vlatune.policies.registry import get_adapter, policy_types

TOP, WRIST = "observation.images.top", "observation.images.wrist"


@pytest.fixture
def base(small_base, tmp_path) -> Path:
    """A copy of the base model's folder, free to be changed; its weights are tried in test_pi05_weights.py."""
    folder = Path(shutil.copytree(small_base, tmp_path / "base"))
    change_tokenizer_name(folder, str(folder / "tokenizer"))
    return folder


@pytest.fixture(scope="module")
def spec(small_base) -> PolicySpec:
    return Pi05Adapter().read_spec(small_base)


@pytest.fixture(scope="module")
def meta(dataset_v3) -> DatasetMeta:
    return load_meta(str(dataset_v3))


def change(folder: Path, name: str, **changes: Any) -> None:
    values = json.loads((folder / name).read_text()) | changes
    (folder / name).write_text(json.dumps(values))


def change_tokenizer_name(folder: Path, name: str | None) -> None:
    steps = json.loads((folder / PREPROCESSOR).read_text())["steps"]
    for step in steps:
        if step.get("registry_name") == "tokenizer_processor":
            step["config"]["tokenizer_name"] = name
    change(folder, PREPROCESSOR, steps=steps)


def with_feature(meta: DatasetMeta, **features: Feature | None) -> DatasetMeta:
    """Features replaced, or removed where they are None; `__` stands for a dot."""
    named = {name.replace("__", "."): feature for name, feature in features.items()}
    changed = dict(meta.features) | named
    return replace(meta, features={name: feature for name, feature in changed.items() if feature is not None})


def vector(width: int) -> Feature:
    return Feature("float32", (width,), None, {})


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the caller looks at the message)
        Pi05Adapter().read_spec(folder)
    return str(caught.value)


# Reading a folder


def test_the_spec_is_what_the_folder_says(small_base, spec, meta):
    from lerobot.configs import PreTrainedConfig

    theirs = PreTrainedConfig.from_pretrained(small_base)
    assert (spec.type, spec.folder) == ("pi05", str(small_base))
    assert spec.cameras == tuple(theirs.image_features) == meta.cameras
    assert spec.image_hw == tuple(theirs.image_resolution) == (48, 48)
    assert spec.horizon == theirs.chunk_size == 5
    assert (spec.max_state_dim, spec.max_action_dim) == (theirs.max_state_dim, theirs.max_action_dim) == (32, 32)
    assert spec.max_tokens == theirs.tokenizer_max_length
    assert spec.normalisation == {kind: mode.value for kind, mode in theirs.normalization_mapping.items()}
    assert spec.tokenizer_file == str(small_base / "tokenizer/tokenizer.json")
    assert spec.pad_id == 0


def test_a_spec_is_the_same_wherever_the_folder_is(base, spec):
    assert replace(Pi05Adapter().read_spec(base), folder=spec.folder, tokenizer_file=spec.tokenizer_file) == spec


def test_keys_that_lerobot_has_defaults_for_may_be_left_out(base, spec):
    from lerobot.policies.pi05 import PI05Config

    theirs = draccus.encode(PI05Config())
    defaults = {key: list(value) if isinstance(value, tuple) else value for key, value in CONFIG_DEFAULTS.items()}
    assert {key: theirs[key] for key in CONFIG_DEFAULTS} == defaults
    stored = json.loads((base / "config.json").read_text())
    kept = {key: value for key, value in stored.items() if value != defaults.get(key)}
    assert len(kept) < len(stored)
    (base / "config.json").write_text(json.dumps(kept))
    assert replace(Pi05Adapter().read_spec(base), folder=spec.folder, tokenizer_file=spec.tokenizer_file) == spec


def test_empty_cameras_are_lerobots(base, spec):
    change(base, "config.json", empty_cameras=2)
    from lerobot.configs import PreTrainedConfig

    theirs = PreTrainedConfig.from_pretrained(base)
    theirs.validate_features()
    assert Pi05Adapter().read_spec(base).cameras == tuple(theirs.image_features)


def test_a_policy_without_cameras_is_told(base):
    change(base, "config.json", input_features=None)
    assert "input_features names no camera; write the policy's cameras there" in refusal(base)


def test_prompts_are_as_long_as_the_step_that_tokenises_says(base):
    steps = json.loads((base / PREPROCESSOR).read_text())["steps"]
    (step,) = (step["config"] for step in steps if step.get("registry_name") == "tokenizer_processor")
    step["max_length"] = 9
    change(base, PREPROCESSOR, steps=steps)
    assert Pi05Adapter().read_spec(base).max_tokens == 9
    step["padding_side"] = "left"
    change(base, PREPROCESSOR, steps=steps)
    assert f"{PREPROCESSOR} pads prompts on the left, expected right" in refusal(base)


@pytest.mark.parametrize("changes", [{"chunk_size": "many"}, {"image_resolution": 224}, {"input_features": [1]}])
def test_a_config_that_is_not_lerobots(base, changes):
    change(base, "config.json", **changes)
    assert f"policy '{base}': config.json is not as LeRobot writes it for pi05: " in refusal(base)
    (base / "config.json").write_text("[]")
    assert "config.json is not readable JSON (it holds a list, expected an object)" in refusal(base)


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        (None, " has no list of steps"),
        ({}, " has no list of steps"),
        (["tokenizer"], ", step 0: expected an object, found a str"),
        ([], " names no tokenizer"),
        ([{"registry_name": "tokenizer_processor"}], " names no tokenizer"),
    ],
)
def test_a_preprocessor_without_a_tokenizer(base, steps, why):
    change(base, PREPROCESSOR, steps=steps)
    assert f"{PREPROCESSOR}{why}" in refusal(base)


def test_a_damaged_tokenizer_is_named(base):
    (base / "tokenizer/tokenizer.json").write_text('{"added_tokens": [')
    assert "tokenizer.json is not readable JSON" in refusal(base)


def test_the_pad_token_is_the_one_that_the_tokenizer_names(base):
    tokenizer = json.loads((base / "tokenizer/tokenizer.json").read_text())
    end = next(entry for entry in tokenizer["added_tokens"] if entry["content"] == "<eos>")
    for form in ("<eos>", {"content": "<eos>", "special": True}):
        change(base / "tokenizer", "tokenizer_config.json", pad_token=form)
        assert Pi05Adapter().read_spec(base).pad_id == end["id"] != 0
    change(base / "tokenizer", "tokenizer_config.json", pad_token="<none>")
    assert "its pad token '<none>' is not in tokenizer.json" in refusal(base)


def test_a_tokenizer_is_found_beside_a_folder_that_has_moved(base):
    """The path in the preprocessor is that of the machine it was made on."""
    change_tokenizer_name(base, "/elsewhere/base/tokenizer")
    assert Pi05Adapter().read_spec(base).tokenizer_file == str(base / "tokenizer/tokenizer.json")
    (base / "tokenizer").rename(base / "paligemma")
    change_tokenizer_name(base, "/elsewhere/paligemma")
    assert Pi05Adapter().read_spec(base).tokenizer_file == str(base / "paligemma/tokenizer.json")


def test_a_missing_tokenizer_is_named(base):
    shutil.rmtree(base / "tokenizer")
    change_tokenizer_name(base, "/elsewhere/tokenizer")
    assert f"policy '{base}': {PREPROCESSOR} names the tokenizer '/elsewhere/tokenizer', which is not there" in refusal(
        base
    )
    change_tokenizer_name(base, None)
    assert f"policy '{base}': {PREPROCESSOR} names no tokenizer" in refusal(base)


def test_a_tokenizer_of_the_hub_that_cannot_be_had_is_named(base):
    shutil.rmtree(base / "tokenizer")
    change_tokenizer_name(base, "google/paligemma-3b-pt-224")
    message = refusal(base)
    assert "hub repository 'google/paligemma-3b-pt-224' cannot be fetched" in message
    assert "check the network, HF_HUB_OFFLINE and HF_HOME; or give a local folder" in message


@pytest.mark.parametrize("kind", ["smolvla", None])
def test_another_type_of_policy_is_refused(kind, base):
    change(base, "config.json", type=kind)
    assert refusal(base) == f"policy '{base}': config.json says type '{kind}', expected 'pi05'; set --policy.type"


@pytest.mark.parametrize("name", ["config.json", PREPROCESSOR])
def test_a_folder_that_lacks_a_file_is_no_policy(name, base):
    (base / name).unlink()
    assert refusal(base) == (
        f"policy '{base}': no {name} in it; --policy.path must be a LeRobot pretrained_model folder"
    )
    (base / name).write_text("{")
    assert f"policy '{base}': {name} is not readable JSON" in refusal(base)


@pytest.mark.parametrize(
    ("step", "why"),
    [
        ({"class": "os.system", "config": {"command": "false"}}, "names the class 'os.system'"),
        ({"class": "os.system", "registry_name": "to_batch_processor"}, "names the class 'os.system'"),
        ({"registry_name": "surprise"}, "the step 'surprise' is not known"),
        ({"registry_name": "to_batch_procesor"}, "did you mean to_batch_processor?"),
        ({"registry_name": "to_batch_processor", "config": {"x": 1}}, "the setting 'x' is not known"),
        ({"registry_name": "device_processor", "config": {"device": ["cpu"]}}, "expected a text"),
        ({"registry_name": "device_processor", "state_file": "../../etc/passwd"}, "is not a name that LeRobot gives"),
        ({"registry_name": "tokenizer_processor", "config": {"trust_remote_code": True}}, "'trust_remote_code' is not"),
    ],
)
@pytest.mark.parametrize("file", ["policy_preprocessor.json", "policy_postprocessor.json"])
def test_steps_are_lerobots_own_and_nothing_else(base, file, step, why):
    """LeRobot imports the class that a step names."""
    steps = json.loads((base / file).read_text())["steps"]
    change(base, file, steps=[*steps, step])
    found = refusal(base)
    assert why in found
    assert f"{file}, step {len(steps)}" in found


def test_the_fields_of_a_config_are_lerobots():
    from lerobot.policies.pi05 import PI05Config

    assert {*COMMON_CONFIG, *SCHEMA.config} == {"type", *(field.name for field in fields(PI05Config))}


# Finding it


def test_a_folder_is_taken_as_it_is(small_base, monkeypatch):
    assert resolve_folder(str(small_base), None) == small_base.resolve()
    monkeypatch.chdir(small_base.parent)
    assert resolve_folder(small_base.name, None) == small_base.resolve()


@pytest.mark.parametrize("path", ["./none", "/none/at/all", "~/none-at-all", "none", "a/b/c"])
def test_a_path_that_is_neither_folder_nor_repository(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="there is no such folder, and it is not a hub repository") as caught:
        resolve_folder(path, None)
    assert f"--policy.path={path}" in str(caught.value)


@pytest.mark.parametrize(
    "fetch",
    [
        lambda: resolve_folder("lerobot/pi05_base", None),
        lambda: fetch_dataset("lerobot/pi05_base", "main"),
        lambda: fetch_file("lerobot/pi05_base", "config.json"),
    ],
    ids=["policy", "dataset", "file"],
)
def test_a_repository_that_cannot_be_had_is_one_clear_line(fetch, tmp_path, monkeypatch):
    """Tests run with HF_HUB_OFFLINE=1 and an empty cache."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="hub repository 'lerobot/pi05_base' cannot be fetched") as caught:
        fetch()
    message = str(caught.value)
    assert "the hub cannot be reached, nor is all of it in the cache; check the network" in message
    assert "\n" not in message


def test_adapters_are_found_by_name():
    found = {name: type(get_adapter(name)).__name__ for name in policy_types()}
    assert found.items() >= {"pi05": "Pi05Adapter", "pi0": "Pi0Adapter"}.items()
    with pytest.raises(ValueError, match=r"--policy.type=pi06: must be one of pi05"):
        get_adapter("pi06")


# Matching it with a dataset


def test_cameras_are_matched_by_name(spec, meta):
    binding = bind(spec, meta, {})
    assert binding.cameras == ((TOP, TOP), (WRIST, WRIST))
    assert binding.missing_cameras == ()
    assert binding.state_dim == meta.features["observation.state"].shape[0]
    assert binding.action_dim == meta.features["action"].shape[0]
    assert binding.action_names == meta.features["action"].names


def test_a_camera_that_the_dataset_lacks_is_missing(spec, meta):
    binding = bind(spec, with_feature(meta, observation__images__top=None), {})
    assert binding.cameras == ((WRIST, WRIST),)
    assert binding.missing_cameras == (TOP,)


def test_cameras_are_renamed(spec, meta):
    other = replace(spec, cameras=("observation.images.base_0_rgb", "observation.images.left_wrist_0_rgb"))
    names = {TOP: "observation.images.base_0_rgb", WRIST: "observation.images.left_wrist_0_rgb"}
    assert bind(other, meta, names).cameras == tuple(names.items())
    one = bind(other, meta, {TOP: "observation.images.left_wrist_0_rgb"})
    assert one.cameras == ((TOP, "observation.images.left_wrist_0_rgb"),)
    assert one.missing_cameras == ("observation.images.base_0_rgb",)


def test_two_cameras_can_change_places(spec, meta):
    assert bind(spec, meta, {TOP: WRIST, WRIST: TOP}).cameras == ((TOP, WRIST), (WRIST, TOP))


def test_a_misspelt_camera_gets_a_hint(spec, meta):
    with pytest.raises(
        ValueError, match=f"--rename_map: .* has no feature 'observation.images.tpo'; did you mean '{TOP}'"
    ):
        bind(spec, meta, {"observation.images.tpo": TOP})
    with pytest.raises(ValueError, match=f"has no feature 'zzz'; it has {TOP}, {WRIST}"):
        bind(spec, meta, {"zzz": TOP})


def test_a_misspelt_target_gets_a_hint(spec, meta):
    with pytest.raises(ValueError, match=f"observation.images.tpo.*did you mean '{TOP}'"):
        bind(spec, meta, {TOP: "observation.images.tpo"})


def test_two_cameras_cannot_have_one_name(spec, meta):
    with pytest.raises(ValueError, match=WRIST):
        bind(spec, meta, {TOP: WRIST})


def test_no_camera_in_common(spec, meta):
    other = replace(spec, cameras=("observation.images.base_0_rgb",))
    with pytest.raises(ValueError, match="none of the dataset's cameras") as caught:
        bind(other, meta, {})
    message = str(caught.value)
    assert f"({TOP}, {WRIST})" in message
    assert f'map them with --rename_map=\'{{"{TOP}": "observation.images.base_0_rgb"}}\'' in message


def test_a_dataset_without_cameras(spec, meta):
    blind = with_feature(meta, observation__images__top=None, observation__images__wrist=None)
    with pytest.raises(ValueError, match="none of the dataset's cameras"):
        bind(spec, blind, {})


@pytest.mark.parametrize("key", ["observation.state", "action"])
def test_vectors_that_are_too_wide(key, spec, meta):
    wide = with_feature(meta, **{key.replace(".", "__"): vector(33)})
    with pytest.raises(ValueError, match=f"'{key}' has 33 dims, the policy takes 32 at most") as caught:
        bind(spec, wide, {})
    assert meta.root.url in str(caught.value)
    assert bind(spec, with_feature(meta, **{key.replace(".", "__"): vector(32)}), {})


def test_a_vector_of_another_name_is_pointed_at(spec, meta):
    with pytest.raises(ValueError, match=r"there is no feature 'action'; 'actions' may be it; it has .*actions"):
        bind(spec, with_feature(meta, action=None, actions=vector(2)), {})
    with pytest.raises(ValueError, match=r"there is no feature 'observation.state'"):
        bind(spec, with_feature(meta, observation__state=None), {})


@pytest.mark.parametrize("names", [None, ("only one",)])
def test_actions_without_names_are_numbered(names, spec, meta):
    numbered = with_feature(meta, action=Feature("float32", (2,), names, {}))
    assert bind(spec, numbered, {}).action_names == ("action_0", "action_1")


# What normalisation asks for


@pytest.mark.parametrize(
    ("mode", "names"), [("QUANTILES", ("q01", "q99")), ("MIN_MAX", ("min", "max")), ("MEAN_STD", ("mean", "std"))]
)
def test_statistics_are_asked_for_and_used_by_mode(mode, names, spec):
    asked = replace(spec, normalisation={"STATE": mode, "ACTION": "IDENTITY", "VISUAL": "IDENTITY"})
    assert stats_needed(asked) == {"observation.state": names}
    low, high = np.array([1.0]), np.array([2.0])
    (made,) = make_normalisers(asked, {"observation.state": dict(zip(names, (low, high), strict=True))})
    assert (made.key, made.mode, made.low, made.high) == ("observation.state", mode, low, high)


def test_state_and_action_are_asked_for_by_default(spec):
    assert stats_needed(spec) == {"observation.state": ("q01", "q99"), "action": ("q01", "q99")}


def test_a_mode_that_is_not_known_is_refused_by_name(base):
    change(base, "config.json", normalization_mapping={"STATE": "MEDIAN", "ACTION": "MEDIAN"})
    with pytest.raises(ValueError, match="'MEDIAN' is not known"):
        stats_needed(Pi05Adapter().read_spec(base))
