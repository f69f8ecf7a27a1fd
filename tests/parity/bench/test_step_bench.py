"""The step benchmark at a tiny size: all figures, and equal losses of both programs."""

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.base_models import Scale, scaled_size
from benchmarks.options import PolicyBench, StepBench
from benchmarks.step.step_bench import run
from benchmarks.tables import COLUMNS
from vlatune.policies.pi05.size import Pi05Size
from vlatune.registry import get_policy_info

TINY = StepBench(width=64, depth=2, vision_depth=1, rounds=1, cameras=2, image_size=28, tokens=48, horizon=4)
CONTRACT = {"heads_speedup", "expert_speedup", "host_syncs_per_micro_step", "lerobot_host_syncs_per_micro_step"}
CONTRACT |= {"commit", "versions", "hardware", "settings"}


def test_the_last_line_has_all_figures(capsys):
    run(TINY)
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures.keys() >= CONTRACT
    assert {key for key, _ in COLUMNS["step"][1]} <= figures.keys()
    assert figures["host_syncs_per_micro_step"] == 0
    assert figures["lerobot_host_syncs_per_micro_step"] >= 5
    assert figures["by_train"].keys() == {"heads", "expert", "lora", "full"}
    for one in figures["by_train"].values():
        assert one["loss_difference"] < 1e-6
        assert all(seconds > 0 for seconds in one["seconds"].values())
        assert one["activation_bytes"] > 0
    for train in ("heads", "expert"):  # the frozen prefix keeps nothing for the backward pass
        one = figures["by_train"][train]
        assert one["activation_bytes"] < one["lerobot_activation_bytes"]


OTHERS: dict[str, dict[str, Any]] = {
    "pi0": {"train": ("expert",)},
    "smolvla": {"train": ("expert",), "image_size": 64},
    "act": {"width": 32, "image_size": 64},
    "diffusion": {"width": 16, "image_size": 64},
}
"""Settings that differ from TINY."""


@pytest.mark.parametrize("policy", OTHERS)
def test_the_steps_of_other_policies_are_measured(policy, capsys):
    run(replace(TINY, policy=PolicyBench(policy), **OTHERS[policy]))
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    modes = OTHERS[policy].get("train") or tuple(get_policy_info(policy).train_modes)
    assert figures.keys() >= CONTRACT
    assert figures["host_syncs_per_micro_step"] == 0
    assert figures["lerobot_host_syncs_per_micro_step"] >= 1
    assert figures["by_train"].keys() == set(modes)
    assert all(one["loss_difference"] < 1e-6 for one in figures["by_train"].values())
    assert all(figures[f"{train}_speedup"] > 0 for train in modes)


def test_the_scaled_size_at_the_published_width_is_the_published_one():
    assert scaled_size(Scale(2048, 18, 27, 224), vocab_size=257_152) == Pi05Size()
