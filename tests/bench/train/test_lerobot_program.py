"""LeRobot's own `lerobot-train` as `vlatune bench train` calls it, for every policy, on a small run in this process."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vlatune.bench.options import PolicyBench, TrainBench
from vlatune.bench.train import lerobot_main
from vlatune.bench.train import train_programs as ways
from vlatune.bench.train.time_to_quality import ErrorMeter, lerobot_folder
from vlatune.bench.train.train_cases import make_job
from vlatune.policies.registry import PACKAGES

pytestmark = pytest.mark.early

STEPS = 2


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The program reads `sys.argv`, sets up the root logger and torch's precision, and Accelerate the environment."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    root, environment = logging.getLogger(), dict(os.environ)
    handlers, level, precision = list(root.handlers), root.level, torch.get_float32_matmul_precision()
    tf32, benchmark = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = tf32, benchmark
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]


@pytest.mark.parametrize("kind", PACKAGES)
def test_it_trains_every_policy_on_the_base_that_ours_begins_with(kind, dataset_v3: Path, tmp_path, capfd):
    options = TrainBench(
        policy=PolicyBench(kind),
        config="video",
        root=str(dataset_v3),
        steps=STEPS,
        batch_size=2,
        eval_split=0.2,
        num_workers=0,
    )
    job = make_job(options, tmp_path)
    (tmp_path / "lerobot").mkdir()
    program = ways.lerobot(job, tmp_path / "lerobot")
    _, flag, module, base, *flags = program.command
    assert (flag, module) == ("-m", lerobot_main.__name__)
    lerobot_main.main(base, flags)
    said = "".join(capfd.readouterr()).encode().splitlines()
    assert sum(map(program.is_mark, said)) == STEPS // job.config.log_freq
    meter = ErrorMeter(job, max_samples=2)
    before, after = meter.error_of(Path(base)), meter.error_of(lerobot_folder(job, tmp_path / "lerobot", STEPS))
    assert 0 < after != before
