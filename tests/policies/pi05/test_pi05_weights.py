"""A base model's files: all of them are read, in every form that LeRobot knows, or refused in one sentence."""

import json
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies.pi05 import PI05Config, modeling_pi05
from pi05_parity import SIZE
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from vlatune.policies import loading
from vlatune.policies.base import ModuleOptions
from vlatune.policies.pi05.adapter import Pi05Adapter
from vlatune.policies.pi05.load import load_policy, parse_config
from vlatune.policies.pi05.size import Pi05Size, building_at
from vlatune.policies.pi05.weights import EMBEDDING, model_names, shapes_at
from vlatune.policies.weight_files import INDEX_FILE, SINGLE_FILE

HEAD = "model.paligemma_with_expert.paligemma.lm_head.weight"
NAME = "model.action_in_proj.weight"


@pytest.fixture
def base(parity_base, tmp_path) -> Path:
    return Path(shutil.copytree(parity_base, tmp_path / "base"))


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    save_file(change(tensors), folder / SINGLE_FILE)


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


def without_prefix(tensors: dict[str, Any]) -> dict[str, Any]:
    """As openpi's checkpoints came over: no `model.`, an older name of the time MLP, and the tied table once."""
    short = {key.removeprefix("model."): value for key, value in tensors.items() if key != EMBEDDING}
    short["paligemma_with_expert.paligemma.lm_head.weight"] = tensors[EMBEDDING]
    short = {key.replace("time_mlp_", "action_time_mlp_"): value for key, value in short.items()}
    return short | {"state_proj.weight": torch.zeros(2, 2)}


def refusal(folder: Path) -> str:
    """What the driver says, which must be one line and what the worker would say, too."""
    with pytest.raises(ValueError, match=f"policy '{folder}'") as caught:
        Pi05Adapter().read_spec(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What must be there


@pytest.mark.parametrize("size", [Pi05Size(), SIZE], ids=["published", "small"])
def test_the_table_of_shapes_is_lerobots_model(size):
    config = PI05Config(device="cpu", image_resolution=(224, 224))
    with torch.device("meta"), building_at(size):
        model = modeling_pi05.PI05Pytorch(config)
    theirs = {f"model.{name}": tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes_at(size, image_size=224, action_dims=config.max_action_dim) == theirs


def test_names_are_mapped_as_lerobot_maps_them(lerobot_policy):
    names = list(lerobot_policy.state_dict())
    expert = "paligemma_with_expert.gemma_expert.model."
    odd = [f"{expert}layers.1.input_layernorm.weight", f"{expert}norm.weight", "state_proj.bias", "something.else"]
    odd += ["action_time_mlp_in.weight", "action_time_mlp_out.bias"]
    for given in (names, [name.removeprefix("model.") for name in names if name != EMBEDDING], odd):
        fixed = lerobot_policy._fix_pytorch_state_dict_keys({name: torch.zeros(1) for name in given}, None)
        theirs = {key if key.startswith("model.") else f"model.{key}" for key in fixed}
        assert {mapped for name in given for mapped in model_names(name)} == theirs


# Loading it


def test_every_tensor_is_the_stored_one(parity_base):
    stored = load_file(parity_base / SINGLE_FILE)
    loaded = load_policy(parity_base, train="heads", dtype=None).state_dict()
    assert stored.keys() == loaded.keys()
    for name, tensor in stored.items():
        assert torch.equal(loaded[name], tensor), name


def test_no_weight_gets_a_first_value_and_what_is_in_no_file_is_lerobots(parity_base, lerobot_policy, monkeypatch):
    """Frequencies, places of patches and the like have their values from constructors."""

    def initialize(_) -> None:
        raise AssertionError

    monkeypatch.setattr(PreTrainedModel, "initialize_weights", initialize)
    ours = dict(load_policy(parity_base, train="heads", dtype=None).named_buffers())
    assert PreTrainedModel.initialize_weights is initialize  # it is given back
    theirs = dict(lerobot_policy.named_buffers())
    assert ours.keys() == theirs.keys() != set()
    for name, buffer in theirs.items():
        assert torch.equal(ours[name], buffer), name


def test_shards_and_older_names_load_the_same(parity_base, base):
    expected = load_policy(parity_base, train="heads", dtype=None).state_dict()
    rewrite(base, without_prefix)
    for _ in range(2):
        assert Pi05Adapter().read_spec(base)
        loaded = load_policy(base, train="heads", dtype=None).state_dict()
        for name, tensor in expected.items():
            assert torch.equal(loaded[name], tensor if name != HEAD else expected[EMBEDDING]), name
        if (base / SINGLE_FILE).exists():
            cut_in_shards(base)


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_table_of_its_own_goes_before_the_tied_one(base, prefix):
    """After full fine-tuning the embedding has moved away from the unused output head."""
    rewrite(base, lambda tensors: {f"{prefix}{key.removeprefix('model.')}": value for key, value in tensors.items()})
    stored = load_file(base / SINGLE_FILE)
    loaded = load_policy(base, train="heads", dtype=None).state_dict()
    assert torch.equal(loaded[EMBEDDING], stored[f"{prefix}{EMBEDDING.removeprefix('model.')}"])
    assert not torch.equal(loaded[EMBEDDING], loaded[HEAD])


def test_no_second_copy_of_the_weights_is_held(parity_base, monkeypatch):
    held: list[weakref.ref] = []
    opened = loading.safe_open

    class Spy:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = opened(*args, **kwargs)

        def __enter__(self):
            self.tensors = self.file.__enter__()
            return self

        def __exit__(self, *error: object):
            return self.file.__exit__(*error)

        def get_tensor(self, name: str) -> torch.Tensor:
            assert all(reference() is None for reference in held)
            tensor = self.tensors.get_tensor(name)
            held.append(weakref.ref(tensor))
            return tensor

    monkeypatch.setattr(loading, "safe_open", Spy)
    policy = load_policy(parity_base, train="heads", dtype="bfloat16")
    assert len(held) == len(list(policy.parameters()))


def test_a_loaded_model_does_not_depend_on_the_file(base):
    policy = load_policy(base, train="heads", dtype=None)
    before = policy.model.time_mlp_in.weight.clone()
    with (base / SINGLE_FILE).open("r+b") as file:
        file.write(b"\0" * (base / SINGLE_FILE).stat().st_size)
    assert torch.equal(policy.model.time_mlp_in.weight, before)


def test_the_bases_own_wishes_for_training_are_not_followed(base):
    """A checkpoint of LeRobot remembers how it was trained; how it trains now is ours to say."""
    config = json.loads((base / "config.json").read_text())
    config |= {"gradient_checkpointing": True, "compile_model": True, "train_expert_only": True}
    (base / "config.json").write_text(json.dumps(config))
    policy = load_policy(base, train="full", dtype=None)
    joint = policy.model.paligemma_with_expert
    assert not policy.model.gradient_checkpointing_enabled
    assert joint.paligemma.model.language_model.layers[0].self_attn.k_proj.weight.requires_grad


# Refusing it


def test_a_missing_shard(base):
    names = cut_in_shards(base)
    (base / names[1]).unlink()
    assert f"{names[1]} is missing; fetch the base model anew" in refusal(base)


def test_no_weights_at_all(base):
    (base / SINGLE_FILE).unlink()
    assert "model.safetensors is missing" in refusal(base)


@pytest.mark.parametrize("size", [0, 7, 1000, -1])
def test_a_truncated_file(base, size):
    file = base / SINGLE_FILE
    file.write_bytes(file.read_bytes()[:size])
    assert "model.safetensors is damaged" in refusal(base)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: {k: v for k, v in t.items() if k != NAME}, f"1 missing ['{NAME}'], 0 unexpected []"),
        (lambda t: t | {"model.extra.weight": torch.zeros(1)}, "0 missing [], 1 unexpected ['model.extra.weight']"),
        (lambda t: t | {NAME: t[NAME][:1].contiguous()}, f"'{NAME}' in model.safetensors has shape (1, 32), expected"),
    ],
    ids=["missing key", "wrong key", "wrong shape"],
)
def test_tensors_that_do_not_fit(base, change, says):
    rewrite(base, change)
    assert says in refusal(base)
    with pytest.raises(ValueError, match="the weights do not fit the model"):
        load_policy(base, train="heads", dtype=None)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("{", "is damaged"),
        ('{"weight_map": []}', "is damaged"),
        ('{"weight_map": {"a": "../other/model.safetensors"}}', "names '../other/model.safetensors', expected a file"),
        ('{"weight_map": {"a": 3}}', "names '3', expected a file"),
    ],
)
def test_an_index_that_cannot_be(base, index, says):
    (base / INDEX_FILE).write_text(index)
    assert says in refusal(base)


