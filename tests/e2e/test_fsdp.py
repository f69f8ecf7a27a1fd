"""Workers that share the weights (--fsdp) learn what workers with all weights learn, and their checkpoints do not depend on it.

Without Ray (`local_runs.py`), except for the run by the command line.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from local_runs import Fault, assert_same_run, run_pair, train_flags
from run_copies import copy_run
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from vlatune import cli
from vlatune.checkpoint.state import EMA, OPTIMIZER, TRAINABLE
from vlatune.checkpoint.store import list_checkpoints
from vlatune.checks.device_memory import plan_footprint
from vlatune.config.settings import DatasetConfig, OptimizerConfig, PolicyConfig, RunConfig
from vlatune.data.meta.dataset_meta import load_meta
from vlatune.data.transforms import apply_all
from vlatune.evaluate.held_out import read_held_out
from vlatune.policies.base import ModuleOptions
from vlatune.registry import get_adapter
from vlatune.run.sinks import read_jsonl
from vlatune.run_setup import make_setup
from vlatune.train.driver.resume_rules import find_resume_point
from vlatune.train.driver.tiny_base import fit_datasets
from vlatune.train.worker.loop import Worker

STEPS, SAVED = 20, 12


@pytest.fixture(scope="module")
def config(dataset_v3, small_base) -> RunConfig:
    """Return a run with accumulation, averaged weights, and a validation of one batch, which both workers need."""
    return RunConfig(
        dataset=DatasetConfig(root=(str(dataset_v3),), eval_split=0.2, run_length=4, window_rows=8),
        policy=PolicyConfig(path=str(small_base), train="full"),
        optimizer=OptimizerConfig(lr=1e-3, ema_decay=0.9),
        num_workers=2,
        batch_size=2,
        grad_accum=2,
        steps=STEPS,
        log_freq=1,
        eval_freq=10,
        eval_samples=6,
        save_freq=SAVED,
        save_every_s=0.0,
        fsdp=True,
    )


def of(config: RunConfig, folder: Path, **changes: object) -> RunConfig:
    return replace(config, output_dir=str(folder), **changes)


def run(config: RunConfig) -> Path:
    run_pair(config)
    return config.run_dir


def assert_close(run_dir: Path, other: Path, first: int = 0, rel: float = 1e-5) -> None:
    for file, keys in (
        ("metrics.jsonl", ("loss", "grad_norm")),
        ("validation.jsonl", ("val_loss", "val_action_error")),
    ):
        ours, theirs = (
            [line for line in read_jsonl(folder / file) if line["optimizer_step"] > first]
            for folder in (run_dir, other)
        )
        assert len(ours) == len(theirs) > 0
        for key in keys:
            assert [line[key] for line in ours] == pytest.approx([line[key] for line in theirs], rel=rel), key


def shapes(run_dir: Path, file: str) -> dict[str, tuple[int, ...]]:
    with safe_open(list_checkpoints(run_dir)[-1] / file, framework="np") as stored:
        return {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118


@pytest.fixture(scope="module")
def sharded(config, tmp_path_factory) -> Path:
    return run(of(config, tmp_path_factory.mktemp("sharded") / "full"))


def test_sharded_workers_learn_what_others_learn(config, sharded, tmp_path):
    other = run(of(config, tmp_path / "ddp", fsdp=False))
    assert_close(sharded, other)
    for file in (TRAINABLE, OPTIMIZER, EMA):
        assert shapes(sharded, file) == shapes(other, file) != {}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("train", ["lora", "expert", "heads", "full"])
@pytest.mark.parametrize("kind", ["pi05", "pi0", "smolvla"])
def test_every_policy_and_mode(config, dataset_v3, tmp_path, kind, train, dtype):
    base, fit = tmp_path / "base", fit_datasets((load_meta(str(dataset_v3)),), seed=3, max_dims=100)
    get_adapter(kind).make_base(base, replace(fit, horizon=5, image_size=48), small=True, place=base)
    policy = PolicyConfig(
        path=str(base), type=kind, train=train, dtype=dtype, gradient_checkpointing=dtype == "bfloat16"
    )
    given = replace(config, policy=policy, steps=STEPS if (kind, train) == ("pi05", "lora") else 6, eval_freq=3)
    ours, theirs = (run(of(given, tmp_path / str(fsdp), fsdp=fsdp)) for fsdp in (True, False))
    assert_close(ours, theirs, rel=1e-5 if dtype == "float32" else 2.0**-8)


@pytest.mark.parametrize("workers", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_checkpoint_of_two_workers_resumes_on_others(config, sharded, tmp_path, workers):
    """One worker holds all weights, four a quarter each."""
    folder = copy_run(sharded, tmp_path / "run")
    shutil.rmtree(list_checkpoints(folder)[-1])
    (folder / "summary.json").unlink()  # as if it had been stopped before its end
    resumed = of(config, folder, resume=True, num_workers=workers, batch_size=4 // workers, fsdp=workers > 1)
    assert find_resume_point(resumed, say=lambda _: None).step == SAVED
    run_pair(resumed)
    assert_close(folder, sharded, first=SAVED)


@pytest.mark.slow
def test_a_killed_run_continues_to_the_last_bit(config, sharded, tmp_path):
    killed = of(config, tmp_path / "run")
    assert run_pair(killed, [Fault("optimizer end", SAVED + 3, rank=1)]) == 1
    assert_same_run(killed.run_dir, sharded)


def count_bytes(worker: Worker) -> None:
    """Write what this worker holds of weights, moments and averages, and how much all workers hold."""
    assert worker.ema
    moments = [one for state in worker.optimizer.state.values() for one in state.values() if one.ndim]
    groups = {
        "weights": list(worker.module.parameters()),
        "moments": moments,
        "ema": list(worker.ema.tensors().values()),
    }
    found = {name: (sum(map(held_bytes, group)), sum(one.nbytes for one in group)) for name, group in groups.items()}
    (worker.config.run_dir / f"bytes-{worker.share.rank}.json").write_text(json.dumps(found))


def held_bytes(tensor: Tensor) -> int:
    """Return the bytes of the memory behind a tensor, not only those that it shows."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage().nbytes()


