"""`--from_lerobot` makes the run that `lerobot-train` would: its learning rates and its held-out episodes."""

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lerobot.configs.default import DatasetConfig
from lerobot.configs.train import TrainPipelineConfig
from lerobot.datasets.factory import make_train_eval_datasets
from lerobot.optim.schedulers import CosineDecayWithWarmupSchedulerConfig
from lerobot.policies.act import ACTConfig

from vlatune.config.flags import parse_flags
from vlatune.config.settings import RunConfig
from vlatune.run_setup import make_setup
from vlatune.train.worker.optimizer import learning_rate


def test_rates_where_the_schedules_peak_is_not_the_optimizers():
    flags = (
        "--policy.path=lerobot/pi05_base --policy.type=pi05 --dataset.repo_id=me/fold --use_policy_training_preset=false --steps=50 "
        "--optimizer.type=adamw --optimizer.lr=4e-5 --scheduler.type=cosine_decay_with_warmup --scheduler.num_warmup_steps=5 "
        "--scheduler.num_decay_steps=40 --scheduler.peak_lr=1e-4 --scheduler.decay_lr=1e-5"
    )
    ours = parse_flags([f"--from_lerobot=lerobot-train {flags}"], RunConfig)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=4e-5)
    schedule = CosineDecayWithWarmupSchedulerConfig(5, 40, 1e-4, 1e-5).build(optimizer, 50)
    for step in range(50):
        rate = learning_rate(step, ours.steps, ours.optimizer.lr, ours.scheduler)
        assert rate == pytest.approx(schedule.get_last_lr()[0], rel=1e-12), step
        optimizer.step()
        schedule.step()


@pytest.fixture
def several_tasks(dataset_v3, tmp_path) -> Path:
    """Seven episodes of two tasks; one episode has both, and counts by its first."""
    folder = shutil.copytree(dataset_v3, tmp_path / "several")
    names = pq.read_table(folder / "meta/tasks.parquet").column("task").to_pylist()[:2]
    texts = [[names[0]], [names[1]], [names[0]], [names[1], names[0]], [names[0]], [names[0]], [names[1]]]
    for file in sorted((folder / "meta/episodes").rglob("*.parquet")):
        table = pq.read_table(file)
        kept = [texts[index] for index in table.column("episode_index").to_pylist()]
        at = table.column_names.index("tasks")
        pq.write_table(table.set_column(at, "tasks", pa.array(kept, pa.list_(pa.string()))), file)
    return folder


@pytest.mark.parametrize(("share", "episodes"), [(0.2, None), (0.5, None), (0.34, [0, 1, 2, 3, 5])])
def test_held_out_episodes(several_tasks, small_base, share, episodes):
    policy = ACTConfig(device="cpu", push_to_hub=False, pretrained_backbone_weights=None)
    dataset = DatasetConfig("me/several", root=str(several_tasks), eval_split=share, episodes=episodes)
    training, held_out = make_train_eval_datasets(TrainPipelineConfig(dataset=dataset, policy=policy))
    command = f"lerobot-train --policy.path={small_base} --dataset.repo_id=me/several --dataset.root={several_tasks} --dataset.eval_split={share}"
    command += f" --dataset.episodes={episodes}".replace(", ", ",") if episodes else ""
    setup = make_setup(parse_flags([f"--from_lerobot={command}", "--batch_size=4"], RunConfig))
    assert setup.held_out.position.tolist() == sorted(held_out.episodes)
    assert setup.training.position.tolist() == sorted(training.episodes)
    random = parse_flags([f"--from_lerobot={command}", "--dataset.hold_out=random", "--batch_size=4"], RunConfig)
    assert len(make_setup(random).held_out) >= 1
