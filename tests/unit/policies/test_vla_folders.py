"""Folders of PI0.5, PI0 and SmolVLA: what a valid one gives, and the error of each invalid one."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import draccus
import pytest
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import get_policy_class
from parity.policies.flow_parity import SIZE, SMOLVLM_SIZE, make_case
from safetensors.torch import load_file, save_file

from vlatune.policies.base import Binding, Fit, ModuleOptions
from vlatune.policies.model_size import SIZE_FILE, building_at
from vlatune.policies.pi05.spec import EMBEDDING
from vlatune.policies.processors import COMMON_CONFIG, POSTPROCESSOR, PREPROCESSOR
from vlatune.policies.smolvla.weights import build_policy
from vlatune.policies.weight_files import INDEX_FILE, SINGLE_FILE
from vlatune.registry import PACKAGES, get_adapter

KINDS = ("pi05", "pi0", "smolvla")
DEFAULTS = {kind: get_adapter(kind).config_defaults() for kind in KINDS}
HEAD = "model.paligemma_with_expert.paligemma.lm_head.weight"


@pytest.fixture(scope="module")
def bases(dataset_v3, tmp_path_factory) -> dict[str, Path]:
    return {kind: make_case(kind, tmp_path_factory.mktemp(kind) / "base", dataset_v3).base for kind in KINDS}


@pytest.fixture
def copied(bases, tmp_path) -> Callable[[str], Path]:
    return lambda kind: Path(shutil.copytree(bases[kind], tmp_path / "base"))


@pytest.fixture
def base(copied) -> Path:
    return copied("pi05")


def change(folder: Path, name: str, **changes: Any) -> None:
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))


def change_step(folder: Path, **changes: Any) -> None:
    """Change settings of the tokenizer step."""
    steps = json.loads((folder / PREPROCESSOR).read_text())["steps"]
    for step in steps:
        if step.get("registry_name") == "tokenizer_processor":
            step["config"] |= changes
    change(folder, PREPROCESSOR, steps=steps)


def rewrite(folder: Path, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(edit(load_file(folder / SINGLE_FILE)), folder / SINGLE_FILE)


def error(folder: Path, kind: str = "pi05", **overrides: Any) -> str:
    """Return the one-line message that the driver prints."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (callers check the message)
        get_adapter(kind).read_spec(folder, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Specs


@pytest.mark.parametrize("kind", KINDS)
def test_fields_and_defaults_of_config_json_are_lerobots(kind: str) -> None:
    config = PreTrainedConfig.get_choice_class(kind)
    schema, theirs = get_adapter(kind).schema, draccus.encode(config())
    assert {*COMMON_CONFIG, *schema.config} == {"type", *(field.name for field in fields(config))}
    for name, value in DEFAULTS[kind].items():
        assert theirs[name] == (list(value) if isinstance(value, tuple) else value), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_spec_is_read_from_the_folder(bases, kind: str) -> None:
    spec, theirs = get_adapter(kind).read_spec(bases[kind]), PreTrainedConfig.from_pretrained(bases[kind])
    assert (spec.type, spec.cameras) == (kind, tuple(theirs.image_features))
    assert (spec.image_hw, spec.horizon) == ((48, 48), theirs.chunk_size)
    assert (spec.max_state_dim, spec.max_action_dim) == (theirs.max_state_dim, theirs.max_action_dim)
    assert spec.max_tokens == theirs.tokenizer_max_length
    assert spec.normalisation == {kind: mode.value for kind, mode in theirs.normalization_mapping.items()}
    assert get_adapter(kind).read_spec(bases[kind], {"chunk_size": 3, "n_action_steps": 2}).horizon == 3
    assert "n_action_steps is 5" in error(bases[kind], kind, chunk_size=3)


def test_fields_with_defaults_may_be_missing(base: Path) -> None:
    spec = get_adapter("pi05").read_spec(base)
    stored = json.loads((base / "config.json").read_text())
    defaults = {key: list(value) if isinstance(value, tuple) else value for key, value in DEFAULTS["pi05"].items()}
    rest = {key: value for key, value in stored.items() if value != defaults.get(key)}
    assert len(rest) < len(stored)
    (base / "config.json").write_text(json.dumps(rest))
    assert get_adapter("pi05").read_spec(base) == spec


def test_empty_cameras_are_lerobots(base: Path) -> None:
    change(base, "config.json", empty_cameras=2)
    theirs = PreTrainedConfig.from_pretrained(base)
    theirs.validate_features()
    assert get_adapter("pi05").read_spec(base).cameras == tuple(theirs.image_features)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("pi05", {"input_features": None}, "names no camera"),
        ("pi05", {"chunk_size": "many"}, "chunk_size"),
        ("pi05", {"image_resolution": 224}, "image_resolution"),
        ("pi05", {"input_features": [1]}, "input_features"),
        ("pi05", {"invented_field": 1}, "'invented_field'"),
        ("pi05", {"type": "pi0"}, "expected 'pi05'; set --policy.type"),
        ("pi0", {"type": "pi05"}, "expected 'pi0'; set --policy.type"),
        ("smolvla", {"adapt_to_pi_aloha": True}, "adapt_to_pi_aloha"),
        ("smolvla", {"add_image_special_tokens": True}, "add_image_special_tokens"),
        ("smolvla", {"resize_imgs_with_padding": None}, "resize_imgs_with_padding"),
        ("smolvla", {"resize_imgs_with_padding": [48, 64]}, "expected two equal sides, a multiple of 16"),
        ("smolvla", {"resize_imgs_with_padding": [40, 40]}, "expected two equal sides, a multiple of 16"),
        ("smolvla", {"num_expert_layers": 2}, "must divide the 3 layers"),
        ("smolvla", {"expert_width_multiplier": 1e17}, "the action expert's width"),
        ("smolvla", {"expert_width_multiplier": 0.0}, "an action expert of width 0"),
        ("smolvla", {"max_action_dim": 31}, "is it a SmolVLA base of another size or version?"),
        ("smolvla", {"chunk_size": 10**9}, "chunk_size is 1000000000"),
    ],
    ids=str,
)
def test_an_invalid_config_is_an_error(copied, kind: str, changes: dict[str, Any], message: str) -> None:
    folder = copied(kind)
    change(folder, "config.json", **changes)
    assert message in error(folder, kind)


