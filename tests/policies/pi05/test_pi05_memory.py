"""Loading holds the model once, where it is used, and of the host's memory one tensor; bytes are counted, not measured."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import CUDA, fake_cuda
from pi05_parity import WAYS
from safetensors.torch import load_file
from tensor_bytes import TensorBytes, bytes_of

from vlatune.batch import ACTION, NOISE, TIME, TOKEN_MASK, TOKENS
from vlatune.policies.base import Binding, ModuleOptions
from vlatune.policies.pi05 import module as pi05_module
from vlatune.policies.pi05.load import plan_policy
from vlatune.policies.pi05.module import load_pi05
from vlatune.policies.pi05.trainable import add_adapters, set_trainable
from vlatune.recipes import get_recipe

DOCS = Path(__file__).parents[3] / "docs" / "memory.md"
GB = 1e9
CAMERAS = ("observation.images.base", "observation.images.left", "observation.images.right")


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


@pytest.mark.parametrize("train", WAYS)
def test_the_table_of_activations_at_real_size(published, train):
    kept = [kept_bytes(published, train, again=again) / GB for again in (False, True)]
    row = f"| `pi05-{train}` | {kept[0]:.2f} | {kept[1]:.2f} |"
    assert row in DOCS.read_text(), row


def kept_bytes(folder: Path, train: str, *, again: bool) -> int:
    """What autograd keeps of the forward of one sample beside the weights, on the meta device."""
    options = ModuleOptions(train=train, dtype="bfloat16", gradient_checkpointing=again)
    binding = Binding(tuple((camera, camera) for camera in CAMERAS), (), 14, 14, ())
    spec: Any = SimpleNamespace(folder=str(folder), cameras=CAMERAS, overrides={})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pi05_module, "load_policy", lambda folder, device, **wanted: plan_policy(folder, **wanted))
        module = load_pi05(spec, binding, options).to("meta").train()
    weights = {p.untyped_storage()._cdata for p in module.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage  # held, so that its place is not given out again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(one_sample())
    return sum(storage.nbytes() for storage in kept.values())


def one_sample() -> dict[str, torch.Tensor]:
    """Three cameras, 200 tokens, a chunk of 50 actions."""

    def made(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(1, *shape, dtype=dtype, device="meta")

    return {camera: made(3, 224, 224, dtype=torch.uint8) for camera in CAMERAS} | {
        TOKENS: made(200, dtype=torch.int64),
        TOKEN_MASK: made(200, dtype=torch.bool),
        ACTION: made(50, 32),
        NOISE: made(1, 50, 32),
        TIME: made(1),
    }


def test_the_recipe_that_keeps_most_computes_layers_again():
    assert [train for train in WAYS if get_recipe(f"pi05-{train}")["policy"]["gradient_checkpointing"]] == ["full"]
