"""The average is the textbook's, kept in float32, and goes on where it was."""

import torch

from vlatune.train.worker.optimizer import Ema


def make_weights(dtype=torch.float32) -> dict[str, torch.nn.Parameter]:
    torch.manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(4, 3, dtype=dtype)) for name in ("a", "b")}


def walk(weights: dict[str, torch.nn.Parameter], *emas: Ema, steps: int = 5) -> None:
    for _ in range(steps):
        with torch.no_grad():
            for weight in weights.values():
                weight += 0.1
        for ema in emas:
            ema.update()


def test_the_average_is_the_textbooks():
    weights = make_weights()
    expected = {name: weight.detach().double() for name, weight in weights.items()}
    ema = Ema(weights, 0.9)
    for _ in range(5):
        walk(weights, ema, steps=1)
        expected = {name: 0.9 * average + 0.1 * weights[name].detach() for name, average in expected.items()}
    for name, average in ema.tensors().items():
        torch.testing.assert_close(average.double(), expected[name], rtol=1e-6, atol=1e-6)
        assert not average.requires_grad


def test_it_begins_with_the_weights_and_is_not_the_weights():
    weights = make_weights()
    ema = Ema(weights, 0.9)
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    walk(weights, steps=1)
    assert all(torch.equal(ema.tensors()[name], before[name]) for name in weights)


def test_small_steps_of_bfloat16_weights_are_not_lost():
    weights = make_weights(torch.bfloat16)
    ema = Ema(weights, 0.999)
    walk(weights, ema, steps=1)
    start = make_weights(torch.bfloat16)
    assert all((ema.tensors()[name] != start[name].float()).any() for name in weights)


def test_averages_that_are_copied_back_go_on_as_if_nothing_had_happened():
    weights = make_weights()
    whole = Ema(weights, 0.9)
    walk(weights, whole)
    resumed = Ema(weights, 0.9)
    for name, average in resumed.tensors().items():
        average.copy_(whole.tensors()[name])
    walk(weights, whole, resumed)
    assert all(torch.equal(whole.tensors()[name], resumed.tensors()[name]) for name in weights)