def test_a_base_of_another_size(base):
    (base / "vlatune_size.json").unlink()
    assert "is it a PI0.5 base of another size or version?" in refusal(base)


def test_a_variant_that_is_not_known(base):
    (base / "vlatune_size.json").unlink()
    config = json.loads((base / "config.json").read_text()) | {"action_expert_variant": "gemma_2b"}
    (base / "config.json").write_text(json.dumps(config))
    assert "config.json asks for gemma_2b with gemma_2b, expected gemma_2b with gemma_300m" in refusal(base)


def test_a_config_that_lerobot_does_not_understand(setup, base):
    """Found where LeRobot is: the driver does without it."""
    config = json.loads((base / "config.json").read_text()) | {"invented_field": 1}
    (base / "config.json").write_text(json.dumps(config))
    spec = Pi05Adapter().read_spec(base)
    with pytest.raises(ValueError, match=r"the installed LeRobot does not understand config\.json") as caught:
        Pi05Adapter().load_module(spec, setup.binding, ModuleOptions(train="heads"))
    assert "\n" not in str(caught.value)


def test_the_driver_looks_without_torch_and_lerobot(parity_base):
    code = (
        "import sys, pathlib; from vlatune.policies.pi05.adapter import Pi05Adapter; "
        f"Pi05Adapter().read_spec(pathlib.Path({str(parity_base)!r})); "
        "print(*({'torch', 'lerobot', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_config_is_what_lerobot_reads_and_leaves_no_file_behind(small_base, tmp_path, monkeypatch):
    theirs = PreTrainedConfig.from_pretrained(small_base, local_files_only=True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert parse_config(small_base) == theirs
    assert list(tmp_path.iterdir()) == []