@pytest.mark.parametrize("name", ["config.json", PREPROCESSOR])
def test_a_missing_or_damaged_file_is_named(base: Path, name: str) -> None:
    for content in ("{", "[]"):
        (base / name).write_text(content)
        assert f"{name} is not readable JSON" in error(base)
    (base / name).unlink()
    assert f"no {name} in it; expected a LeRobot pretrained_model folder" in error(base)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"registry_name": "to_batch_procesor"}, "did you mean to_batch_processor?"),
        ({"registry_name": "to_batch_processor", "config": {"x": 1}}, "'x'"),
        ({"registry_name": "device_processor", "config": {"device": ["cpu"]}}, "['cpu']"),
    ],
    ids=str,
)
@pytest.mark.parametrize("file", [PREPROCESSOR, POSTPROCESSOR])
def test_only_lerobots_processor_steps_are_allowed(base: Path, file: str, step: dict[str, Any], message: str) -> None:
    steps = json.loads((base / file).read_text())["steps"]
    change(base, file, steps=[*steps, step])
    found = error(base)
    assert message in found
    assert f"{file}, step {len(steps)}" in found


# Tokenizers


def test_the_tokenizer_step_sets_the_prompt_length(base: Path) -> None:
    change_step(base, max_length=9)
    assert get_adapter("pi05").read_spec(base).max_tokens == 9
    change_step(base, padding_side="left")
    assert "expected right" in error(base)


def test_a_tokenizer_is_found_in_a_folder_that_was_moved(base: Path) -> None:
    for name in ("tokenizer", "paligemma"):
        change_step(base, tokenizer_name=f"/elsewhere/base/{name}")
        assert get_adapter("pi05").read_spec(base).tokenizer_file == str(base / name / "tokenizer.json")
        (base / name).rename(base / "paligemma")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/elsewhere/none", "names the tokenizer '/elsewhere/none', which is not there"),
        (None, "names no tokenizer"),
        ("google/paligemma-3b-pt-224", "hub repository 'google/paligemma-3b-pt-224'"),
    ],
)
def test_a_missing_tokenizer_is_named(base: Path, name: str | None, message: str) -> None:
    shutil.rmtree(base / "tokenizer")
    change_step(base, tokenizer_name=name)
    assert message in error(base)


@pytest.mark.parametrize("steps", [None, {}, ["tokenizer"], [], [{"registry_name": "tokenizer_processor"}]], ids=str)
def test_a_preprocessor_without_a_tokenizer_is_an_error(base: Path, steps: Any) -> None:
    change(base, PREPROCESSOR, steps=steps)
    assert PREPROCESSOR in error(base)


# Weights


