"""An update over micro-batches equals one over the whole batch, and what it returns stays a tensor."""

import pytest
import torch
from regression import join, make_batches, make_model, make_updater

from vlatune.train.worker.optimizer import Updater


@pytest.mark.parametrize("micro_steps", [4, 3])
def test_accumulation_equals_the_whole_batch(micro_steps):
    """Three of four is an accumulation that the end of the data cut short."""
    one, many = make_model(), make_model()
    parts = make_batches(4, 2)
    whole = make_updater(one).update([join(parts[:micro_steps])], 1)
    accumulated = make_updater(many).update(parts, micro_steps)
    torch.testing.assert_close(accumulated.loss, whole.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(accumulated.grad_norm, whole.grad_norm, rtol=1e-6, atol=0)
    for ours, theirs in zip(one.parameters(), many.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_an_update_takes_no_more_batches_than_it_was_told():
    batches = iter(make_batches(3, 2))
    make_updater(make_model()).update(batches, 2)
    assert len(list(batches)) == 1


def test_batches_that_end_too_early_leave_the_weights_alone():
    model = make_model()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="3 micro-batches got only 2"):
        make_updater(model).update(make_batches(2, 2), 3)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(("clip_norm", "moved"), [(0.5, 0.5), (0.0, None)])
def test_gradients_are_clipped_and_the_norm_is_from_before(clip_norm, moved):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    batch = {"x": torch.full((2, 3), 100.0), "y": torch.zeros(2, 1)}
    result = Updater(model, list(model.parameters()), optimizer, clip_norm=clip_norm).update([batch], 1)
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert result.grad_norm > 0.5
    assert (after - before).norm() == pytest.approx(moved or float(result.grad_norm), rel=1e-4)


def test_loss_and_norm_stay_on_the_device():
    model = make_model()
    result = make_updater(model).update(make_batches(2, 2), 2)
    assert result.losses.shape == (2,)
    assert result.loss == result.losses.mean()
    assert isinstance(result.grad_norm, torch.Tensor)
    assert not result.loss.requires_grad
    assert all(p.grad is None for p in model.parameters())
