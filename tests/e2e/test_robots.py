"""Three robots with different dims, cameras and fps in one run: shares, rows, masks, losses, resume, evaluation and export."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported import lerobot_actions, load_lerobot, noise_for
from local_runs import assert_same_run, no_ray
from recording_writer import write_recording

from vlatune import cli
from vlatune.batch import (
    ACTION,
    ACTION_DIM_MASK,
    ACTION_IS_PAD,
    CAMERA_MASK,
    IDS,
    NOISE,
    SLOT,
    STATE,
    STEP_ACTIONS,
    TIME,
    TOKENS,
    Columns,
)
from vlatune.checkpoint.state import load_result
from vlatune.checkpoint.store import list_checkpoints
from vlatune.config.flags import parse_flags
from vlatune.config.settings import DatasetConfig, PolicyConfig, RunConfig
from vlatune.config.validate import validate
from vlatune.data.meta.dataset_meta import load_meta
from vlatune.data.transforms import Normalise, apply_all
from vlatune.evaluate.held_out import read_held_out
from vlatune.policies.base import ModuleOptions
from vlatune.policies.pi05.tiny import make_tiny_pi05
from vlatune.run.sinks import read_jsonl
from vlatune.run.summary import read_summary
from vlatune.run_setup import Setup, make_setup
from vlatune.train.data_preview import mixture_lines

TOP, WRIST, SIDE = (f"observation.images.{name}" for name in ("top", "wrist", "side"))
ROBOTS: dict[str, dict[str, Any]] = {
    "arm": {"lengths": (10,) * 6, "cameras": (TOP, WRIST), "fps": 10, "state_dim": 3, "action_dim": 3},
    "gripper": {"lengths": (8,) * 4, "cameras": (TOP,), "fps": 5, "side": 80, "state_dim": 5, "action_dim": 2},
    "two_arms": {"lengths": (12,) * 3, "cameras": (TOP, WRIST, SIDE), "fps": 20, "state_dim": 7, "action_dim": 6},
}
WEIGHTS = (0.2, 0.5, 0.3)


def make_robot(folder: Path, action_dim: int, **options: Any) -> Path:
    names = [f"{folder.name}_{number}" for number in range(action_dim)]
    return write_recording(folder, names, task=f"use the {folder.name}", **options)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("robots")
    return [make_robot(folder / name, seed=seed, **robot) for seed, (name, robot) in enumerate(ROBOTS.items())]


@pytest.fixture(scope="module")
def base(roots: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    tasks = sorted({task for root in roots for task in load_meta(str(root)).tasks})
    return make_tiny_pi05(
        tmp_path_factory.mktemp("base") / "small",
        cameras=(TOP, WRIST, SIDE),
        state_dim=7,
        action_dim=6,
        horizon=5,
        image_size=48,
        tasks=tasks,
    )


@pytest.fixture(scope="module")
def config(roots: list[Path], base: Path) -> RunConfig:
    return RunConfig(
        dataset=DatasetConfig(
            root=tuple(map(str, roots)), weight=WEIGHTS, eval_split=0.25, run_length=4, window_rows=8
        ),
        policy=PolicyConfig(path=str(base), train="full"),
        batch_size=8,
    )


@pytest.fixture(scope="module")
def setup(config: RunConfig) -> Setup:
    return make_setup(config, preflight=True)


def alone(config: RunConfig, number: int) -> Setup:
    """Return the setup of a run on one of the datasets."""
    return make_setup(
        replace(config, dataset=replace(config.dataset, root=config.dataset.root[number : number + 1], weight=()))
    )


def rows_of(setup: Setup, number: int) -> Columns:
    rows = read_held_out(setup, 200)
    return {name: values[rows["dataset_index"] == number] for name, values in rows.items()}


def as_batch(columns: Columns) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(values) for key, values in columns.items() if key not in (*IDS, SLOT)}


def test_every_robot_has_held_out_episodes(setup: Setup) -> None:
    assert np.bincount(setup.held_out.dataset).tolist() == [2, 1, 1]
    assert len(setup.training) + len(setup.held_out) == 13


@pytest.mark.parametrize("number", range(3))
def test_rows_equal_those_of_a_run_on_one_robot(config: RunConfig, setup: Setup, number: int) -> None:
    """Each robot has its own statistics and dims; the rest is zero and masked."""
    single, part = alone(config, number), setup.binding.parts[number]
    raw = rows_of(setup, number)
    made = apply_all(setup.eval_transforms(0), raw)
    own = {
        name: values
        for name, values in raw.items()
        if name not in {camera.column for camera in setup.specs[number].absent}
    }
    own |= {STATE: raw[STATE][..., : part.state_dim], ACTION: raw[ACTION][..., : part.action_dim]}
    own |= {"dataset_index": np.zeros_like(raw["dataset_index"])}
    wanted = apply_all(single.eval_transforms(0), own)
    np.testing.assert_array_equal(made[TOKENS], wanted[TOKENS])
    np.testing.assert_array_equal(made[ACTION], wanted[ACTION])  # both padded to the policy's dims
    np.testing.assert_array_equal(made[STATE][:, : part.state_dim], wanted[STATE])
    assert not made[STATE][:, part.state_dim :].any()
    assert made[ACTION_DIM_MASK].sum(axis=1).tolist() == [part.action_dim] * len(raw["index"])
    assert made[CAMERA_MASK].all(axis=0).tolist() == [
        camera in dict(part.cameras).values() for camera in (TOP, WRIST, SIDE)
    ]
    for camera, there in zip((TOP, WRIST, SIDE), made[CAMERA_MASK].all(axis=0), strict=True):
        assert made[camera].any() == there
        if there:
            np.testing.assert_array_equal(made[camera], wanted[camera])


def test_action_chunks_are_in_frames_or_resampled(config: RunConfig, setup: Setup) -> None:
    def offsets(setup: Setup) -> list[Any]:
        return [vector.offsets for spec in setup.specs for vector in spec.vectors if vector.column == ACTION]

    assert offsets(setup) == [(0, 1, 2, 3, 4)] * 3
    resampled = make_setup(replace(config, dataset=replace(config.dataset, action_fps=10)))
    assert offsets(resampled) == [(0, 1, 2, 3, 4), (0, 1, 1, 2, 2), (0, 2, 4, 6, 8)]
    printed = mixture_lines(setup)
    assert "20.0% of the samples; 3 state and 3 action dims; without observation.images.side" in printed[1]
    assert "5 actions reach 0.80 s at 5 frames per second" in printed[2]
    assert "5 actions reach 0.20 s at 20 frames per second" in printed[3]


@pytest.fixture(scope="module")
def module(setup: Setup) -> Any:
    return setup.adapter.load_module(setup.policy, setup.binding, ModuleOptions("full", "float32")).train()


@pytest.fixture(scope="module")
def mixed(setup: Setup) -> Columns:
    """Return a batch that is a complete optimizer step."""
    rows = apply_all(setup.eval_transforms(0), read_held_out(setup, 200))
    dataset_N, valid_N = rows["dataset_index"], (~rows[ACTION_IS_PAD]).sum(axis=1)
    mean_D = np.bincount(dataset_N, weights=valid_N) / np.bincount(dataset_N)
    return rows | {STEP_ACTIONS: (mean_D * len(dataset_N)).astype(np.float32)[dataset_N]}


def test_loss_of_a_mixed_batch_equals_each_robots_loss(
    config: RunConfig, setup: Setup, module: Any, mixed: Columns
) -> None:
    losses_B = module(as_batch(mixed)).loss_B
    assert losses_B.shape == (len(mixed["index"]),)
    shares, gradients = [], []
    for number in range(3):
        part, single = mixed["dataset_index"] == number, alone(config, number)
        raw = rows_of(setup, number) | {"dataset_index": np.zeros(part.sum(), np.int64)}
        dims = setup.binding.parts[number]
        raw |= {STATE: raw[STATE][..., : dims.state_dim], ACTION: raw[ACTION][..., : dims.action_dim]}
        columns = apply_all(single.eval_transforms(0), raw) | {key: mixed[key][part] for key in (NOISE, TIME)}
        own: Any = single.adapter.load_module(single.policy, single.binding, ModuleOptions("full", "float32")).train()
        loss = own(as_batch(columns)).loss
        torch.testing.assert_close(losses_B[torch.from_numpy(part)].mean(), loss, rtol=1e-6, atol=0)
        loss.backward()
        shares.append(part.mean())
        gradients.append({name: p.grad for name, p in own.named_parameters() if p.grad is not None})
    losses_B.mean().backward()
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            wanted = sum(share * one[name] for share, one in zip(shares, gradients, strict=True))
            assert (parameter.grad - wanted).norm() <= 1e-5 * wanted.norm() + 1e-9, name
            parameter.grad = None


def test_noise_samples_of_one_sample_are_averaged(setup: Setup, mixed: Columns) -> None:
    """The loss of a sample is the mean over its noise samples."""
    two: Any = setup.adapter.load_module(
        setup.policy, setup.binding, ModuleOptions("expert", "float32", flow_samples=2)
    )
    one: Any = setup.adapter.load_module(setup.policy, setup.binding, ModuleOptions("expert", "float32"))
    other = {NOISE: -mixed[NOISE], TIME: 1 - mixed[TIME]}
    both = mixed | {key: np.concatenate([mixed[key], other[key]], axis=1) for key in other}
    with torch.no_grad():
        singles = [one(as_batch(mixed)).loss_B, one(as_batch(mixed | other)).loss_B]
        torch.testing.assert_close(two(as_batch(both)).loss_B, torch.stack(singles).mean(dim=0), rtol=1e-5, atol=1e-7)


def test_robots_flag_rejects_different_robots(config: RunConfig) -> None:
    with pytest.raises(ValueError, match="datasets that are trained together must agree"):
        make_setup(replace(config, dataset=replace(config.dataset, robots="one")))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dataset.weight_temperature=2"], "for several roots"),
        (["--dataset.root=b", "--dataset.weight_temperature=0"], "must be 0.01 or more"),
        (["--dataset.root=b", "--dataset.weight_temperature=2", "--dataset.weight=[1,2]"], "without --dataset.weight"),
        (["--dataset.action_fps=0"], "--dataset.action_fps=0.0: must be above 0"),
        (["--dataset.robots=several"], "there is one --dataset.root"),
    ],
)
def test_invalid_flags_are_rejected(flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match="--dataset") as caught:
        validate(parse_flags(["--dataset.root=a", "--recipe=tiny", *flags], RunConfig))
    assert message in str(caught.value)


@pytest.fixture(scope="module")
def flags(config: RunConfig) -> list[str]:
    return [
        *(f"--dataset.root={root}" for root in config.dataset.root),
        *(f"--dataset.weight={weight}" for weight in WEIGHTS),
        "--dataset.eval_split=0.25",
        "--dataset.run_length=4",
        "--dataset.window_rows=8",
        "--dataset.image_transforms.enable=true",
        f"--policy.path={config.policy.path}",
        "--policy.train=expert",
        "--batch_size=8",
        "--steps=4",
        "--log_freq=4",
        "--save_freq=3",
        "--log_samples=true",
        "--max_restarts=0",
    ]


@pytest.fixture(scope="module")
def run_dir(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "robots"
    with no_ray():
        assert cli.main(["train", *flags, f"--output_dir={folder}"]) == 0
    return folder


def test_run_records_the_loss_of_every_dataset(run_dir: Path) -> None:
    (line,) = read_jsonl(run_dir / "metrics.jsonl")
    taken = np.array([sample for record in read_jsonl(run_dir / "samples.jsonl") for sample in record["samples"]])
    counts = np.bincount(taken[:, 0], minlength=3)
    assert counts.sum() == 32
    assert counts.min() > 0
    assert np.average(line["loss_by_dataset"], weights=counts) == pytest.approx(line["loss"], rel=1e-5)
    assert len(line["loss_by_dim"]) == 6
    summary = read_summary(run_dir)
    assert summary is not None
    worst = [one["loss"] for one in summary.loss_by_episode]
    assert worst == sorted(worst, reverse=True)
    assert sum(one["samples"] for one in summary.loss_by_episode) == 16  # of the second half
    page = (run_dir / "report.html").read_text()
    assert "Loss by dataset" in page
    assert ", augmented</figcaption>" in page


def test_run_resumes_bit_exactly_between_two_log_lines(run_dir: Path, flags: list[str], tmp_path: Path) -> None:
    again = tmp_path / "again"
    shutil.copytree(run_dir, again)
    shutil.rmtree(again / "checkpoints" / "00000004")
    (again / "summary.json").unlink()
    with no_ray():
        assert cli.main(["train", *flags, f"--output_dir={again}"]) == 0
    assert_same_run(again, run_dir)
    (ours,), (theirs,) = (read_jsonl(folder / "metrics.jsonl") for folder in (again, run_dir))
    assert ours["loss_by_dataset"] == theirs["loss_by_dataset"]


def test_every_dataset_is_evaluated_separately(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", str(run_dir), "--max_samples=40", "--device=cpu"]) == 0
    text, figures = capsys.readouterr().out, json.loads((run_dir / "eval.json").read_text())
    assert [one["dataset"] for one in figures["datasets"]] == [0, 1, 2]
    assert [len(one["per_dim_error"]) for one in figures["datasets"]] == [3, 2, 6]
    for key in ("val_loss", "action_error", "mean_action_error", "blank_images_error"):
        counts = [one["num_samples"] for one in figures["datasets"]]
        assert figures[key] == pytest.approx(np.average([one[key] for one in figures["datasets"]], weights=counts))
    assert "by dataset, each in its own units" in text
    assert ["blank_camera_errors" in one for one in figures["datasets"]] == [
        True,
        False,
        True,
    ]  # one robot has one camera
    assert {one["dataset"] for one in figures["rollouts"]["episodes"]} == {0, 1, 2}
    assert [len(one["rollouts"]["per_dim_error"]) for one in figures["datasets"]] == [3, 2, 6]
    assert "Complete episodes" in (run_dir / "report.html").read_text()
    assert "always the mean action</th>" in (run_dir / "report.html").read_text()


def test_export_needs_one_robot(run_dir: Path, config: RunConfig, setup: Setup, tmp_path: Path, capsys: Any) -> None:
    assert cli.main(["export", str(run_dir), str(tmp_path / "none")]) != 0
    assert (
        "the run was trained on 3 robots, and an exported folder has the dims, cameras and statistics of one"
        in capsys.readouterr().err
    )
    assert cli.main(["export", str(run_dir), str(tmp_path / "four"), "--dataset=3"]) != 0
    for number in (0, 1):
        folder, part = tmp_path / f"robot_{number}", setup.binding.parts[number]
        assert cli.main(["export", str(run_dir), str(folder), f"--dataset={number}"]) == 0
        rows = {name: values[:2] for name, values in rows_of(setup, number).items()}
        module: Any = setup.adapter.load_module(setup.policy, setup.binding, ModuleOptions("expert", "float32"))
        load_result(list_checkpoints(run_dir)[-1], {n: p for n, p in module.named_parameters() if p.requires_grad})
        noise, transforms = noise_for(setup.policy, rows), setup.eval_transforms(0)
        chunk = module.eval().predict(as_batch(apply_all(transforms, rows)), noise).numpy()[..., : part.action_dim]
        (unscale,) = (one for one in transforms if isinstance(one, Normalise) and one.key == ACTION)
        robots = {**rows, STATE: rows[STATE][:, : part.state_dim]}
        made = lerobot_actions(folder, load_lerobot(folder), robots, part, noise)
        np.testing.assert_allclose(made, unscale.of_dataset(number, part.action_dim).inverse(chunk), rtol=0, atol=2e-5)