def load(folder: Path, kind: str = "pi05", train: str = "heads") -> dict[str, torch.Tensor]:
    """Return the tensors of LeRobot's policy as an export has them."""
    adapter = get_adapter(kind)
    spec = adapter.read_spec(folder)
    binding = Binding(tuple((camera, camera) for camera in spec.cameras), (), 2, 2, ())
    module: Any = adapter.load_module(spec, binding, ModuleOptions(train=train))
    return module.as_lerobot().state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_every_stored_tensor_and_every_buffer_is_loaded(bases, kind: str) -> None:
    stored, loaded = load_file(bases[kind] / SINGLE_FILE), load(bases[kind], kind)
    assert stored.keys() == loaded.keys()
    for name, tensor in stored.items():
        assert torch.equal(loaded[name], tensor), name


def cut_in_shards(folder: Path) -> list[str]:
    tensors = load_file(folder / SINGLE_FILE)
    (folder / SINGLE_FILE).unlink()
    names, weight_map = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)], {}
    for number, name in enumerate(names):
        part = {key: tensors[key] for position, key in enumerate(tensors) if position % 3 == number}
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return names


def test_shards_and_names_of_openpi_are_loaded(bases, base: Path) -> None:
    """openpi's checkpoints have no `model.`, an older name of the time MLP, and the tied table once."""

    def rename(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        short = {key.removeprefix("model."): value for key, value in tensors.items() if key != EMBEDDING}
        short[HEAD.removeprefix("model.")] = tensors[EMBEDDING]
        short = {key.replace("time_mlp_", "action_time_mlp_"): value for key, value in short.items()}
        return short | {"state_proj.weight": torch.zeros(2, 2)}

    expected = load(bases["pi05"])
    rewrite(base, rename)
    cut_in_shards(base)
    loaded = load(base)
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor if name != HEAD else expected[EMBEDDING]), name


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_separate_embedding_is_preferred_to_the_tied_one(base: Path, prefix: str) -> None:
    rewrite(base, lambda tensors: {f"{prefix}{key.removeprefix('model.')}": value for key, value in tensors.items()})
    stored, loaded = load_file(base / SINGLE_FILE), load(base)
    assert torch.equal(loaded[EMBEDDING], stored[f"{prefix}{EMBEDDING.removeprefix('model.')}"])
    assert not torch.equal(loaded[EMBEDDING], loaded[HEAD])


def test_missing_files_are_named(base: Path) -> None:
    names = cut_in_shards(base)
    (base / names[1]).unlink()
    assert f"{names[1]} is missing; download the base model again" in error(base)
    (base / INDEX_FILE).unlink()
    assert "model.safetensors is missing" in error(base)


@pytest.mark.parametrize("size", [7, -1])
def test_a_truncated_file_is_an_error(base: Path, size: int) -> None:
    (base / SINGLE_FILE).write_bytes((base / SINGLE_FILE).read_bytes()[:size])
    assert "model.safetensors is damaged" in error(base)


@pytest.mark.parametrize(
    "index",
    ["{", '{"weight_map": []}', '{"weight_map": {"a": "../other/model.safetensors"}}', '{"weight_map": {"a": 3}}'],
)
def test_an_invalid_index_is_an_error(base: Path, index: str) -> None:
    (base / INDEX_FILE).write_text(index)
    assert INDEX_FILE in error(base)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_do_not_match_are_an_error(copied, kind: str) -> None:
    """Some shapes are checked by the driver, all names and shapes when the model is loaded."""
    name, folder = "model.action_in_proj.weight", copied(kind)
    stored = load_file(folder / SINGLE_FILE)
    for changed in ({name: stored[name][:1].contiguous()}, {"model.extra.weight": torch.zeros(1)}):
        save_file(stored | changed, folder / SINGLE_FILE)
        with pytest.raises(ValueError, match=f"weights do not match the model: .*{next(iter(changed))}"):
            load(folder, kind)
    save_file({key: value for key, value in stored.items() if key != name}, folder / SINGLE_FILE)
    assert name in error(folder, kind)
    unchecked = "model.action_out_proj.bias"
    save_file({key: value for key, value in stored.items() if key != unchecked}, folder / SINGLE_FILE)
    with pytest.raises(ValueError, match=f"1 missing .*{unchecked}"):
        load(folder, kind)


# Sizes


def shapes(policy: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in policy.named_parameters()}


@pytest.mark.parametrize("kind", ["pi05", "pi0"])
def test_the_default_size_is_the_published_one(kind: str) -> None:
    from lerobot.policies.pi0 import modeling_pi0
    from lerobot.policies.pi05 import modeling_pi05

    from vlatune.policies.pi05.size import Pi05Size

    model = modeling_pi05.PI05Pytorch if kind == "pi05" else modeling_pi0.PI0Pytorch
    config: Any = PreTrainedConfig.get_choice_class(kind)(device="cpu")
    with torch.device("meta"):
        theirs = model(config)
        with building_at(Pi05Size()):
            assert shapes(model(config)) == shapes(theirs)


