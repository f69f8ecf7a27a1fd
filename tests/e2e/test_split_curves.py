"""A run's curves are the same to rounding for 1 worker x 8, 2 workers x 4 and 1 worker x 4 x 2 micro-steps, for every policy.

With padded chunks, augmentation and averaged weights. Without Ray (`local_runs.py`).
"""

from dataclasses import replace
from pathlib import Path

import pytest
from local_runs import no_ray, run_pair
from safetensors.torch import load_file

from vlatune import cli
from vlatune.checkpoint.store import list_checkpoints
from vlatune.registry import PACKAGES, get_policy_info
from vlatune.run.run_folder import read_config
from vlatune.run.sinks import read_jsonl

pytestmark = pytest.mark.slow
STEPS = 6
OWN = {
    "pi05": ["--policy.flow_samples=2"],
    "smolvla": ["--policy.train=full"],
    "act": ["--policy.dropout=0"],
    "diffusion": ["--policy.do_mask_loss_for_padding=true", "--policy.use_group_norm=true"],
}
"""Policy -> its own flags. Dropout and batch norms depend on the micro-batch, in LeRobot too."""


def flags_of(name: str, dataset: Path, folder: Path, *more: str) -> list[str]:
    return [
        f"--recipe={get_policy_info(name).small_recipe}",
        f"--dataset.root={dataset}",
        "--dataset.eval_split=0.2",
        "--dataset.run_length=4",
        "--dataset.window_rows=8",
        "--dataset.image_transforms.enable=true",
        "--optimizer.ema_decay=0.9",
        "--optimizer.lr=1e-4",
        f"--steps={STEPS}",
        "--log_freq=1",
        f"--eval_freq={STEPS // 2}",
        "--eval_samples=8",
        "--save_freq=0",
        "--save_every_s=0",
        "--log_samples=true",
        "--max_restarts=0",
        f"--output_dir={folder}",
        *OWN.get(name, ()),
        *more,
    ]


def assert_same_curves(folder: Path, other: Path) -> None:
    ours, theirs = (read_jsonl(one / "metrics.jsonl") for one in (folder, other))
    assert [line["optimizer_step"] for line in ours] == list(range(1, STEPS + 1))
    for key in ("loss", "grad_norm", "loss_by_dim"):
        for one, two in zip(ours, theirs, strict=True):
            assert one[key] == pytest.approx(two[key], rel=1e-4), (key, one["optimizer_step"])
    assert read_jsonl(folder / "samples.jsonl") == read_jsonl(other / "samples.jsonl")
    for one, two in zip(*(read_jsonl(run / "validation.jsonl") for run in (folder, other)), strict=True):
        assert one == pytest.approx(two, rel=1e-4)
    for file in ("trainable.safetensors", "ema.safetensors"):
        weights, wanted = (load_file(list_checkpoints(run)[-1] / file) for run in (folder, other))
        assert weights.keys() == wanted.keys()
        # Adam moves a weight whose gradient is nearly 0 by its rate in a direction that rounding decides.
        differ = sum(float((weights[name] - wanted[name]).abs().sum()) for name in wanted)
        assert differ <= 1e-5 * sum(float(one.abs().sum()) for one in wanted.values())


@pytest.mark.parametrize("name", PACKAGES)
def test_curves_do_not_depend_on_the_split(name, dataset_v3, tmp_path, capsys):
    whole, accumulated, both = (tmp_path / one / "run" for one in ("whole", "accumulated", "both"))
    for folder, split in ((whole, ["--batch_size=8"]), (accumulated, ["--batch_size=4", "--grad_accum=2"])):
        with no_ray():
            assert cli.main(["train", *flags_of(name, dataset_v3, folder, *split)]) == 0, capsys.readouterr().err
    config = replace(read_config(whole), num_workers=2, batch_size=4, output_dir=str(both))
    both.parent.mkdir()
    assert run_pair(config) == 0
    for folder in (accumulated, both):
        assert_same_curves(folder, whole)