def test_a_worker_holds_its_part_of_every_tensor(config, tmp_path):
    """Frozen weights are sharded, too; padding to equal parts adds little. `vlatune doctor` estimates it, with gradients."""
    given = of(config, tmp_path / "run", steps=2, eval_freq=2, policy=replace(config.policy, train="lora"))
    run_pair(given, after=count_bytes)
    setup = make_setup(given)
    columns = apply_all(setup.eval_transforms(0), read_held_out(setup, 2))
    footprint = plan_footprint(setup.adapter, setup, ModuleOptions.of(given.policy), columns)
    assert footprint
    estimate = footprint.state_bytes(ema=True, num_workers=2, fsdp=True) - footprint.gathered - footprint.trained // 2
    for rank in range(2):
        found = json.loads((tmp_path / "run" / f"bytes-{rank}.json").read_text())
        for held, total in found.values():
            assert 0.49 < held / total < 0.55
        assert sum(held for held, _ in found.values()) == pytest.approx(estimate, rel=0.05)


@pytest.mark.parametrize(
    ("flags", "printed"),
    [
        (["--num_workers=1"], "add --num_workers=2"),
        (
            ["--policy.type=act", "--policy.train=full"],
            "ACT (--policy.type=act) cannot be sharded, only PI0.5, PI0, SmolVLA",
        ),
        (["--policy.compile=true"], "--policy.compile=true; remove one of them"),
        (["--policy.keep_prefix=true"], "--policy.keep_prefix=true; remove one of them"),
    ],
)
def test_what_cannot_be_sharded_is_a_usage_error(dataset_v3, small_base, tmp_path, capsys, flags, printed):
    given = train_flags(dataset_v3, small_base, "--num_workers=2", "--fsdp=true", f"--output_dir={tmp_path / 'run'}")
    assert cli.main(["train", *given, *flags]) == 2
    assert printed in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_train_with_ray(dataset_v3, small_base, tmp_path, capsys):
    """The command line, Ray Train's process group, and the policy that `eval` loads from a sharded run."""
    more = ("--policy.train=full", "--optimizer.lr=1e-3", "--steps=6", "--eval_freq=3", "--ray.num_cpus=2")
    given = train_flags(dataset_v3, small_base, "--num_workers=2", "--batch_size=2", *more)
    folders = [tmp_path / str(fsdp) for fsdp in (True, False)]
    for folder in folders:
        flags = [f"--output_dir={folder}", "--torch_threads=1", f"--fsdp={folder.name.lower()}"]
        assert cli.main(["train", *given, *flags]) == 0, capsys.readouterr().err
    assert_close(*folders)
    assert cli.main(["eval", str(folders[0]), "--rollouts=0"]) == 0
    assert json.loads((folders[0] / "eval.json").read_text())