def test_lerobot_is_restored_and_the_hub_is_not_used(bases, monkeypatch) -> None:
    from lerobot.policies.smolvla import smolvlm_with_expert

    names = ("AutoConfig", "AutoProcessor", "AutoModelForImageTextToText")
    before = [getattr(smolvlm_with_expert, name) for name in names]
    for name in names:
        monkeypatch.setattr(getattr(smolvlm_with_expert, name), "from_pretrained", lambda *_, **__: pytest.fail("hub"))
    spec: Any = get_adapter("smolvla").read_spec(bases["smolvla"])
    build_policy(spec)
    with pytest.raises(RuntimeError), building_at(SMOLVLM_SIZE):
        raise RuntimeError
    assert [getattr(smolvlm_with_expert, name) for name in names] == before


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("pi05", {"depth": None}, "needs exactly ['depth'"),
        ("pi05", {"widht": 3}, "'widht'"),
        ("pi05", {"width": "wide"}, "width='wide'"),
        ("pi05", {"width": 0}, "width=0"),
        ("pi05", {"head_dim": 255}, "head_dim=255: must be even"),
        ("pi05", {"expert_width": 31}, "expert_width=31: must be even"),
        ("smolvla", {"vision_heads": 7}, "must be a multiple of vision_heads=7"),
        ("smolvla", {"depth": True}, "depth=True"),
        ("smolvla", {"width": 10**9}, "width:"),
    ],
    ids=str,
)
def test_an_invalid_size_file_is_an_error(copied, kind: str, changes: dict[str, Any], message: str) -> None:
    folder = copied(kind)
    values = asdict(SIZE if kind == "pi05" else SMOLVLM_SIZE) | changes
    (folder / SIZE_FILE).write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    assert message in error(folder, kind)


def test_a_base_of_another_size_is_an_error(copied, base: Path) -> None:
    (base / SIZE_FILE).unlink()
    assert "is it a PI0.5 base of another size or version?" in error(base)
    change(base, "config.json", action_expert_variant="gemma_2b")
    assert "expected gemma_2b with gemma_300m" in error(base)


def test_a_vision_language_model_of_unknown_size_is_an_error(copied) -> None:
    folder = copied("smolvla")
    (folder / SIZE_FILE).unlink()
    change(folder, "config.json", vlm_model_name="somebody/SmolVLM-9B")
    assert f"write its size to {folder / SIZE_FILE}" in error(folder, "smolvla")


# Tiny models


@pytest.mark.parametrize("kind", PACKAGES)
def test_a_tiny_model_depends_only_on_its_seed(kind: str, tmp_path) -> None:
    fit = Fit(("observation.images.top",), 3, 3, 4, 48, ("fold the towel",), 0, recorded_hw=((96, 96),))
    state = torch.get_rng_state()
    first, again, other = (tmp_path / name for name in ("first", "again", "other"))
    for folder, seed in ((first, 0), (again, 0), (other, 1)):
        get_adapter(kind).make_base(folder, replace(fit, seed=seed), small=True, place=folder)
    assert torch.equal(torch.get_rng_state(), state)
    for file in first.rglob("*.*"):
        if file.name != PREPROCESSOR:  # LeRobot finds the tokenizer by its absolute path
            assert (again / file.relative_to(first)).read_bytes() == file.read_bytes(), file
    assert (other / SINGLE_FILE).read_bytes() != (first / SINGLE_FILE).read_bytes()
    assert get_policy_class(kind).name == kind


def test_gradients_of_a_tiny_model_reach_images_words_and_time(tiny_case) -> None:
    """Closed gates would leave the prefix without gradient; see `init_for_scratch`."""
    module, batch = tiny_case
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):  # the expert's branches start at zero: the first step opens them
        optimizer.zero_grad()
        module(batch).loss.backward()
        optimizer.step()
    model = module.policy.model
    paligemma = model.paligemma_with_expert.paligemma.model
    vision = paligemma.vision_tower.vision_model.embeddings.patch_embedding.weight
    for weight in (vision, paligemma.language_model.embed_tokens.weight, model.time_mlp_in.weight):
        assert weight.grad.norm() > 0


@pytest.fixture
def tiny_case(small_base, dataset_v3) -> tuple[Any, dict[str, torch.Tensor]]:
    from parity.policies.flow_parity import Case

    case = Case("pi05", small_base, dataset_v3)
    return case.load("full"), case.batch
