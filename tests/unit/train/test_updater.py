"""Updates over micro-batches, and the exponential moving average."""

import pytest
import torch
from regression import join, make_batches, make_model, make_updater

from vlatune.config.settings import OptimizerConfig
from vlatune.train.worker.optimizer import Ema, Updater, make_optimizer


@pytest.mark.parametrize("micro_steps", [4, 3])
def test_accumulation_equals_one_large_batch(micro_steps):
    one, many = make_model(), make_model()
    parts = make_batches(4, 2)
    expected = make_updater(one).update([join(parts[:micro_steps])], 1)
    batches = iter(parts)
    accumulated = make_updater(many).update(batches, micro_steps)
    assert len(list(batches)) == 4 - micro_steps  # no more batches are taken
    torch.testing.assert_close(accumulated.loss, expected.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(accumulated.grad_norm, expected.grad_norm, rtol=1e-6, atol=0)
    for ours, theirs in zip(one.parameters(), many.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert accumulated.losses.shape == (micro_steps,)
    assert not accumulated.loss.requires_grad
    assert all(p.grad is None for p in many.parameters())


def test_missing_batches_leave_the_weights_unchanged():
    model = make_model()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="3 micro-batches got only 2"):
        make_updater(model).update(make_batches(2, 2), 3)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("clip_norm", [0.5, 1e6, 0.0])
@pytest.mark.parametrize("kind", ["adamw", "adam"])
def test_updates_are_those_of_torchs_clipping(kind, clip_norm):
    config = OptimizerConfig(lr=0.1, grad_clip_norm=clip_norm, type=kind, eps=1.0)  # eps: the size of gradients matters
    ours, theirs = make_model(), make_model()
    updater = Updater(
        ours, list(ours.parameters()), make_optimizer(ours.parameters(), config), clip_norm=config.grad_clip_norm
    )
    peer = make_optimizer(theirs.parameters(), config)
    for batch in make_batches(3, 4):
        scaled = batch | {"x": 10 * batch["x"]}
        theirs(scaled).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip_norm or float("inf"))
        peer.step()
        peer.zero_grad()
        assert updater.update([scaled], 1).grad_norm == norm > 0.5
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6 if clip_norm == 0.5 else 0, atol=0)


@pytest.mark.parametrize(("dtype", "decay"), [(torch.float32, 0.9), (torch.bfloat16, 0.999)])
def test_moving_average_starts_with_the_weights_and_is_float32(dtype, decay):
    torch.manual_seed(0)
    weights = {name: torch.nn.Parameter(torch.randn(4, 3).to(dtype)) for name in ("a", "b")}
    expected = {name: weight.detach().double() for name, weight in weights.items()}
    ema = Ema(weights, decay)
    for _ in range(5):
        for name, weight in weights.items():
            weight.data += 0.1
            expected[name] = decay * expected[name] + (1 - decay) * weight.detach().double()
        ema.update()
    for name, average in ema.tensors().items():
        assert average.dtype == torch.float32
        torch.testing.assert_close(average.double(), expected[name], rtol=1e-6, atol=1e-6)
    trained = {name: weight.detach().clone() for name, weight in weights.items()}
    with ema.in_place():
        assert all(torch.equal(weights[name], expected[name].to(dtype)) for name in weights if dtype == torch.bfloat16)
    assert all(torch.equal(weights[name], trained[name]) for name in weights)
