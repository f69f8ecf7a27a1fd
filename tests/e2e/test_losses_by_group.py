"""The losses by action dim, task and episode add up to the loss of every policy."""

import json

import numpy as np
import pytest
from local_runs import no_ray

from vlatune import cli
from vlatune.registry import PACKAGES, get_policy_info
from vlatune.run.sinks import read_jsonl

BATCH, STEPS = 4, 4


@pytest.mark.parametrize("name", PACKAGES)
def test_losses_by_group_add_up_to_the_loss(name, dataset_v3, tmp_path, capsys):
    recipe = get_policy_info(name).small_recipe
    flags = [
        f"--dataset.root={dataset_v3}",
        "--dataset.run_length=4",
        "--dataset.window_rows=8",
        "--dataset.eval_split=0",
    ]
    flags += [f"--steps={STEPS}", f"--batch_size={BATCH}", "--log_freq=1", "--max_restarts=0"]
    with no_ray():
        code = cli.main(["train", f"--recipe={recipe}", *flags, f"--output_dir={tmp_path / 'run'}"])
    assert code == 0, capsys.readouterr().err
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) == STEPS
    for line in lines:
        by_task = [loss for loss in line["loss_by_task"].values() if loss is not None]
        assert min(by_task) <= max(line["loss"], *line["loss_by_dim"])
        if name == "act":  # its loss includes the divergence of the latent
            assert 0 < np.mean(line["loss_by_dim"]) <= line["loss"]
        else:
            assert np.mean(line["loss_by_dim"]) == pytest.approx(line["loss"], rel=1e-4)
    reported = json.loads((tmp_path / "run" / "summary.json").read_text())["loss_by_episode"]
    assert sum(one["samples"] for one in reported) == STEPS // 2 * BATCH
