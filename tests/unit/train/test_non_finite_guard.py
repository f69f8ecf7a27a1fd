"""Values that are not finite never reach the weights, and the run stops with the samples' names."""

import copy

import numpy as np
import pytest
import torch
from regression import Regression, make_batches, make_model, make_updater

from vlatune.errors import RunStoppedError
from vlatune.policies.base import PolicyOutput
from vlatune.train.worker.non_finite_guard import MAX_SAMPLES_NAMED, NonFiniteGuard, NonFiniteWatch, Part, explain


def snapshot(model, updater) -> tuple:
    return copy.deepcopy((model.state_dict(), updater._optimizer.state_dict()["state"]))


def equal(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return all(equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_and_moments_do_not_change_from_the_first_bad_update_on(value):
    model = make_model()
    updater = make_updater(model)
    good = make_batches(2, 4)
    updater.update(good, 2)
    before = snapshot(model, updater)
    bad = [good[0], good[1] | {"y": torch.full((4, 1), value)}]
    updater.update(bad, 2)
    assert equal(snapshot(model, updater), before)
    assert not np.isfinite(updater.update(bad, 2).losses[1])
    updater.update(good, 2)  # finite again, but the host has not checked yet
    assert equal(snapshot(model, updater), before)
    assert updater.guard.skipped == 3


def test_finite_updates_change_the_weights():
    model = make_model()
    updater = make_updater(model)
    before = snapshot(model, updater)
    updater.update(make_batches(1, 4), 1)
    assert updater.guard.skipped == 0
    assert not equal(snapshot(model, updater)[0], before[0])


def test_a_loss_that_is_not_finite_counts_even_if_its_gradient_is_finite():
    class Offset(Regression):
        def forward(self, batch):
            return PolicyOutput(super().forward(batch).loss + batch["offset"])

    updater = make_updater(Offset())
    updater.update([make_batches(1, 4)[0] | {"offset": torch.tensor(float("nan"))}], 1)
    assert updater.guard.skipped == 1


def test_only_a_fused_optimizer_is_accepted():
    with pytest.raises(ValueError, match="only a fused optimizer"):
        NonFiniteGuard(torch.optim.AdamW(make_model().parameters()), torch.device("cpu"))


def alone(mine):
    return [mine]


def test_the_watch_names_the_step_the_loss_and_the_samples_of_the_bad_micro_batch():
    watch = NonFiniteWatch()
    good, nan = torch.tensor([0.5, 0.4]), torch.tensor([0.5, float("nan")])
    for step, losses in enumerate((good, nan, nan), start=11):
        ids = [np.array([[0, 10 * step], [0, 10 * step + 1]]), np.array([[1, 10 * step + 2], [0, 10 * step + 3]])]
        watch.record(losses, torch.tensor(float("nan")), ids)
    with pytest.raises(RunStoppedError) as raised:
        watch.check(2.0, 13, alone)
    printed = str(raised.value)
    assert "optimizer step 12: the loss is nan (rank 0, micro-step 1)" in printed
    assert "(dataset_index, index): (1, 122), (0, 123);" in printed
    assert "--optimizer.lr" in printed


def test_a_check_without_findings_forgets_the_samples():
    watch = NonFiniteWatch()
    watch.record(torch.tensor([1.0]), torch.tensor(1.0), [np.array([[0, 1]])])
    watch.check(0.0, 1, alone)
    watch.record(torch.tensor([float("inf")]), torch.tensor(float("nan")), [np.array([[0, 2]])])
    with pytest.raises(RunStoppedError, match=r"optimizer step 2: the loss is inf .* \(0, 2\);"):
        watch.check(1.0, 2, alone)


def test_a_gradient_that_overflows_names_every_sample_of_the_step():
    parts = [Part([0.5], float("inf"), [[[0, 3]]]), Part([0.7], float("inf"), [[[0, 9]]])]
    printed = explain(5, parts)
    assert "optimizer step 5: the gradient norm is inf" in printed
    assert "(0, 3), (0, 9);" in printed


def test_a_long_list_of_samples_is_truncated():
    ids = [[0, index] for index in range(MAX_SAMPLES_NAMED + 5)]
    assert "and 5 more;" in explain(1, [Part([float("nan")], float("nan"), [ids])])
