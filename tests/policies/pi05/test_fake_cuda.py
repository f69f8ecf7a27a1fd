"""PI0.5 on CUDA tensors without a GPU: loading, the loss of all four ways, sampling. See `tests/fake_cuda.py`."""

import pytest
import torch
from fake_cuda import CUDA, fake_cuda, is_fake_cuda
from pi05_parity import WAYS
from torch._subclasses.fake_tensor import DataDependentOutputException

from vlatune.batch import ACTION
from vlatune.policies.base import ModuleOptions
from vlatune.policies.pi05 import forward

DTYPES = ("float32", "bfloat16")


def load(setup, train: str, dtype: str, **more):
    options = ModuleOptions(train=train, dtype=dtype, **more)
    return setup.adapter.load_module(setup.policy, setup.binding, options, CUDA)


def on_cuda(batch):
    return {key: value.to(CUDA) for key, value in batch.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("train", WAYS)
def test_loading_the_loss_and_sampling_stay_on_the_device(setup, batch, train, dtype):
    with fake_cuda():
        module = load(setup, train, dtype, gradient_checkpointing=True).train()
        assert all(is_fake_cuda(one) for one in (*module.parameters(), *module.buffers()))
        there = on_cuda(batch)
        loss = module(there)
        assert is_fake_cuda(loss)
        assert loss.requires_grad
        module.policy.config.num_inference_steps = 2  # each does what the one before did, slowly here
        actions = module.eval().predict(there, torch.randn_like(there[ACTION]))
        assert is_fake_cuda(actions)


def test_a_tensor_made_on_the_wrong_device_is_caught(setup, batch, monkeypatch):
    """As if somebody forgot `device=`: on a CPU every test would pass."""
    made = torch.arange
    monkeypatch.setattr(forward.torch, "arange", lambda *args, device=None, **more: made(*args, **more))
    module = load_and_forward(setup, batch)
    with pytest.raises(RuntimeError, match="different devices"):
        module()


def test_a_buffer_left_on_the_host_is_caught(setup, batch):
    with fake_cuda():
        module, there = load(setup, "heads", "float32"), on_cuda(batch)
        module.time_scale = module.time_scale.to("cpu")
        with pytest.raises(RuntimeError, match="different devices"):
            module(there)


def test_a_value_read_on_the_host_is_caught(setup, batch, monkeypatch):
    embed = forward.embed_words

    def embed_and_look(embedding, tokens, dtype):
        assert tokens.max() >= 0  # a check that costs a wait for the device in every step
        return embed(embedding, tokens, dtype)

    monkeypatch.setattr(forward, "embed_words", embed_and_look)
    with pytest.raises(DataDependentOutputException):
        load_and_forward(setup, batch)()


def load_and_forward(setup, batch):
    def run() -> None:
        with fake_cuda():
            load(setup, "expert", "float32")(on_cuda(batch))

    return run
