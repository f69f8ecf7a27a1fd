"""A small PI0 through the command line: it learns the demo's task, its sentence included."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EPISODES, FRAMES = 256, 20
"""Of the demo's dataset."""


def vlatune(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "vlatune.cli", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_it_learns_the_demos_task(tmp_path: Path) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    vlatune("make-dataset", str(data), f"--episodes={EPISODES}", f"--frames={FRAMES}")
    vlatune("train", "--recipe=pi0-tiny", f"--dataset.root={data}", f"--output_dir={run}")
    figures = json.loads(vlatune("eval", str(run), "--json=true").splitlines()[-1])
    assert figures["action_error"] <= 0.5 * figures["mean_action_error"]
    assert figures["blank_sentence_error"] > 1.5 * figures["action_error"]
    assert figures["blank_images_error"] > 1.5 * figures["action_error"]
