"""Loading holds the model once, where it is used, and of the host's memory one tensor; bytes are counted, not measured."""

from pathlib import Path

import pytest
from fake_cuda import CUDA, fake_cuda
from pi05_parity import WAYS
from safetensors.torch import load_file
from tensor_bytes import TensorBytes, bytes_of

from vlatune.policies.base import ModuleOptions
from vlatune.policies.pi05.load import plan_policy
from vlatune.policies.pi05.trainable import add_adapters, set_trainable
from vlatune.recipes import get_recipe

DOCS = Path(__file__).parents[3] / "docs" / "memory.md"
GB = 1e9


def load(setup, train: str, dtype: str, device="cpu"):
    return setup.adapter.load_module(setup.policy, setup.binding, ModuleOptions(train=train, dtype=dtype), device)


@pytest.fixture(scope="module")
def largest(parity_base) -> int:
    return max(bytes_of([tensor]) for tensor in load_file(parity_base / "model.safetensors").values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("train", WAYS)
def test_loading_takes_the_model_and_one_tensor(setup, largest, train, dtype):
    with TensorBytes() as counter:
        module = load(setup, train, dtype)
    model = bytes_of([*module.parameters(), *module.buffers()])
    assert counter.peak["cpu"] <= model + largest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("train", WAYS)
def test_loading_to_a_gpu_takes_one_tensor_of_the_host(setup, largest, train, dtype):
    with fake_cuda(), TensorBytes() as counter:
        module = load(setup, train, dtype, CUDA)
    model, buffers = bytes_of([*module.parameters(), *module.buffers()]), bytes_of(module.buffers())
    assert counter.peak["cpu"] <= 2 * largest + buffers  # as it is stored, and as it is rounded
    assert model <= counter.peak["cuda"] <= model + largest


def test_what_no_forward_uses_is_not_loaded(setup, parity_base):
    module = load(setup, "heads", "float32")
    assert {name for name in load_file(parity_base / "model.safetensors") if "lm_head" in name}
    assert not [name for name, _ in module.named_parameters() if "lm_head" in name]


# At the published size: shapes and dtypes as training has them, without memory


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    from lerobot.policies.pi05 import PI05Config

    folder = tmp_path_factory.mktemp("published")
    PI05Config(device="cpu", push_to_hub=False).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("train", WAYS)
def test_the_table_of_bytes_at_real_size(published, train):
    recipe = get_recipe(f"pi05-{train}")["policy"]
    policy = plan_policy(published, train=train, dtype=recipe["dtype"], lean=True)
    if train == "lora":
        add_adapters(policy, rank=ModuleOptions.lora_rank, alpha=ModuleOptions.lora_alpha)
        set_trainable(policy, train)
    weights, trained = (
        bytes_of(p for p in policy.parameters()),
        bytes_of(p for p in policy.parameters() if p.requires_grad),
    )
    state = weights + 3 * trained
    figures = [weights / GB, trained / GB, 2 * trained / GB, state / GB, (state + trained) / GB, 3 * trained / GB]
    row = f"| `pi05-{train}` | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |"
    assert row in DOCS.read_text(), row


def test_the_recipe_that_keeps_most_computes_layers_again():
    assert [train for train in WAYS if get_recipe(f"pi05-{train}")["policy"]["gradient_checkpointing"]] == ["full"]
