"""Recordings with the shape of public ones: from the command that `inspect` prints to a policy that LeRobot loads."""

import json
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from recordings import RECORDINGS, TASK

from vlatune import cli

VLATUNE = str(Path(sys.executable).with_name("vlatune"))
FEW = ("--steps=2", "--batch_size=2", "--log_freq=1", "--eval_freq=2", "--eval_samples=4", "--max_restarts=0")


def run(*words: str, cwd: Path) -> str:
    done = subprocess.run([VLATUNE, *words], cwd=cwd, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, f"vlatune {shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def inspected(root: Path, cwd: Path) -> list[str]:
    """Return the words of the command that `vlatune inspect` prints; its exit code is 1 if files are missing."""
    done = subprocess.run([VLATUNE, "inspect", str(root)], cwd=cwd, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.strip().startswith("vlatune train")]
    assert len(lines) == 1, done.stdout + done.stderr
    return shlex.split(lines[0])[1:]


def load(folder: Path) -> tuple[Any, Any]:
    """The policy and its preprocessor, by LeRobot's classes; a tiny PI model is built at its own size."""
    from lerobot.configs import PreTrainedConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    from vlatune.policies.model_size import building_at
    from vlatune.policies.pi05.size import read_size

    config = PreTrainedConfig.from_pretrained(folder)
    size = read_size(folder)
    with nullcontext() if size is None else building_at(size):
        policy = get_policy_class(config.type).from_pretrained(folder)
    return policy, make_pre_post_processors(config, str(folder))[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDINGS)
def test_a_recording_trains_by_the_printed_command(name: str, tmp_path: Path):
    root = RECORDINGS[name](tmp_path / "recording")
    command = inspected(root, tmp_path)
    assert ("--dataset.on_bad_episode=skip" in command) == (name == "missing_videos")
    printed = run(*command, *FEW, "--dataset.eval_split=0.3", "--output_dir=run", cwd=tmp_path)
    assert ("frames are matched with rows by frame_index" in printed) == (name == "wall_clock")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["optimizer_steps"] == 2
    run("eval", "run", "--max_samples=4", "--rollouts=1", cwd=tmp_path)
    run("export", "run", "policy", cwd=tmp_path)
    policy, before = load(tmp_path / "policy")
    observation = {
        key: torch.rand(1, *feature.shape) for key, feature in policy.config.input_features.items() if "." in key
    }
    with torch.no_grad():
        action = policy.select_action(before(observation | {"task": [TASK]}))
    assert action.shape[-1] == policy.config.output_features["action"].shape[0]
    assert torch.isfinite(action).all()


def test_doctor_leaves_the_rate_of_a_clock_alone(tmp_path: Path, capsys):
    """The rows' median rate is the clock's, not the video's: it must not be written into info.json."""
    root = RECORDINGS["wall_clock"](tmp_path / "recording")
    words = [f"--dataset.root={root}", "--recipe=tiny", *FEW, f"--output_dir={tmp_path / 'run'}", "--json=true"]
    capsys.readouterr()
    cli.main(["doctor", *words, f"--html={tmp_path / 'page.html'}"])
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not [one for one in answer["findings"] if one["check"] == "fps"]
    times = [one for one in answer["findings"] if one["check"] == "timestamps"]
    assert [(one["level"], one["flags"]) for one in times] == [("warn", ["--dataset.timestamps=frame_index"])]
    assert "--dataset.timestamps=frame_index" in answer["command"]
