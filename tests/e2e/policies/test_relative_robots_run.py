"""`vlatune train` on two robots with relative actions at another rate, then `eval`, `export` and LeRobot on the export."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported import lerobot_actions, load_lerobot
from recording_writer import write_recording

from vlatune import cli
from vlatune.batch import STATE
from vlatune.config.settings import EvalConfig
from vlatune.evaluate.held_out import by_robot, read_held_out
from vlatune.evaluate.predictions import predict_all
from vlatune.evaluate.subject import open_subject
from vlatune.export.model_card import CARD
from vlatune.policies.base import trained_tensors
from vlatune.run.sinks import read_jsonl

pytestmark = pytest.mark.slow
EVERY = ("--max_samples=1000", "--rollouts=1", "--device=cpu", "--json")
CHUNK = 4
CAMERAS = ("observation.images.top", "observation.images.wrist")


@pytest.fixture(scope="module")
def roots(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("robots")
    two = ("left_shoulder", "left_elbow", "left_gripper", "right_shoulder", "right_gripper")
    return [
        write_recording(folder / "arm", ("gripper", "shoulder", "elbow"), state_dim=4, fps=20, cameras=CAMERAS),
        write_recording(folder / "two_arms", two, state_dim=6, fps=30, seed=1),
    ]


@pytest.fixture(scope="module")
def run_dir(roots, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    flags = [
        "--recipe=pi0-tiny",
        *(f"--dataset.root={root}" for root in roots),
        "--policy.use_relative_actions=true",
        "--policy.relative_exclude_joints=[gripper]",
        f"--policy.chunk_size={CHUNK}",
        f"--policy.n_action_steps={CHUNK}",
        "--dataset.action_fps=10",
        "--dataset.eval_split=0.25",
        "--batch_size=8",
        "--steps=4",
        "--eval_freq=2",
        "--eval_samples=1000",
        f"--output_dir={folder}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "vlatune.cli", "train", *flags], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def figures(capsys, path: Path, *words: object) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main(["eval", str(path), *map(str, words), *EVERY]) == cli.OK, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_validation_evaluation_and_exports_agree_with_each_other_and_with_lerobot(run_dir, roots, tmp_path, capsys):
    validations, own = read_jsonl(run_dir / "validation.jsonl"), figures(capsys, run_dir)
    assert [one["optimizer_step"] for one in validations] == [2, 4]
    assert validations[-1]["val_loss"] == pytest.approx(own["val_loss"], rel=1e-4)
    assert validations[-1]["val_action_error"] == pytest.approx(own["action_error"], rel=1e-4)
    assert own["action_fps"] == 10
    options = EvalConfig(max_samples=1000)
    subject = open_subject(run_dir, options)
    setup = subject.setup
    module: Any = setup.adapter.load_module(setup.policy, setup.binding, subject.options, stats=setup.stats).eval()
    subject.load(trained_tensors(module))
    rows_of = dict(by_robot(setup, read_held_out(setup, options.max_samples)))
    for number, root in enumerate(roots):
        folder, mine, part = tmp_path / f"robot_{number}", own["datasets"][number], setup.binding.parts[number]
        assert cli.main(["export", str(run_dir), str(folder), f"--dataset={number}"]) == cli.OK
        assert "--fps=10 " in (folder / CARD).read_text()
        other = figures(capsys, folder, f"--dataset.root={root}", f"--dataset.episodes={json.dumps(mine['episodes'])}")
        assert other["action_fps"] == 10
        assert other["num_samples"] == mine["num_samples"]
        for key in ("val_loss", "action_error", "per_dim_error", "mean_action_error"):
            assert other[key] == pytest.approx(mine[key], rel=1e-4), key
        assert other["rollouts"]["replan_every"] == CHUNK * (2, 3)[number]
        rows = {name: values[:3] for name, values in rows_of[number].items()}
        ours = predict_all(setup, module, rows, options, blanks=("none",), dataset=number)["none"].predicted_NTA
        generator = torch.Generator().manual_seed(options.seed)
        noise = torch.randn(CHUNK, setup.policy.max_action_dim, generator=generator).expand(3, -1, -1).contiguous()
        robots = {**rows, STATE: rows[STATE][:, : part.state_dim]}
        theirs = lerobot_actions(folder, load_lerobot(folder), robots, part, noise)
        np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-4)
