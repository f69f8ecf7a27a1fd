"""`vlatune bench step` at a tiny size: every figure is there, and the two ways compute the same."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from vlatune.bench.base_models import Scale, scaled_size, scaled_smolvlm
from vlatune.bench.options import PolicyBench, StepBench
from vlatune.bench.results_table import BARS
from vlatune.bench.step.step_bench import WayFigures, run
from vlatune.bench.step.step_ways import StepTime, Stopwatch, hidden_share, peak_bytes
from vlatune.cli import main
from vlatune.policies.pi05.size import Pi05Size
from vlatune.policies.registry import get_policy
from vlatune.policies.smolvla.smolvla_size import SmolVLMSize

pytestmark = pytest.mark.early
TINY = StepBench(
    width=64, depth=2, vision_depth=1, rounds=1, cameras=2, image_size=28, tokens=48, horizon=4, small_batch_size=1, small_steps=2
)  # fmt: skip
CONTRACT = {"heads_speedup", "expert_speedup", "host_syncs_per_micro_step", "lerobot_host_syncs_per_micro_step"}
CONTRACT |= {"host_overhead_share", "flow_samples_8_cost", "commit", "versions", "hardware", "settings"}


def test_the_last_line_holds_every_figure(capsys):
    run(TINY)
    lines = capsys.readouterr().out.splitlines()
    figures = json.loads(lines[-1])
    assert figures.keys() >= CONTRACT
    assert all(bar.figure in figures for bar in BARS["step"] if bar.figure != "language_speedup")
    assert figures["host_syncs_per_micro_step"] == 0
    assert figures["lerobot_host_syncs_per_micro_step"] >= 5
    assert figures["flow_samples_8_cost"] > 0
    assert 0 < figures["host_overhead_share"] < 1
    assert figures["by_train"].keys() == {"heads", "expert", "lora", "full"}
    for one in figures["by_train"].values():
        assert one["loss_difference"] < 1e-6
        assert all(seconds > 0 for seconds in one["seconds"].values())
    for train in ("heads", "expert"):  # the frozen prefix keeps nothing for the backward pass
        assert figures["by_train"][train]["activation_share"] < 1
    assert sum(line.startswith(("heads", "expert", "lora", "full")) for line in lines) == 11


OTHERS: dict[str, dict[str, Any]] = {
    "pi0": {"train": ("expert",)},
    "smolvla": {"train": ("expert", "language"), "width": 192, "image_size": 64, "keep_features": True},
    "act": {"width": 32, "image_size": 64},
    "diffusion": {"width": 16, "image_size": 64},
}
"""What differs from TINY; ACT and Diffusion Policy have one way to train, of the others these are enough."""


@pytest.mark.parametrize("kind", OTHERS)
def test_another_policys_step_is_measured_by_its_type(kind, capsys):
    """LeRobot's own step beside ours, on the same draws."""
    run(replace(TINY, policy=PolicyBench(kind), small_steps=1, **OTHERS[kind]))
    lines = capsys.readouterr().out.splitlines()
    figures = json.loads(lines[-1])
    ways = OTHERS[kind].get("train") or tuple(get_policy(kind).train_ways)
    assert figures.keys() >= CONTRACT
    assert figures["settings"]["policy"] == {"type": kind}
    assert figures["host_syncs_per_micro_step"] == 0
    assert figures["lerobot_host_syncs_per_micro_step"] >= 1
    assert figures["by_train"].keys() == set(ways)
    assert all(one["loss_difference"] < 1e-6 for one in figures["by_train"].values())
    assert all(figures[f"{train}_speedup"] > 0 for train in ways)
    if "expert" in ways:
        assert figures["by_train"]["expert"]["draws_cost"] > 0
    else:
        assert figures["expert_speedup"] is figures["flow_samples_8_cost"] is None
    kept = len(ways) if "keep_features" in OTHERS[kind] else 0
    assert [figures[f"{train}_kept_speedup"] > 0 for train in ways if kept] == [True] * kept
    assert sum(line.startswith(tuple(ways)) for line in lines) == 2 * len(ways) + kept + ("expert" in ways) + 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["bench", "step", "--keep_features=true"],
            "--keep_features=true: PI0.5 (--policy.type=pi05) keeps none; leave it out",
        ),
        (["bench", "step", "--train=everything"], "--train=everything: must be one of heads, expert, lora, full"),
        (["bench", "step", "--policy.type=act", "--train=expert"], "--train=expert: must be one of full"),
        (["bench", "step", "--policy.type=smolvla", "--width=100"], "--width=100: must be a multiple of 192"),
        (["bench", "step", "--rounds=0"], "--rounds=0: must be 1 or more"),
        (["bench", "step", "--codec=av1"], "unknown flag --codec"),
        (["bench", "stpe"], "unknown benchmark 'stpe'; did you mean step?"),
    ],
)
def test_mistakes_are_named(words, says, capsys):
    assert main(words) == 2
    assert says in capsys.readouterr().err


def test_at_the_published_width_the_size_is_the_published_one():
    assert scaled_size(Scale(2048, 18, 27, 224), vocab_size=257_152) == Pi05Size()
    assert scaled_smolvlm(Scale(960, 32, 12, 512), vocab_size=49_280) == SmolVLMSize()


def test_peak_memory_is_the_most_that_was_held_at_once():
    weight = torch.ones(256, 1024, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    one = weight.numel() * 4

    def keeps_two() -> None:  # exp and sin keep what they were given
        weight.exp().sin().sum().backward()

    assert 2 * one <= peak_bytes(keeps_two, torch.device("cpu")) <= 5 * one
    assert peak_bytes(lambda: [torch.ones(256, 1024) for _ in range(9)], torch.device("cpu")) >= 9 * one


def test_what_is_in_no_phase_is_the_hosts():
    taken = StepTime(forward_s=1.0, backward_s=2.0, optimizer_s=0.5, total_s=4.0)
    assert taken.model_s == 3.0
    assert taken.host_s == 0.5
    assert taken.host_share == 0.125


def test_a_phase_that_comes_twice_is_added_up():
    watch = Stopwatch(torch.device("cpu"))

    def step() -> None:
        for name in ("forward", "forward", "backward"):
            with watch.phase(name):
                torch.ones(64, 64).exp()

    first, second = watch.time(step), watch.time(step)
    for taken in (first, second):
        assert taken.forward_s > 0
        assert taken.backward_s > 0
        assert taken.optimizer_s == 0
        assert taken.total_s >= taken.model_s


def test_ratios_are_taken_inside_a_round():
    slow = WayFigures([StepTime(2, 0, 0, 2), StepTime(20, 0, 0, 20), StepTime(6, 0, 0, 6)])
    fast = WayFigures([StepTime(1, 0, 0, 1), StepTime(10, 0, 0, 10), StepTime(2, 0, 0, 2)])
    assert slow.ratio("total_s", fast) == 2.0


@pytest.mark.parametrize(
    ("copies", "kernels", "share"),
    [
        ([(0, 10)], [(0, 4), (2, 6)], 0.6),
        ([(0, 2), (8, 10)], [(1, 9)], 0.5),
        ([(0, 1)], [], 0.0),
        ([], [(0, 1)], None),
    ],
)
def test_hidden_copies(copies, kernels, share):
    assert hidden_share(copies, kernels) == (None if share is None else pytest.approx(share))
