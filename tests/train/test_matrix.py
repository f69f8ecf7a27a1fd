"""Every way to train, in each dtype, with one draw or several, on one worker or two: to the robot and back.

`vlatune train`, the same again with `--resume`, `vlatune export`, LeRobot's own loading. What LeRobot then holds is what
the checkpoint holds, tensor by tensor, and does what ours does. Here without Ray, which knows nothing of ways and dtypes; with
it in test_matrix_with_ray.py.
"""

from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported import lerobot_actions, load_lerobot, noise_for
from safetensors.torch import load_file
from torch import Tensor
from without_ray import no_ray

from vlatune import cli
from vlatune.batch import ACTION, IDS, SLOT
from vlatune.checkpoint.state import load_result
from vlatune.checkpoint.store import list_checkpoints
from vlatune.config import RunConfig
from vlatune.evaluate.held_out import read_held_out
from vlatune.pipeline.transforms import Normalise, apply_all
from vlatune.policies.base import ModuleOptions
from vlatune.policies.pi05 import POLICY
from vlatune.report.run_folder import read_config
from vlatune.run_setup import make_setup

DTYPES, DRAWS, WORKERS = ("float32", "bfloat16"), (1, 4), (1, 2)
CASES = tuple(product(POLICY.train_ways, DTYPES, DRAWS, WORKERS))
LORA_SCALE = 16.0 / 16
BF16 = 2.0**-8

ALWAYS = (
    ("full", "bfloat16", 4, 1),
    ("full", "float32", 1, 1),
    ("heads", "float32", 4, 1),
    ("heads", "bfloat16", 1, 1),
    ("expert", "bfloat16", 4, 1),
    ("expert", "float32", 1, 1),
    ("lora", "bfloat16", 1, 1),
    ("lora", "float32", 4, 1),
)
"""Every pair of way, dtype and draws. Two workers are in test_every_fault.py."""


@pytest.fixture
def run(dataset_v3, small_base, tmp_path, capsys):
    def run(train: str, dtype: str, draws: int, workers: int, *, with_ray: bool = False) -> Path:
        """Train two steps, resume for a third; the run folder."""
        flags = [
            f"--dataset.root={dataset_v3}",
            "--dataset.eval_split=0.2",
            "--dataset.run_length=4",
            "--dataset.window_rows=8",
            f"--policy.path={small_base}",
            f"--policy.train={train}",
            f"--policy.dtype={dtype}",
            f"--policy.flow_samples={draws}",
            f"--num_workers={workers}",
            f"--batch_size={4 // workers}",
            "--optimizer.lr=0.01",
            "--scheduler.num_warmup_steps=0",
            "--max_restarts=0",
            f"--output_dir={tmp_path / 'run'}",
        ]
        for more in (["--steps=2"], ["--steps=3", "--resume=true"]):
            with nullcontext() if with_ray else no_ray():
                assert cli.main(["train", *flags, *more]) == 0, capsys.readouterr().err
        assert "continuing from" in capsys.readouterr().out
        return tmp_path / "run"

    return run


def stored_tensors(run_dir: Path, base: Path, dtypes: dict[str, torch.dtype]) -> dict[str, Tensor]:
    """The base's file with the checkpoint's over it, adapters folded in, rounded as LeRobot rounds."""
    wanted = {name: tensor.to(dtypes[name]) for name, tensor in load_file(base / "model.safetensors").items()}
    checkpoint = list_checkpoints(run_dir)[-1]
    trained = {
        name.removeprefix("policy."): tensor for name, tensor in load_file(checkpoint / "trainable.safetensors").items()
    }
    for name, tensor in trained.items():
        layer, _, adapter = name.partition(".lora_A.")
        if adapter:
            change = LORA_SCALE * (trained[name.replace(".lora_A.", ".lora_B.")] @ tensor)
            wanted[f"{layer}.weight"] = (wanted[f"{layer}.weight"].float() + change).to(dtypes[f"{layer}.weight"])
        elif ".lora_B." not in name:
            assert not torch.equal(tensor, wanted[name].float()), f"{name} was not trained"
            wanted[name] = tensor.to(dtypes[name])
    return wanted


def our_actions(config: RunConfig, run_dir: Path, rows: Any) -> np.ndarray:
    """As evaluation computes them."""
    setup = make_setup(config)
    options = replace(ModuleOptions.of(config.policy), flow_samples=1)
    module: Any = setup.adapter.load_module(setup.policy, setup.binding, options)
    load_result(list_checkpoints(run_dir)[-1], {n: p for n, p in module.named_parameters() if p.requires_grad})
    transforms = setup.eval_transforms(0)
    columns = apply_all(transforms, rows)
    batch = {key: torch.from_numpy(value) for key, value in columns.items() if key not in (*IDS, SLOT)}
    chunk = module.eval().predict(batch, noise_for(setup.policy, rows)).numpy()
    (unscale,) = (one for one in transforms if isinstance(one, Normalise) and one.key == ACTION)
    return unscale.inverse(chunk)


def check(run_dir: Path, base: Path, folder: Path, *, step: int) -> None:
    """What is exported of its newest checkpoint, that of `step`, is what LeRobot holds, and does what ours does."""
    assert list_checkpoints(run_dir)[-1].name == f"{step:08d}"
    assert cli.main(["export", str(run_dir), str(folder)]) == 0
    policy = load_lerobot(folder)
    theirs = dict(policy.named_parameters())
    wanted = stored_tensors(run_dir, base, {name: tensor.dtype for name, tensor in theirs.items()})
    assert theirs.keys() == wanted.keys()
    assert [name for name, tensor in theirs.items() if not torch.equal(tensor, wanted[name])] == []
    config = read_config(run_dir)
    setup = make_setup(config)
    rows = read_held_out(setup, 2)
    robot = lerobot_actions(folder, policy, rows, setup.binding, noise_for(setup.policy, rows))
    ours = our_actions(config, run_dir, rows)
    # In bfloat16 LeRobot rounds what trained in float32; with these weights, equal as they are, it can do no other.
    rounding = 1e-6 if config.policy.dtype == "float32" else 8 * BF16
    np.testing.assert_allclose(robot, ours, rtol=0, atol=rounding * float(np.abs(ours).max()))


@pytest.mark.parametrize(("train", "dtype", "draws", "workers"), ALWAYS)
def test_one_worker(run, small_base, tmp_path, train, dtype, draws, workers):
    check(run(train, dtype, draws, workers), small_base, tmp_path / "exported", step=3)
